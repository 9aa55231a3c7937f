"""The filters, the search and the saved views of lists, and why a session waits.

The search in the list of sessions: by words of titles, users, tags and ids.

An index finds ids and users that begin with the search term. Words are looked up in every session if the
index of `helix_store.contrib.session_search` exists, and otherwise only in the newest sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode

from django.contrib.admin import ChoicesFieldListFilter, SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.core import signing
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Substr
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store import conf
from helix_store.admin.base import (
    MOST_TENANTS,
    Scope,
    is_searchable,
    keys_in_order,
    newest_rows,
    of_tenants,
)
from helix_store.admin.elements import LABELS, lazy_name_of_status, name_of_status, names_of_users, one_line
from helix_store.core import moments, validation
from helix_store.core.moments import as_utc
from helix_store.core.types import SESSION_EXPIRED, TERMINAL_STATUSES, RunStatus, SessionStatus
from helix_store.engine.database import Database
from helix_store.engine.expressions import NoIndexHint, has_tag
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidPayload, LimitExceeded
from helix_store.models import Post, Run, Session
from helix_store.reports.payloads import PayloadText
from helix_store.reports.session import named_position
from helix_store.sessions.lists import HAS_INDEX, Contains
from helix_store.sessions.messages import find_due_sessions
from helix_store.sessions.tool_calls import ToolCalls
from helix_store.sessions.waiting import open_calls
from helix_store.stores.conditions import CONDITIONS, StuckSession, find_keys, is_mere

REASON_LENGTH: Final = 60

LONGEST_CALLS: Final = 200_000
"""The maximum number of characters of pending tool calls that a list reads."""

_MOST_ANSWERED: Final = 1_000
_READ_AT_ONCE: Final = 50


def waiting_for_person(sessions: Any) -> QuerySet[Any]:
    """Return the sessions that have an open call.

    A session whose calls are all answered stays suspended until the application resumes it, but no longer
    needs a person. At most 1,000 such sessions are excluded. Ambiguous sessions are read to decide.
    """
    waiting = sessions.waiting_for_person().exclude(
        pending_client_tool_calls__isnull=True, completed_client_tool_calls__isnull=False
    )
    answered = Session.objects.using(sessions.db).waiting_for_person()
    marked = answered.filter(pending_client_tool_calls__contains='"submitted_at":')
    keys = list(marked.values_list("pk", flat=True)[:_MOST_ANSWERED])
    closed = [
        key
        for start in range(0, len(keys), _READ_AT_ONCE)
        for key, tools in _open_tools(keys[start : start + _READ_AT_ONCE], sessions.db)
        if tools == []
    ]
    found: QuerySet[Any] = waiting.exclude(pk__in=closed) if closed else waiting
    return found


def read_open_tools(sessions: Iterable[Any]) -> None:
    """Set ``open_tools`` of sessions of one database: the tools of their open calls, without duplicates.

    It is ``None`` if they cannot be read. This takes one statement if any session waits for a person, and
    another one if a state holds an answer that may be the agent's own.
    """
    waiting = {each.pk: each for each in sessions if _is_waiting(each)}
    if not waiting:
        return
    alias = next(iter(waiting.values()))._state.db
    for key, tools in _open_tools(list(waiting), alias):
        waiting[key].open_tools = tools


def _is_waiting(session: Any) -> bool:
    is_over = session.status in TERMINAL_STATUSES
    return not is_over and session.suspension_kind == RunStatus.SUSPENDED_CLIENT_TOOL


def _open_tools(keys: list[int], using: str) -> Iterable[tuple[int, list[str] | None]]:
    pending = PayloadText(Substr("pending_client_tool_calls", 1, LONGEST_CALLS + 1))
    completed = ExpressionWrapper(Q(completed_client_tool_calls__isnull=False), output_field=BooleanField())
    live = PayloadText("live_decisions")
    rows = Session.objects.using(using).filter(pk__in=keys).order_by()
    found = list(rows.values_list("pk", pending, live, completed))
    calls = open_calls_in({key: (text, live) for key, text, live, _has in found}, using)
    for key, text, _live, has_completed in found:
        yield key, [] if text is None and has_completed else _tools_of(calls.get(key))


def open_calls_in(
    columns: Mapping[int, tuple[str | None, str | None]], using: str
) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the open calls of sessions by key, except those of sessions whose calls cannot be read.

    ``columns`` are the starts of their pending calls, and their live decisions.
    """
    readable = {}
    for key, (pending, live) in columns.items():
        if pending is not None and len(pending) <= LONGEST_CALLS:
            with suppress(IntegrityFault, RecursionError):
                readable[key] = ToolCalls.stored(pending, None, live)
    return open_calls(Database(using, ""), readable)


def _tools_of(calls: Mapping[str, Mapping[str, Any]] | None) -> list[str] | None:
    if calls is None:
        return None
    return list(dict.fromkeys(str(call.get("tool_name") or "?") for call in calls.values()))


def status_or_condition(session: Any, stuck: StuckSession | None) -> str:
    """Return the status of a session or, if the status says less, the condition in which it cannot go on."""
    return session.status if stuck is None or not is_mere(session.status) else stuck.condition


def reason_of(session: Any, stuck: StuckSession | None = None) -> str:
    """Return the reason from the session's columns, the result of `read_open_tools` and ``failure_start``."""
    if stuck is not None and is_mere(session.status):
        return one_line(stuck.detail or "", REASON_LENGTH)
    if session.status == "failed":
        return one_line(session.failure_start or "", REASON_LENGTH)
    if session.status in TERMINAL_STATUSES or session.suspension_kind is None:
        return ""
    if not _is_waiting(session):
        return name_of_status(session.suspension_kind)
    if session.open_tools is None:
        return gettext("waits for a person")
    if not session.open_tools:
        return gettext("answered, not resumed yet")
    return gettext("waits for %(tools)s") % {"tools": one_line(", ".join(session.open_tools), REASON_LENGTH)}


NEWEST_SEARCHED: Final = 100_000
"""The number of newest sessions that are searched for words if there is no index."""

MOST_FOUND: Final = 500
"""The maximum number of sessions that a search returns for each way of finding them."""

_MOST_WORDS: Final = 8
_LAST_CHARACTER: Final = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class Found:
    """The keys that a search found (``None`` means all), and whether it left any out."""

    keys: set[int] | None
    is_cut: bool = False
    is_bounded: bool = False


def found_sessions(sessions: QuerySet[Any], term: str, scope: Scope) -> Found:
    """Return the sessions whose title, user, tags or id contain each word of the term."""
    words = term.split()[:_MOST_WORDS]
    if not words or not is_searchable(term):
        return Found(None if is_searchable(term) else set())
    start, end = term.strip(), term.strip() + _LAST_CHARACTER
    db = Database(sessions.db, "")
    has_index = db.is_postgresql and db.read(HAS_INDEX, {}) == [(True,)]
    newest, is_bounded = (sessions, False) if has_index else newest_rows(sessions, NEWEST_SEARCHED)
    tenants = scope.known_tenants(Session)
    indexed = of_tenants(sessions, tenants) if len(tenants) <= MOST_TENANTS else sessions
    by_index = [indexed.filter(session_id__gte=start, session_id__lt=end)]
    by_index.append(indexed.filter(user_id__isnull=False, user_id__gte=start, user_id__lt=end))
    keys = [
        list(ways.order_by("-pk").values_list("pk", flat=True)[:MOST_FOUND])
        for ways in (*by_index, newest.filter(*map(Contains, words)))
    ]
    return Found(
        {key for found in keys for key in found},
        is_cut=any(len(found) == MOST_FOUND for found in keys),
        is_bounded=is_bounded,
    )


def step_in_search(sessions: QuerySet[Any], term: str, scope: Scope) -> tuple[int, int] | None:
    """Return the key of the session and the number of the step that a search such as ``ID@step-57`` names.

    The start of an id names a session if no other id begins with it. If a session has the term as its id, the
    search is for that session.
    """
    named = named_position(term.strip())
    if named is None or named.step is None or not is_searchable(term):
        return None
    session_id, number = named.session_id, named.step
    tenants = scope.known_tenants(Session)
    indexed = of_tenants(sessions, tenants) if len(tenants) <= MOST_TENANTS else sessions
    if indexed.filter(session_id=term.strip()).exists():
        return None
    for found in (
        indexed.filter(session_id=session_id),
        indexed.filter(session_id__gte=session_id, session_id__lt=session_id + _LAST_CHARACTER),
    ):
        keys = list(found.order_by().values_list("pk", flat=True)[:2])
        if keys:
            return (keys[0], number) if len(keys) == 1 else None
    return None


def with_tag(sessions: QuerySet[Any], tag: str) -> QuerySet[Any]:
    """Return the sessions with a tag. PostgreSQL uses the index on tags; SQLite only searches the newest."""
    if not Database(sessions.db, "").is_postgresql:
        sessions, _is_bounded = newest_rows(sessions, NEWEST_SEARCHED)
    return sessions.filter(has_tag(tag))


TEXT_FILTER: Final = "admin/helix_store/text_filter.html"
FILTER: Final = "admin/helix_store/filter.html"

STUCK: Final = ("crashed", "abandoned", "over_budget", "effect_unknown", "unanswered")
"""The conditions in which nobody but the operator or a wake-up continues a session."""

STOPPED: Final = ("crashed", "abandoned", "over_budget")
"""Those in which the newest run has stopped, for the tile of the start page."""

_SEVERAL: Final = {"any": STUCK, "stopped": STOPPED}
"""The choices that stand for more than one condition."""

_LABEL_LENGTH: Final = 40
_MOST_FOUND: Final = 1_000
_PATIENCE: Final = timedelta(minutes=5)


def start_of_day(*, days_ago: int = 0) -> datetime:
    """Return the start of a day in the time zone of the pages."""
    today = timezone.localtime(moments.now()).replace(hour=0, minute=0, second=0, microsecond=0)
    return today - timedelta(days=days_ago)


def overdue_posts(scope: Scope, *, limit: int) -> dict[int, datetime]:
    """Return the due times of posts that a worker could have received, by the key of the session."""
    latest = moments.now() - _PATIENCE
    due = find_due_sessions(Database(scope.using, ""), limit, of_all=True, tenants=scope.tenants)
    return {each.key: as_utc(each.due_at) for each in due if as_utc(each.due_at) <= latest}


class ChoiceFilter(SimpleListFilter):
    """A filter with fixed choices, which refuses any other value."""

    template = FILTER
    options: Any = ()
    scope: Scope
    """The rows that the list may show."""

    def __init__(self, request: HttpRequest, params: Any, model: Any, model_admin: Any) -> None:
        self.scope = model_admin.scope(request)
        super().__init__(request, params, model, model_admin)

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        if self.value() not in {None, *(value for value, _label in self.options)}:
            raise IncorrectLookupParameters
        return self.options

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        return queryset if chosen is None else self.chosen(queryset, chosen)

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        raise NotImplementedError


class TenantFilter(SimpleListFilter):
    """A filter that offers the table's tenants if there are several, so that indexes by tenant apply."""

    template = FILTER
    title = _("tenant")
    parameter_name = "tenant"
    _keeps_order = {"p", "e", "order", "expiry", "q", "tag", "condition", "family"}
    """Parameters of a list that does not need the tenants, because it is read in index order or by keys."""
    _is_small = {"waiting"}
    """Parameters that have an index with few rows, which may be read for all tenants."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        self._tenants = model_admin.scope(request).known_tenants(model_admin.model)
        self._needs_tenants = self.needs_tenants(request)
        if len(self._tenants) > MOST_TENANTS:
            self.template = TEXT_FILTER
            try:
                validation.tenant(self.value() or "")
            except HelixStoreError:
                raise IncorrectLookupParameters from None
        # Django drops a filter that has no choices.
        return [(tenant, tenant or _("no tenant")) for tenant in self._tenants] or [("", "")]

    def has_output(self) -> bool:
        return len(self._tenants) > 1

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        if chosen is not None:
            return queryset.filter(tenant=chosen)
        if len(self._tenants) > MOST_TENANTS:
            request.is_by_tenant = True  # type: ignore[attr-defined]  # for the list, which says so
        elif len(self._tenants) > 1:
            request.tenants_to_merge = self._tenants  # type: ignore[attr-defined]  # for the list's order
        if not self._needs_tenants:
            return queryset
        if len(self._tenants) > MOST_TENANTS:
            if not self._is_small.isdisjoint(request.GET):
                return queryset
            request.is_of_newest = True  # type: ignore[attr-defined]  # for the list, which says so
        return of_tenants(queryset, self._tenants)

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Yield a text field for one tenant if there are too many tenants for a list of choices."""
        return _text_choice(self, changelist) if self.template == TEXT_FILTER else super().choices(changelist)

    def needs_tenants(self, request: HttpRequest) -> bool:
        """Return whether the rows can only be found by an index that begins with the tenant."""
        by_keys = {"waiting"} if request.GET.get("waiting") == "post" else set()
        return not (self._keeps_order | by_keys).issuperset(request.GET)


class EntryTenantFilter(TenantFilter):
    """A tenant filter whose name is not a column of the list: Django would allow a column as a lookup."""

    parameter_name = "of_tenant"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        choices = super().lookups(request, model_admin)
        is_offered = self.value() in {None, *(value for value, _label in choices)}
        if not is_offered and len(self._tenants) <= MOST_TENANTS:
            raise IncorrectLookupParameters
        return choices


class AgentTypeFilter(SimpleListFilter):
    """A filter that offers the agent types of the newest sessions.

    Collecting the types of all sessions would need a full scan.
    """

    template = FILTER
    title = _("agent type")
    parameter_name = "agent_type"
    newest = 1_000

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        scope = model_admin.scope(request)
        sessions, tenants = scope.rows(Session), scope.tenants
        newest = sessions.order_by("-pk").values_list("agent_type", flat=True)[: self.newest]
        if tenants and len(tenants) <= MOST_TENANTS:
            # In the order of their keys, the newest sessions may all be those of other tenants.
            keys = keys_in_order(sessions, tenants, ORDERS[""][1:], start=0, stop=self.newest)
            newest = sessions.filter(pk__in=keys).values_list("agent_type", flat=True)
        names = set(newest)
        if chosen := self.value():
            names.add(chosen)
        return [(name, one_line(name, _LABEL_LENGTH)) for name in sorted(names)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        return queryset if chosen is None else queryset.filter(agent_type=chosen)


class BuildFilter(SimpleListFilter):
    """A filter that offers the builds of the newest runs, and finds the newest runs of a build.

    No index covers the builds, because every start of a run would have to write to it.
    """

    template = FILTER
    title = _("build")
    parameter_name = "build"
    newest = 1_000

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        runs = model_admin.scope(request).rows(Run)
        # SQLite would choose an index on another column.
        newest = runs.order_by(NoIndexHint("pk").desc()).values_list("build", flat=True)[: self.newest]
        names = {name for name in newest if name}
        if chosen := self.value():
            names.add(chosen)
        return [(name, one_line(name, _LABEL_LENGTH)) for name in sorted(names)]

    def has_output(self) -> bool:
        return bool(self.lookup_choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        if chosen is None:
            return queryset
        newest, has_others = newest_rows(queryset, NEWEST_SEARCHED)
        request.is_of_newest_runs = has_others  # type: ignore[attr-defined]  # for the list, which says so
        return newest.filter(build=chosen)


class NamedChoicesFilter(ChoicesFieldListFilter):
    """A filter that shows the choices of a column under their names."""

    template = FILTER

    def __init__(self, field: Any, *rest: Any, **named: Any) -> None:
        super().__init__(field, *rest, **named)
        self.title = LABELS[field.name]

    def choices(self, changelist: Any) -> Iterator[Any]:
        for choice in super().choices(changelist):
            yield {**choice, "display": name_of_status(str(choice["display"]))}


class SessionStatusFilter(NamedChoicesFilter):
    """A filter that explains ``running``: only applications set it, while runs leave a session ``active``."""

    def choices(self, changelist: Any) -> Iterator[Any]:
        running = name_of_status(SessionStatus.RUNNING)
        for choice in super().choices(changelist):
            if choice["display"] == running:
                choice["display"] = _("running, if the application says so")
            yield choice


class WaitingFilter(ChoiceFilter):
    title = _("waiting")
    parameter_name = "waiting"
    options: Any = (
        ("person", _("for a person")),
        ("late", _("for a person, past the deadline")),
        ("post", _("for an agent, with an overdue post")),
    )

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        if not model_admin.may_view(request, Post):
            self.options = WaitingFilter.options[:-1]
        return super().lookups(request, model_admin)

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        if value == "post":
            return queryset.filter(pk__in=list(overdue_posts(self.scope, limit=_MOST_FOUND)))
        waiting = waiting_for_person(queryset)
        return waiting.filter(pending_deadline__lte=moments.now()) if value == "late" else waiting


class ConditionFilter(ChoiceFilter):
    title = _("cannot go on")
    parameter_name = "condition"
    options: Any = (
        ("any", _("for any reason")),
        ("stopped", _("crashed, abandoned or over budget")),
        *((each, lazy_name_of_status(each)) for each in CONDITIONS),
    )

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        # The conditions say how runs have ended.
        if not model_admin.may_view(request, Run):
            self.options = ()
        return super().lookups(request, model_admin)

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        conditions = _SEVERAL.get(value, (value,))
        found = find_keys(self.scope.using, conditions, tenants=self.scope.tenants)
        return queryset.filter(pk__in=list(found))


_UNFILTERED: Final = frozenset({"p", "e", "all", "order", "tenant"})
"""Parameters of a list of all sessions. With any other, the list has what was asked for."""


def is_folded(request: HttpRequest) -> bool:
    """Return whether a list shows the sub-sessions of its sessions as their number only."""
    return _UNFILTERED.issuperset(request.GET)


class FamilyFilter(ChoiceFilter):
    """Whether the list of all sessions folds sub-sessions. A filter or a search shows all that it finds."""

    title = _("sub-sessions")
    parameter_name = "family"
    options: Any = (("all", _("listed")),)

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        return queryset  # `SessionAdmin.complete_rows` folds the rows of a page, which needs no index.

    def choices(self, changelist: Any) -> Iterator[Any]:
        default, *others = super().choices(changelist)
        yield {**default, "display": _("folded under their parent")}
        yield from others


class ExpiryFilter(ChoiceFilter):
    title = _("expiry")
    parameter_name = "expiry"
    options = (
        ("past", _("past, not cleaned up")),
        ("day", _("within a day")),
        ("failed", _("failed by expiry")),
    )

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        now = moments.now()
        sessions: Any = self.scope.rows(Session)
        if value == "failed":
            found = sessions.filter(failure_reason=SESSION_EXPIRED, expires_at__isnull=False)
        elif value == "past":
            found = sessions.non_terminal().expired(now)
        else:
            soon = now + timedelta(days=1)
            found = sessions.non_terminal().filter(expires_at__gt=now, expires_at__lte=soon)
        # This takes two statements, because with one, PostgreSQL walks all sessions in the order of the list.
        keys = found.order_by("expires_at", "pk").values_list("pk", flat=True)[:_MOST_FOUND]
        return queryset.filter(pk__in=list(keys))


class ChangedFilter(ChoiceFilter):
    title = _("last change")
    parameter_name = "changed"
    options = (("today", _("today")), ("week", _("past 7 days")), ("month", _("past 30 days")))
    _days = {"today": 0, "week": 7, "month": 30}

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        return queryset.filter(updated_at__gte=start_of_day(days_ago=self._days[value]))


class TagFilter(SimpleListFilter):
    """A text field for one tag, because a list of all tags would need a full scan."""

    title = _("tag")
    parameter_name = "tag"
    template = TEXT_FILTER

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        if (value := self.value()) is not None:
            try:
                validation.tags([value])
            except (InvalidPayload, LimitExceeded):
                raise IncorrectLookupParameters from None
        return [("", "")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        return with_tag(queryset, chosen) if chosen else queryset

    def choices(self, changelist: Any) -> Iterator[Any]:
        return _text_choice(self, changelist)


class UserFilter(SimpleListFilter):
    """A text field for the id of a user, which is found by an index that begins with the tenant."""

    title = _("user")
    parameter_name = "user"
    template = TEXT_FILTER

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        if (value := self.value()) is not None:
            try:
                validation.user_id(value or None)
            except (InvalidPayload, LimitExceeded):
                raise IncorrectLookupParameters from None
        return [("", "")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        return queryset.filter(user_id=chosen) if chosen else queryset

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Yield a text field for the id. Its label shows the name of the user."""
        names = names_of_users([self.value()])
        for choice in _text_choice(self, changelist):
            yield {**choice, "shown": names.get(choice["value"], "")}


def _text_choice(text_filter: Any, changelist: Any) -> Iterator[Any]:
    """Yield the context of the template for a text field: the value, and the other parameters of the URL."""
    parameter = text_filter.parameter_name
    others = {name: values for name, values in changelist.get_filters_params().items() if name != parameter}
    if changelist.query:
        others["q"] = [changelist.query]
    yield {
        "value": text_filter.value() or "",
        "others": [(name, value) for name, values in others.items() for value in values],
        "remove": changelist.get_query_string(remove=[parameter]),
    }


ORDERS: Final = {
    "": ("-tenant", "-updated_at", "-session_id"),
    "oldest": ("tenant", "updated_at", "session_id"),
    "created": ("-tenant", "-created_at", "-session_id"),
    "first": ("tenant", "created_at", "session_id"),
    "id": ("tenant", "session_id"),
}
"""The orders of the list of sessions. Each one has an index."""


class OrderFilter(ChoiceFilter):
    """The orders that have an index. They replace sortable columns, because most columns have no index."""

    title = _("order")
    parameter_name = "order"
    options = (
        ("oldest", _("changed first")),
        ("created", _("created last")),
        ("first", _("created first")),
        ("id", _("session id")),
    )

    def chosen(self, queryset: QuerySet[Any], value: str) -> QuerySet[Any]:
        return queryset  # `SessionAdmin.get_ordering` sets the order.

    def choices(self, changelist: Any) -> Iterator[Any]:
        default, *others = super().choices(changelist)
        yield {**default, "display": _("changed last")}
        yield from others


COOKIE: Final = "helix_views"
MOST_VIEWS: Final = 12
LONGEST_NAME: Final = 40

_LONGEST_QUERY: Final = 500
_LONGEST_COOKIE: Final = 3_800
"""Browsers keep cookies of up to 4,096 bytes, with their name and attributes."""

_SECONDS: Final = 365 * 86_400
_PAGE: Final = frozenset({"p", "e", "all"})
"""Parameters that say which part of the list is shown, and are not part of a view."""


class View(NamedTuple):
    """A filter with a name. ``query`` is the part of the address that begins after the question mark."""

    name: str
    query: str


def shown_views(request: HttpRequest) -> dict[str, Any]:
    """Return the views of the settings and those of this person, for the template of the list."""
    current = _normal(request.GET.urlencode())
    found = [
        {"name": name, "query": query, "is_own": is_own, "is_current": bool(current) and query == current}
        for is_own, views in ((False, _of_settings()), (True, kept_views(request)))
        for name, query in views
    ]
    return {"views": found, "query": "" if any(each["is_current"] for each in found) else current}


def _of_settings() -> list[View]:
    return [View(name, _normal(query)) for name, query in conf.admin_views().items()]


def kept_views(request: HttpRequest) -> list[View]:
    """Return the views that this person has kept in this browser, the oldest first."""
    try:
        stored = signing.loads(request.COOKIES.get(COOKIE, ""), salt=_salt(request))
        return [View(str(name), str(query)) for name, query in stored]
    except (signing.BadSignature, TypeError, ValueError):
        return []


def keep_views(request: HttpRequest, response: HttpResponse, views: list[View]) -> None:
    """Store a person's views, without the oldest ones if they are too many or too long."""
    kept = views[-MOST_VIEWS:]
    while len(text := signing.dumps(kept, salt=_salt(request), compress=True)) > _LONGEST_COOKIE:
        kept = kept[1:]
    response.set_cookie(
        COOKIE,
        text,
        max_age=_SECONDS,
        path=request.path.rpartition("views/")[0],
        secure=request.is_secure(),
        httponly=True,
        samesite="Lax",
    )


def view_of(name: str, query: str, known: Collection[str]) -> View | None:
    """Return a view, or ``None`` if it has no name, or no filter of the parameters that the list knows."""
    name = one_line(name, LONGEST_NAME + 1)
    if not name or len(name) > LONGEST_NAME or len(query) > _LONGEST_QUERY:
        return None
    normal = _normal(query)
    names = {parameter for parameter, _value in parse_qsl(normal, keep_blank_values=True)}
    return View(name, normal) if names and names <= set(known) else None


def _normal(query: str) -> str:
    """Return the filters of a query in one order, without the page."""
    pairs = parse_qsl(query, keep_blank_values=True)
    return urlencode(sorted(pair for pair in pairs if pair[0] not in _PAGE), errors="replace")


def _salt(request: HttpRequest) -> str:
    return f"helix_store.views.{request.user.pk}"
