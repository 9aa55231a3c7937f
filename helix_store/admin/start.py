"""The start page: what needs somebody, what has failed and why, what runs, and what it costs.

Every part has a few rows and links to the full list, and is left out if there is nothing to show. Users only
see the parts of models that they may view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from itertools import islice
from typing import Any, Final

from django.contrib.admin import AdminSite
from django.db.models import F, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, pgettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.answers import ANSWER
from helix_store.actions.sessions import RUN_AGAIN
from helix_store.admin.base import (
    COSTS_SECONDS,
    MOST_TENANTS,
    START_SECONDS,
    ReadOnlyAdmin,
    Scope,
    keys_in_order,
    mark_of_start,
    newest_rows,
    of_tenants,
)
from helix_store.admin.elements import (
    MOST_SERIES,
    badge,
    distance,
    dollars,
    grouped,
    link,
    money,
    one_line,
    printable,
    scale_of_days,
    short_date,
    short_id,
    spark_line,
    stacked_columns,
)
from helix_store.admin.filters import (
    STOPPED,
    overdue_posts,
    read_open_tools,
    start_of_day,
    waiting_for_person,
)
from helix_store.admin.operating import Button, OperatedAdmin
from helix_store.admin.sections.waits import unknown_effects
from helix_store.core import moments
from helix_store.core.types import RunStatus
from helix_store.engine.expressions import NoIndexHint
from helix_store.models import Budget, Effect, Lock, Post, Run, Session, UsageEntry
from helix_store.reports.payloads import project_zone, said_by, start_of, without_payloads
from helix_store.stores.conditions import find_keys
from helix_store.usage.store import costs_by_day_and_agent

_ROWS_SHOWN: Final = 5
NEWEST_LOCKS: Final = 10_000
"""The number of lock rows that are searched for the oldest held lock."""

NEWEST_RUNS: Final = 1_000
"""The number of newest runs, and of sessions that have failed last, that are searched for failures."""

_MOST_COUNTED: Final = 1_000
_TITLE_LENGTH: Final = 60
_CAUSE: Final = 80
_CAUSES_SHOWN: Final = 8
_BUILDS_SHOWN: Final = 3
_DAYS: Final = 7
_DAYS_OF_COSTS: Final = 14
_NEWEST_FIRST: Final = ("-updated_at", "-session_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Something that needs somebody: a session, the reason, and what a person can do."""

    status: SafeString
    session: SafeString
    what: Any
    when: Any
    action: Any = ""
    """The label of the link, or empty if there is a button."""
    url: str = ""
    button: Button | None = None


@dataclass(slots=True, kw_only=True)
class Needs:
    """What needs somebody, and how many there are of each kind, with a link to their list."""

    rows: list[Need] = field(default_factory=list)
    counts: list[tuple[Any, str, str]] = field(default_factory=list)
    inbox_url: str = ""
    keys: set[int] = field(default_factory=set)
    """The sessions that are listed. A session is listed once, for what has to be done first."""

    def add(self, label: Any, count: int, url: str, rows: Iterable[Need]) -> None:
        if count:
            self.counts.append((label, _bounded(count), url))
            self.rows.extend(rows)


@dataclass(slots=True, kw_only=True)
class Cause:
    """A reason for failures: how many there were on each of the past days, and the newest one."""

    name: str
    by_day: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    builds: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How many failed in each build, the newest build first."""
    newest: datetime | None = None
    session_key: int = 0
    said: str = ""

    @property
    def count(self) -> int:
        return sum(self.by_day.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A tile. ``figure`` is the headline, and ``rows`` are pairs of linked text and a note."""

    title: Any
    figure: Any
    url: str
    rows: list[tuple[Any, Any]]


def start_page(request: HttpRequest, site: AdminSite) -> dict[str, Any]:
    """Return the parts of the page that the user may see, each read with a few bounded statements."""
    if not site.is_registered(Session):
        return {}
    page = site.get_model_admin(Session)
    assert isinstance(page, OperatedAdmin)  # noqa: S101  for the type checker; no other admin is registered
    parts: dict[str, Any] = {}
    scope = page.scope(request)
    may_view_runs = page.may_view(request, Run)
    if page.may_view(request, Session):
        if may_view_runs:
            mark, url = (
                mark_of_start(scope.using, scope.tenants)["mark"],
                page.view_url(Session, "live_start"),
            )
            parts["live"] = {
                "url": url,
                "mark": mark,
                "seconds": START_SECONDS,
                "costs_seconds": COSTS_SECONDS,
            }
        sessions: QuerySet[Any] = without_payloads(scope.rows(Session)).annotate(
            title_start=start_of("title", _TITLE_LENGTH),
            failure_start=start_of("failure_reason", _CAUSE),
        )
        parts["search_url"] = page.list_url(Session)
        parts["effects"], parts["needs"] = _needs(page, request, sessions, may_view_runs=may_view_runs)
        parts["failures"] = list(_failures(page, scope, sessions, may_view_runs=may_view_runs))
        parts["days"] = _DAYS
    tiles = [_running(page, scope, parts["needs"].keys)] if may_view_runs and "needs" in parts else []
    if page.may_view(request, Lock):
        tiles.append(_oldest_lock(page, scope, may_view_sessions=page.may_view(request, Session)))
    parts["tiles"] = [tile for tile in tiles if tile is not None]
    # An open page that reads itself again usually asks for all but the sums.
    if page.may_view(request, UsageEntry) and request.headers.get("X-Helix-Live") != "without-costs":
        parts["costs"] = _costs(page, scope)
    return parts


# --- What needs somebody


def _needs(
    page: OperatedAdmin, request: HttpRequest, sessions: Any, *, may_view_runs: bool
) -> tuple[Needs, Needs]:
    """Return the unknown effects, which come first, and everything else that needs somebody."""
    scope, effects, listed = page.scope(request), Needs(), set[int]()
    if page.may_view(request, Effect):
        listed = _add_effects(effects, page, scope, sessions)
    needs = Needs(
        inbox_url=page.view_url(Session, "approvals") if ANSWER.is_permitted(request.user) else "",
        keys=set(effects.keys),
    )
    _add_waiting(needs, page, scope, sessions, listed=listed, may_view_runs=may_view_runs)
    if may_view_runs:
        _add_stopped(needs, page, request, sessions)
    if page.may_view(request, Post):
        found = overdue_posts(scope, limit=_MOST_COUNTED + 1)
        overdue = {key: at for key, at in found.items() if key not in needs.keys}
        shown = sessions.in_bulk(list(overdue)[:_ROWS_SHOWN])
        url = page.list_url(Session, order="oldest", waiting="post")
        rows = [
            _run_again(page, request, shown[key], "unanswered", "", at)
            for key, at in overdue.items()
            if key in shown
        ]
        needs.add(_("with a post that nobody has received"), len(overdue), url, rows)
    return effects, needs


def _add_waiting(
    needs: Needs,
    page: OperatedAdmin,
    scope: Scope,
    sessions: Any,
    *,
    listed: Collection[int],
    may_view_runs: bool,
) -> None:
    """Add the sessions with open calls, the earliest deadline first, and then those of adapters.

    Those that are ``listed`` already are only counted.
    """
    rows: Any = scope.rows(Session)
    tenants = scope.known_tenants(Session)
    own = waiting_for_person(rows)
    if len(tenants) <= MOST_TENANTS:  # Otherwise the whole index of waiting sessions is read, which is small.
        own = of_tenants(own, tenants)
    adapters = rows.non_terminal().filter(waiting_kind__isnull=False, suspension_kind__isnull=True)
    oldest = list(adapters.order_by("updated_at", "pk").values_list("pk", flat=True)[: _MOST_COUNTED + 1])
    deadline = F("pending_deadline").asc(nulls_last=True)
    by_deadline = sessions.filter(pk__in=own.values("pk")).order_by(deadline, "updated_at", "pk")
    first = by_deadline[: _ROWS_SHOWN + len(listed)]
    shown = [each for each in first if each.pk not in listed][:_ROWS_SHOWN]
    read_open_tools(shown)
    unlisted = [key for key in oldest if key not in listed]
    found = sessions.in_bulk(unlisted[: _ROWS_SHOWN - len(shown)])
    count = own.order_by()[: _MOST_COUNTED + 1].values("pk").count() + len(oldest)
    needed = [_waiting(page, each) for each in shown]
    needed += [_waiting_elsewhere(page, found[key]) for key in oldest if key in found]
    # Only the filter by condition, which needs the permission to view runs, finds those of adapters.
    query = {"condition": "waiting"} if may_view_runs else {"waiting": "person"}
    needs.keys.update(each.pk for each in (*shown, *found.values()))
    needs.add(_("waiting for an answer"), count, page.list_url(Session, order="oldest", **query), needed)


def _waiting(page: OperatedAdmin, session: Any) -> Need:
    at = session.pending_deadline
    is_late = at is not None and at <= moments.now()
    words = gettext("deadline passed {when}") if is_late else gettext("deadline {when}")
    return Need(
        status=badge("waiting"),
        session=_session_link(page, session),
        what=one_line(", ".join(session.open_tools or ()) or gettext("an answer"), _TITLE_LENGTH),
        when=distance(session.updated_at) if at is None else format_html(words, when=distance(at)),
        action=_("Answer"),
        url=_section_url(page, session, "waits"),
    )


def _waiting_elsewhere(page: OperatedAdmin, session: Any) -> Need:
    """Return the need of a session whose framework has asked a person, and which the admin cannot answer."""
    return Need(
        status=badge("waiting"),
        session=_session_link(page, session),
        what=one_line((session.waiting_kind or "").partition(":")[0], _TITLE_LENGTH),
        when=distance(session.updated_at),
        action=_("Look at it"),
        url=_section_url(page, session, ""),
    )


def _add_effects(needs: Needs, page: OperatedAdmin, scope: Scope, sessions: Any) -> set[int]:
    """Add the effects that somebody must settle: no agent of these sessions can go on before.

    Return the sessions of the rows.
    """
    effects = unknown_effects(scope)
    columns = ("session_id", "effect_id", "tool_name", "started_at")
    found = list(effects.values_list(*columns)[: _MOST_COUNTED + 1])
    shown = sessions.in_bulk([key for key, *_name in found[:_ROWS_SHOWN]])
    rows = [
        Need(
            status=badge("effect_unknown"),
            session=_session_link(page, shown[key]),
            what=one_line(tool or effect_id, _TITLE_LENGTH),
            when=distance(at),
            action=_("Decide"),
            url=_section_url(page, shown[key], "effects"),
        )
        for key, effect_id, tool, at in found[:_ROWS_SHOWN]
        if key in shown
    ]
    needs.keys.update(key for key, *_name in found)
    needs.add(
        _("with an unknown effect"),
        len({key for key, *_name in found}),
        page.list_url(Session, order="oldest", condition="effect_unknown"),
        rows,
    )
    return set(shown)


def _add_stopped(needs: Needs, page: OperatedAdmin, request: HttpRequest, sessions: Any) -> None:
    """Add the sessions that have crashed, lost their worker or spent their budget, the longest first."""
    tenants = page.scope(request).tenants
    stopped = find_keys(sessions.db, STOPPED, limit=_MOST_COUNTED + 1, tenants=tenants)
    found = {key: stuck for key, stuck in stopped.items() if key not in needs.keys}
    needs.keys.update(found)
    may_view_budgets = page.may_view(request, Budget)
    labels = {
        "crashed": _("crashed"),
        "abandoned": _("abandoned"),
        "over_budget": pgettext("of sessions", "over budget"),
    }
    keys = {each: [key for key, stuck in found.items() if stuck.condition == each] for each in STOPPED}
    shown = sessions.in_bulk([key for each in STOPPED for key in keys[each][:_ROWS_SHOWN]])
    for condition in STOPPED:
        rows = []
        for key in keys[condition][:_ROWS_SHOWN]:
            if key not in shown:
                continue
            session, stuck = shown[key], found[key]
            if condition == "over_budget":
                need = Need(
                    status=badge(condition),
                    session=_session_link(page, session),
                    what=gettext("budget “%(name)s”") % {"name": one_line(stuck.detail or "", _TITLE_LENGTH)},
                    when=distance(stuck.since),
                    action=_("See the budgets"),
                    url=_section_url(page, session, "budgets" if may_view_budgets else "timeline"),
                )
            else:
                need = _run_again(page, request, session, condition, stuck.detail or "", stuck.since)
            rows.append(need)
        url = page.list_url(Session, order="oldest", condition=condition)
        needs.add(labels[condition], len(keys[condition]), url, rows)


def _run_again(
    page: OperatedAdmin, request: HttpRequest, session: Any, condition: str, detail: str, since: Any
) -> Need:
    """Return a need with the button "Run again", or if the user may not run it, a link to the reason."""
    button = next(iter(page.buttons(request, session, [RUN_AGAIN])), None)
    return Need(
        status=badge(condition),
        session=_session_link(page, session),
        what=one_line(detail, _TITLE_LENGTH),
        when=distance(since),
        action="" if button else _("Look at it"),
        url=_section_url(page, session, "inbox" if condition == "unanswered" else "timeline"),
        button=button,
    )


# --- Failures by cause


def _failures(
    page: ReadOnlyAdmin, scope: Scope, sessions: Any, *, may_view_runs: bool
) -> Iterator[dict[str, Any]]:
    """Yield the most frequent causes of the past days. A failure of a run and its session counts once."""
    since = start_of_day(days_ago=_DAYS - 1)
    causes: dict[str, Cause] = {}
    seen: set[int] = set()
    silent: dict[int, tuple[datetime, str | None]] = {}
    for key, error, at, build in _failed_runs(scope, since) if may_view_runs else ():
        name, _colon, said = said_by(error).partition(":")
        if name:
            _count(causes, name, key, at, said.strip(), build)
            seen.add(key)
        else:
            silent.setdefault(key, (at, build))  # a step that fails has its reason in the session
    for key, reason, at in _failed_sessions(scope, sessions, since):
        if key not in seen:
            ended_at, build = silent.pop(key, (at, None))
            name = one_line(reason or "", _CAUSE) or gettext("no reason given")
            _count(causes, name, key, ended_at, "", build)
    for key, (at, build) in silent.items():
        _count(causes, gettext("no reason given"), key, at, "", build)
    shown = sorted(causes.values(), key=lambda cause: (-cause.count, cause.name))[:_CAUSES_SHOWN]
    newest = sessions.in_bulk([cause.session_key for cause in shown])
    days = [str(start_of_day(days_ago=ago).date()) for ago in range(_DAYS - 1, -1, -1)]
    for cause in shown:
        session = newest.get(cause.session_key)
        yield {
            "name": printable(cause.name),
            "count": _bounded(cause.count),
            "chart": spark_line([cause.by_day.get(day, 0) for day in days]),
            "by_day": ", ".join(str(cause.by_day.get(day, 0)) for day in days),
            "newest": distance(cause.newest),
            "session": ""
            if session is None
            else _session_link(page, session, section="timeline" if may_view_runs else ""),
            "said": one_line(cause.said, _CAUSE),
            "builds": [
                (printable(build), _bounded(count), page.list_url(Run, status__exact="failed", build=build))
                for build, count in islice(cause.builds.items(), _BUILDS_SHOWN)
            ],
        }


def _count(
    causes: dict[str, Cause], name: str, key: int, at: datetime, said: str, build: str | None = None
) -> None:
    cause = causes.setdefault(name, Cause(name=name))
    if build is not None:
        cause.builds[build] += 1
    cause.by_day[str(at.astimezone(project_zone()).date())] += 1
    if cause.newest is None or at > cause.newest:
        cause.newest, cause.session_key, cause.said = at, key, said


def _failed_runs(scope: Scope, since: datetime) -> list[tuple[int, str | None, datetime, str | None]]:
    """Return failures among the newest runs, the newest first: no index covers the time at which runs end.

    For some of the tenants, they are those of the sessions that changed last, because the newest runs of all
    tenants may be those of others.
    """
    runs = Run.objects.using(scope.using).filter(status=RunStatus.FAILED.value, ended_at__gte=since)
    if scope.tenants is None:
        # SQLite would choose an index on another column.
        newest = Run.objects.using(scope.using).order_by(NoIndexHint("pk").desc())
        failed = runs.filter(pk__in=newest.values("pk")[:NEWEST_RUNS])
    else:
        failed = runs.filter(session_id__in=_keys_of_newest(scope, scope.rows(Session)))
    return list(
        failed.order_by("-pk").values_list("session_id", start_of("error", 4 * _CAUSE), "ended_at", "build")
    )


def _keys_of_newest(scope: Scope, sessions: QuerySet[Any]) -> list[int]:
    """Return the keys of the sessions that changed last, in the scope of at most `MOST_TENANTS` tenants."""
    tenants = scope.known_tenants(Session)[:MOST_TENANTS]
    return keys_in_order(sessions, tenants, _NEWEST_FIRST, start=0, stop=NEWEST_RUNS) if tenants else []


def _failed_sessions(scope: Scope, sessions: Any, since: datetime) -> list[tuple[int, str | None, datetime]]:
    tenants = scope.known_tenants(Session)
    failed = of_tenants(sessions.filter(status="failed", updated_at__gte=since), tenants)
    if 1 < len(tenants) <= MOST_TENANTS:
        failed = sessions.filter(pk__in=_keys_of_newest(scope, failed))
    columns = ("pk", "failure_start", "updated_at")
    return list(failed.order_by(*_NEWEST_FIRST).values_list(*columns)[:NEWEST_RUNS])


# --- What runs, and what it costs


def _running(page: ReadOnlyAdmin, scope: Scope, needy: set[int]) -> Tile | None:
    """Return the running runs, without those of the sessions that need somebody."""
    running = scope.of(Run.objects.using(scope.using).running())
    if needy:
        running = running.exclude(session_id__in=needy)
    # SQLite would walk all runs in key order.
    titled = running.select_related("session").annotate(title_start=start_of("session__title", _TITLE_LENGTH))
    rows = []
    for run in without_payloads(titled.order_by(NoIndexHint("pk").desc()), session=True)[:_ROWS_SHOWN]:
        run.session.title_start = run.title_start
        rows.append((_session_link(page, run.session, section="timeline"), distance(run.started_at)))
    if not rows:
        return None
    url = page.list_url(Run, status__exact="running")
    return Tile(title=_("Running runs"), figure=_counted(running), url=url, rows=rows)


def _costs(page: ReadOnlyAdmin, scope: Scope) -> dict[str, Any] | None:
    """Return the costs of the past days by agent type, the most expensive first and the others together."""
    first = start_of_day(days_ago=_DAYS_OF_COSTS - 1)
    found = costs_by_day_and_agent(
        using=scope.using, date_from=first, zone=project_zone(), tenants=scope.tenants
    )
    if not any(cost for _day, _agent, cost in found):
        return None
    of_agents: dict[str, Decimal] = defaultdict(Decimal)
    for _day, agent, cost in found:
        of_agents[agent] += cost
    ranked = sorted(of_agents, key=lambda agent: (-of_agents[agent], agent))
    named = ranked if len(ranked) <= MOST_SERIES else ranked[: MOST_SERIES - 1]
    series = [*named, *([None] if len(named) < len(ranked) else [])]
    by_day: dict[str, dict[str | None, Decimal]] = defaultdict(lambda: defaultdict(Decimal))
    for day, agent, cost in found:
        by_day[day][agent if agent in named else None] += cost
    days = [start_of_day(days_ago=ago) for ago in range(_DAYS_OF_COSTS - 1, -1, -1)]
    highest = max(sum(costs.values(), Decimal()) for costs in by_day.values())
    names = {agent: gettext("others") if agent is None else printable(agent) for agent in series}
    return {
        "url": page.view_url(UsageEntry, "report"),
        "today": dollars(sum(by_day[str(days[-1].date())].values(), Decimal())),
        "total": dollars(sum(of_agents.values(), Decimal())),
        "days": _DAYS_OF_COSTS,
        "chart": stacked_columns([_column(by_day[str(day.date())], series, names, day) for day in days]),
        "scale": scale_of_days(days[0].date(), days[-1].date(), money(highest)),
        "series": [
            {
                "number": number,
                "name": names[agent],
                "cost": dollars(sum((costs[agent] for costs in by_day.values()), Decimal())),
            }
            for number, agent in enumerate(series)
        ],
    }


def _column(
    costs: Mapping[str | None, Decimal],
    series: list[str | None],
    names: Mapping[str | None, str],
    day: datetime,
) -> list[tuple[float, str]]:
    at = short_date(day.date())
    return [
        (float(costs.get(agent, 0)), f"{at}, {names[agent]}: {money(costs.get(agent, Decimal()))}")
        for agent in series
    ]


def _oldest_lock(page: ReadOnlyAdmin, scope: Scope, *, may_view_sessions: bool) -> Tile | None:
    oldest = oldest_held_lock(scope)
    if oldest is None:
        return None
    rows: list[tuple[Any, Any]] = [
        (short_id(oldest.name), ""),
        (gettext("held by"), one_line(oldest.owner or "", _TITLE_LENGTH)),
        (gettext("lease ends"), distance(oldest.expires_at)),
    ]
    of_lock = {"tenant": oldest.tenant, "session_id": oldest.name}
    session = scope.rows(Session).filter(**of_lock).only("pk").first()
    if session is not None and may_view_sessions:
        rows[0] = (link(page.page_url(Session, session.pk), short_id(oldest.name)), "")
    return Tile(
        title=_("Oldest lock"),
        figure=distance(oldest.acquired_at),
        url=page.list_url(Lock, state="held"),
        rows=rows,
    )


def oldest_held_lock(scope: Scope) -> Lock | None:
    """Return the lock held for the longest time, among the newest rows and the locks of running sessions.

    No index covers held locks, because every acquisition and every release would have to write to it.
    """
    held = scope.rows(Lock).filter(expires_at__gt=moments.now()).order_by("acquired_at", "pk")
    newest, has_others = newest_rows(held, NEWEST_LOCKS)
    found = [newest.first()]
    if has_others:
        # Select only the keys, so that SQLite reads the index on running runs.
        runs = scope.of(Run.objects.using(scope.using).running()).order_by()
        running = list(runs.values_list("session_id", flat=True)[:_MOST_COUNTED])
        of_runs = scope.rows(Session).filter(pk__in=running)
        sessions = list(of_runs.values_list("tenant", "session_id"))
        # A tenant and a name from different sessions may match an unrelated held lock; this does no harm.
        tenants, names = ({each[place] for each in sessions} for place in (0, 1))
        found.append(held.filter(tenant__in=tenants, name__in=names).first())
    locks = [lock for lock in found if lock is not None and lock.acquired_at is not None]
    return min(locks, key=lambda lock: (lock.acquired_at, lock.pk), default=None)


def _section_url(page: ReadOnlyAdmin, session: Any, section: str) -> str:
    """Return the URL of a section of a session's page, by default the first that the user may view."""
    url = page.page_url(Session, session.pk)
    return f"{url}?section={section}#section" if section else url


def _session_link(page: ReadOnlyAdmin, session: Any, *, section: str = "") -> SafeString:
    title = one_line(session.title_start or "", _TITLE_LENGTH) or gettext("No title")
    return format_html(
        "{}{}", link(_section_url(page, session, section), title), short_id(session.session_id)
    )


def _counted(rows: QuerySet[Any]) -> str:
    return _bounded(rows.order_by()[: _MOST_COUNTED + 1].values("pk").count())


def _bounded(count: int) -> str:
    return f"{grouped(_MOST_COUNTED)}+" if count > _MOST_COUNTED else grouped(count)
