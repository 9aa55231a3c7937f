"""The start page: waiting, running and failed sessions, overdue posts, costs, and the oldest held lock.

Each tile shows a few rows and links to the full list. Users only see the tiles of models that they may view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from django.contrib.admin import AdminSite
from django.db.models import F, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import (
    MOST_TENANTS,
    ReadOnlyAdmin,
    keys_in_order,
    known_tenants,
    newest_rows,
    of_tenants,
)
from helix_store.admin.elements import (
    distance,
    dollars,
    link,
    name_of_status,
    one_line,
    short_id,
    spark_line,
)
from helix_store.admin.filters import (
    STOPPED,
    overdue_posts,
    read_open_tools,
    start_of_day,
    waiting_for_person,
)
from helix_store.admin.sections.effects import unknown_effects
from helix_store.core import moments
from helix_store.engine.expressions import NoIndexHint
from helix_store.models import Effect, Lock, Post, Run, Session, UsageEntry
from helix_store.reports.payloads import project_zone, said_by, start_of, without_payloads
from helix_store.stores.conditions import StuckSession, find_keys
from helix_store.usage.store import usage_report

_ROWS_SHOWN: Final = 5
NEWEST_LOCKS: Final = 10_000
"""The number of lock rows that are searched for the oldest held lock."""

NEWEST_RUNS: Final = 1_000
"""The number of newest runs that are searched for today's failures."""

_MOST_COUNTED: Final = 1_000
_TITLE_LENGTH: Final = 60
_DAYS: Final = 7
_NEWEST_FIRST: Final = ("-updated_at", "-session_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A tile. ``figure`` is the headline, and ``rows`` are pairs of linked text and a note."""

    title: Any
    figure: Any
    url: str
    rows: list[tuple[Any, Any]]
    is_urgent: bool = False
    empty: Any = ""


def start_tiles(request: HttpRequest, site: AdminSite) -> Iterator[Tile]:
    """Yield the tiles that the user may see. Each tile takes one or two bounded statements."""
    if not site.is_registered(Session):
        return
    page = site.get_model_admin(Session)
    assert isinstance(page, ReadOnlyAdmin)  # noqa: S101  for the type checker; no other admin is registered
    if page.may_view(request, Session):
        sessions: QuerySet[Any] = without_payloads(page.rows(Session)).annotate(
            title_start=start_of("title", _TITLE_LENGTH),
            failure_start=start_of("failure_reason", _TITLE_LENGTH),
        )
        if page.may_view(request, Effect):
            yield _unknown(page, sessions)
        yield _waiting(page, sessions)
        if page.may_view(request, Post):
            yield _posted(page, sessions)
        may_view_runs = page.may_view(request, Run)
        if may_view_runs:
            yield _stuck(page, sessions)
            yield _running(page)
        yield _failed(page, sessions)
        if may_view_runs:
            yield _failed_runs(page)
    if page.may_view(request, UsageEntry):
        yield _spent(page)
    if page.may_view(request, Lock):
        yield _oldest_lock(page, may_view_sessions=page.may_view(request, Session))


def _unknown(page: ReadOnlyAdmin, sessions: Any) -> Tile:
    """Return the effects that somebody must settle: no agent of these sessions can go on before."""
    effects = unknown_effects(sessions.db)
    shown = list(effects.values_list("session_id", "effect_id", "tool_name")[:_ROWS_SHOWN])
    found = sessions.in_bulk([key for key, *_name in shown])
    rows = [
        (_session_link(page, found[key], section="effects"), one_line(tool or effect_id, _TITLE_LENGTH))
        for key, effect_id, tool in shown
        if key in found
    ]
    return Tile(
        title=_("Unknown effects"),
        figure=_counted(effects),
        url=page.list_url(Session),
        rows=rows,
        is_urgent=True,
        empty=_("Every effect is decided."),
    )


def _waiting(page: ReadOnlyAdmin, sessions: Any) -> Tile:
    tenants = known_tenants(Session, sessions.db)
    waiting = waiting_for_person(Session.objects.using(sessions.db))
    if len(tenants) <= MOST_TENANTS:  # Otherwise the whole index of waiting sessions is read, which is small.
        waiting = of_tenants(waiting, tenants)
    by_deadline = sessions.filter(pk__in=waiting.values("pk")).order_by(
        F("pending_deadline").asc(nulls_last=True), "pk"
    )
    shown = list(by_deadline[:_ROWS_SHOWN])
    read_open_tools(shown)
    return Tile(
        title=_("Needs a person"),
        figure=_counted(waiting),
        url=page.list_url(Session, waiting="person"),
        rows=[(_session_link(page, session), _deadline(session)) for session in shown],
        is_urgent=True,
        empty=_("No session is waiting for a person."),
    )


def _deadline(session: Any) -> SafeString:
    what = one_line(", ".join(session.open_tools or ()) or gettext("an answer"), _TITLE_LENGTH)
    if session.pending_deadline is None:
        return format_html("{}", what)
    is_late = session.pending_deadline <= moments.now()
    words = gettext("{what}, deadline passed {when}") if is_late else gettext("{what}, deadline {when}")
    return format_html(words, what=what, when=distance(session.pending_deadline))


def _posted(page: ReadOnlyAdmin, sessions: Any) -> Tile:
    overdue = overdue_posts(sessions.db, limit=_MOST_COUNTED + 1)
    shown = sessions.in_bulk(list(overdue)[:_ROWS_SHOWN])
    return Tile(
        title=_("Posts that nobody has received"),
        figure=_bounded(len(overdue)),
        url=page.list_url(Session, waiting="post"),
        rows=[(_session_link(page, shown[key]), distance(at)) for key, at in overdue.items() if key in shown],
        is_urgent=True,
        empty=_("No post is overdue."),
    )


def _stuck(page: ReadOnlyAdmin, sessions: Any) -> Tile:
    """Return the sessions that have crashed, lost their worker or spent their budget, the longest first."""
    found = find_keys(sessions.db, STOPPED, limit=_MOST_COUNTED + 1)
    shown = sessions.in_bulk(list(found)[:_ROWS_SHOWN])
    return Tile(
        title=_("Cannot go on"),
        figure=_bounded(len(found)),
        url=page.list_url(Session, condition="stopped"),
        rows=[
            (_session_link(page, shown[key]), _condition(stuck))
            for key, stuck in found.items()
            if key in shown
        ],
        is_urgent=True,
        empty=_("No run has crashed, none is abandoned, and no budget is spent."),
    )


def _condition(stuck: StuckSession) -> SafeString:
    name = name_of_status(stuck.condition)
    what = f"{name}: {stuck.detail}" if stuck.detail else name
    return format_html("{}, {}", one_line(what, _TITLE_LENGTH), distance(stuck.since))


def _running(page: ReadOnlyAdmin) -> Tile:
    running = Run.objects.using(page.alias).running()
    # SQLite would walk all runs in key order.
    newest = running.order_by(NoIndexHint("pk").desc())
    return Tile(
        title=_("Running runs"),
        figure=_counted(running),
        url=page.list_url(Run, status__exact="running"),
        rows=_run_rows(page, newest, lambda run: distance(run.started_at)),
        empty=_("No run is running."),
    )


def _failed_runs(page: ReadOnlyAdmin) -> Tile:
    """Return today's failed runs among the newest runs: no index covers the time at which runs end."""
    runs = Run.objects.using(page.alias)
    # SQLite would choose an index on another column.
    newest = runs.order_by(NoIndexHint("pk").desc()).values("pk")[:NEWEST_RUNS]
    failed = runs.filter(pk__in=newest, status="failed", ended_at__gte=start_of_day())
    shown = failed.annotate(error_start=start_of("error", _TITLE_LENGTH)).order_by("-pk")
    return Tile(
        title=_("Failed runs today"),
        figure=_counted(failed),
        url=page.list_url(Run, status__exact="failed"),
        rows=_run_rows(page, shown, lambda run: one_line(said_by(run.error_start), _TITLE_LENGTH)),
        is_urgent=True,
        empty=_("No run has failed today."),
    )


def _run_rows(page: ReadOnlyAdmin, runs: QuerySet[Any], note: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """Return links to the sessions of the first runs, each with a note on the run."""
    titled = runs.select_related("session").annotate(title_start=start_of("session__title", _TITLE_LENGTH))
    rows = []
    for run in without_payloads(titled, session=True)[:_ROWS_SHOWN]:
        run.session.title_start = run.title_start
        rows.append((_session_link(page, run.session), note(run)))
    return rows


def _failed(page: ReadOnlyAdmin, sessions: Any) -> Tile:
    failed = sessions.filter(status="failed", updated_at__gte=start_of_day())
    tenants = known_tenants(Session, sessions.db)
    failed = of_tenants(failed, tenants)
    newest = failed.order_by(*_NEWEST_FIRST)
    if 1 < len(tenants) <= MOST_TENANTS:
        keys = keys_in_order(failed, tenants, _NEWEST_FIRST, start=0, stop=_ROWS_SHOWN)
        newest = sessions.filter(pk__in=keys).order_by(*_NEWEST_FIRST)
    return Tile(
        title=_("Failed today"),
        figure=_counted(failed),
        url=page.list_url(Session, status__exact="failed", changed="today"),
        rows=[
            (_session_link(page, session), one_line(session.failure_start or "", _TITLE_LENGTH))
            for session in newest[:_ROWS_SHOWN]
        ],
        is_urgent=True,
        empty=_("No session has failed today."),
    )


def _spent(page: ReadOnlyAdmin) -> Tile:
    first = start_of_day(days_ago=_DAYS - 1)
    report = usage_report(by="day", using=page.alias, date_from=first, zone=project_zone(), limit=_DAYS)
    costs = {group.group: group.cost_usd for group in report.groups}
    days = [str(start_of_day(days_ago=ago).date()) for ago in range(_DAYS - 1, -1, -1)]
    week = [costs.get(day, 0) for day in days]
    return Tile(
        title=_("Cost today"),
        figure=dollars(costs.get(days[-1], report.total.cost_usd * 0)),
        url=page.view_url(UsageEntry, "report"),
        rows=[
            (spark_line([float(cost) for cost in week]), ""),
            (_("Past 7 days"), dollars(report.total.cost_usd)),
        ],
    )


def _oldest_lock(page: ReadOnlyAdmin, *, may_view_sessions: bool) -> Tile:
    oldest = oldest_held_lock(page.alias)
    rows: list[tuple[Any, Any]] = []
    if oldest is not None:
        rows = [
            (short_id(oldest.name), ""),
            (gettext("held by"), one_line(oldest.owner or "", _TITLE_LENGTH)),
            (gettext("lease ends"), distance(oldest.expires_at)),
        ]
        of_lock = {"tenant": oldest.tenant, "session_id": oldest.name}
        session = page.rows(Session).filter(**of_lock).only("pk").first()
        if session is not None and may_view_sessions:
            rows[0] = (link(page.page_url(Session, session.pk), short_id(oldest.name)), "")
    return Tile(
        title=_("Oldest lock"),
        figure="" if oldest is None else distance(oldest.acquired_at),
        url=page.list_url(Lock, state="held"),
        rows=rows,
        empty=_("No lock is held."),
    )


def oldest_held_lock(using: str | None = None) -> Lock | None:
    """Return the lock held for the longest time, among the newest rows and the locks of running sessions.

    No index covers held locks, because every acquisition and every release would have to write to it.
    """
    held = Lock.objects.using(using).filter(expires_at__gt=moments.now()).order_by("acquired_at", "pk")
    newest, has_others = newest_rows(held, NEWEST_LOCKS)
    found = [newest.first()]
    if has_others:
        # Select only the keys, so that SQLite reads the index on running runs.
        runs = Run.objects.using(using).running().order_by()
        running = list(runs.values_list("session_id", flat=True)[:_MOST_COUNTED])
        of_runs = Session.objects.using(using).filter(pk__in=running)
        sessions = list(of_runs.values_list("tenant", "session_id"))
        # A tenant and a name from different sessions may match an unrelated held lock; this does no harm.
        tenants, names = ({each[place] for each in sessions} for place in (0, 1))
        found.append(held.filter(tenant__in=tenants, name__in=names).first())
    locks = [lock for lock in found if lock is not None and lock.acquired_at is not None]
    return min(locks, key=lambda lock: (lock.acquired_at, lock.pk), default=None)


def _session_link(page: ReadOnlyAdmin, session: Any, *, section: str = "") -> SafeString:
    title = one_line(session.title_start or "", _TITLE_LENGTH) or gettext("No title")
    url = page.page_url(Session, session.pk) + (f"?section={section}" if section else "")
    return format_html("{}{}", link(url, title), short_id(session.session_id))


def _counted(rows: QuerySet[Any]) -> str:
    return _bounded(rows.order_by()[: _MOST_COUNTED + 1].values("pk").count())


def _bounded(count: int) -> str:
    return f"{_MOST_COUNTED:,}+" if count > _MOST_COUNTED else f"{count:,}"
