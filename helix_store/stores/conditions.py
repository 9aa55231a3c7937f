"""Sessions that cannot go on, and the wake-ups of those that could again.

Most of what a condition needs is stored for other reasons: runs, locks, calls, posts and effects. A session
also records what stopped it (``stopped_by`` and ``stopped_at``), in the statement that ends its failed or
refused run: an index on runs would grow with every run that has ever failed. A run records what a budget
refused it, and an adapter records in ``waiting_kind`` that its session waits.

Each condition is one statement, which reads an index in the order of time and stops at its limit. Abandoned
sessions are sorted: the time since when their worker is gone is in the lock. The calls of some sessions show
only when they are read that the session is not stuck. If such sessions have taken places, more are read, up
to a bound. No statement excludes them: a search in the text cannot tell the answer of a call from a part of
its input, and the JSON functions of PostgreSQL fail for some documents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from helix_store.budgets import MemoryBudgets, held_by_others
from helix_store.core import moments, validation
from helix_store.core.moments import as_utc
from helix_store.core.payloads import Serializable
from helix_store.core.types import RunStatus, SessionStatus
from helix_store.counters import Spender, keys_of, period, scopes_of
from helix_store.engine.async_twins import in_thread_to_the_end
from helix_store.engine.database import Database
from helix_store.engine.expressions import for_keys, is_in_list, list_parameter
from helix_store.engine.statement import CITUS, POSTGRESQL, SQLITE, Clock, Statement, table
from helix_store.exceptions import IntegrityFault, InvalidQuery
from helix_store.locks import LockTable
from helix_store.models import Budget, BudgetCounter, Effect, Lock, Run, Session
from helix_store.models.sessions import NON_TERMINAL, OPEN_EFFECTS, WAITING_KIND
from helix_store.sessions.effects import is_unknown
from helix_store.sessions.messages import (
    growing_pages,
    is_driven,
    is_unanswered,
    mark_announced,
    waits_for_answer,
)
from helix_store.sessions.records import SessionRecord, StoredRun, TenantScope
from helix_store.sessions.runs import (
    BUDGET_REASON,
    EFFECT_REASON,
    STOPPED_BY_BUDGET,
    STOPPED_BY_EFFECT,
    STOPPED_BY_ERROR,
    is_abandoned,
)
from helix_store.sessions.waiting import readable_open_calls
from helix_store.signals import announce, session_ready

__all__ = ["StuckSession", "aannounce_ready", "afind_stuck", "announce_ready", "find_stuck"]

Condition: TypeAlias = Literal[
    "crashed", "abandoned", "over_budget", "effect_unknown", "unanswered", "waiting"
]
Reason: TypeAlias = Literal["abandoned", "budget", "effect"]

CONDITIONS: Final[tuple[Condition, ...]] = get_args(Condition)
BY_DEFAULT: Final = tuple(each for each in CONDITIONS if each != "waiting")
MOST_STUCK: Final = 1_000
"""The maximum number of sessions that a call finds or announces."""
MOST_READ: Final = 10_000
"""The number of sessions after which the search for a condition reads no other page of up to 1,000."""

_SHOWN_FIRST: Final[tuple[Condition, ...]] = (
    "effect_unknown",
    "crashed",
    "abandoned",
    "over_budget",
    "waiting",
    "unanswered",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckSession(Serializable):
    """A session that cannot go on, and the reason.

    ``detail`` is the class of the error, the name of the budget, the id of the effect, or the names of the
    tools that wait, or what an adapter waits for. ``run_id`` is the run that has stopped.

    Example::

        for stuck in store.find_stuck(older_than=timedelta(hours=1)):
            print(stuck.session_id, stuck.condition, stuck.since, stuck.detail)
    """

    session_id: str
    tenant: str
    condition: str
    since: datetime
    detail: str | None = None
    run_id: str | None = None


# --- Arguments ---------------------------------------------------------------------------------------


def checked_conditions(conditions: Any) -> tuple[Condition, ...]:
    """Return the conditions in a fixed order. Raises `InvalidQuery`."""
    return BY_DEFAULT if conditions is None else validation.some_of(conditions, CONDITIONS, "conditions")


def _checked_age(older_than: Any) -> timedelta:
    if not isinstance(older_than, timedelta) or not validation.is_age(older_than):
        raise InvalidQuery("older_than must be a timedelta from 0 to a hundred years.", path="older_than")
    return older_than


def _longest_first(found: Iterable[StuckSession], limit: int) -> list[StuckSession]:
    return sorted(found, key=attrgetter("since", "tenant", "session_id"))[:limit]


# --- The conditions in SQL ---------------------------------------------------------------------------

_SESSION: Final = table(Session)
_EFFECT: Final = table(Effect)


def _words(values: Iterable[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


_NOT_ENDED: Final = f"s.status IN ({_words(NON_TERMINAL)})"
_TRUE: Final = "1 = 1"
_FALSE: Final = "1 = 0"
_UNITS: Final[tuple[Literal["usd", "tokens"], ...]] = ("usd", "tokens")


def _looked_up(clock: Clock, rows: str, alias: str, condition: str, *, join: str = "") -> str:
    """Return a join that finds one row by an index. PostgreSQL might otherwise join whole tables."""
    if clock is SQLITE:
        return f"{join or 'CROSS'} JOIN {rows} AS {alias} ON {condition}"
    on = "ON true" if join else ""
    return f"""{join or "CROSS"} JOIN LATERAL (
                SELECT * FROM {rows} AS {alias} WHERE {condition} LIMIT 1) AS {alias} {on}"""


def _newest_run(clock: Clock) -> str:
    run = table(Run)
    newest = f"r.turn = (SELECT max(n.turn) FROM {run} AS n WHERE n.session_id = s.id)"
    return f"{_SESSION} AS s {_looked_up(clock, run, 'r', f'r.session_id = s.id AND {newest}')}"


class _Search(NamedTuple):
    """The parts of a statement that finds sessions, in the order of ``since`` and ``key``.

    For a page of sessions, ``source_of_page`` replaces a source that begins with another table.
    """

    source: str
    where: str
    since: str
    key: str = "s.id"
    source_of_page: str = ""
    detail: str = "NULL"
    run_id: str = "NULL"
    calls: str = "NULL"
    """The column with the calls that wait, if the condition depends on them."""
    live: str = "NULL"
    """The column with the live decisions, if the condition depends on them."""


def _crashed(clock: Clock) -> _Search:
    return _Search(
        _newest_run(clock),
        f"s.stopped_by = '{STOPPED_BY_ERROR}' AND {_NOT_ENDED} AND r.status = '{RunStatus.FAILED.value}'",
        since="s.stopped_at",
        detail="r.completion_reason",
        run_id="r.run_id",
    )


def _abandoned(clock: Clock) -> _Search:
    found = _abandoned_run(clock)
    return found._replace(where=f"{_NOT_ENDED} AND {found.where}")


def _abandoned_run(clock: Clock) -> _Search:
    """Find the runs whose worker is gone, also of sessions that have ended."""
    lock = f"""(SELECT l.expires_at FROM {table(Lock)} AS l WHERE l.tenant = s.tenant
                AND l.name = s.session_id AND l.token = r.fencing_token)"""
    return _Search(
        f"{table(Run)} AS r {_looked_up(clock, _SESSION, 's', 's.id = r.session_id')}",
        f"r.status = '{RunStatus.RUNNING.value}' AND {is_abandoned(clock, run='r', session='s')}",
        # The worker may have been alive until its lock expired.
        since=f"coalesce({lock}, r.started_at)",
        key="r.id",
        source_of_page=f"{_SESSION} AS s JOIN {table(Run)} AS r ON r.session_id = s.id",
        run_id="r.run_id",
    )


def _stopped_by_budget(clock: Clock, *, is_over: bool) -> _Search:
    """Find the sessions that a budget has stopped, and that it would, or would not, stop again."""
    budget, counter = table(Budget), table(BudgetCounter)
    name = f"substr(r.completion_reason, {len(BUDGET_REASON) + 1})"
    if clock is SQLITE:
        today = "strftime('%%Y-%%m-%%d', 'now')"
    else:
        today = f"to_char({clock.now} AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
    counted = """CASE WHEN b.scope = 'tenant' OR b.value <> '' THEN b.value
                    WHEN b.scope = 'user' THEN s.user_id ELSE s.agent_type END"""
    is_budget = f"b.tenant = s.tenant AND b.name = {name} AND ({' OR '.join(scopes_of('s'))})"

    def is_counter(name: str, of_period: str) -> str:
        return f"""{name}.tenant = b.tenant AND {name}.name = b.name AND {name}.value = {counted}
                AND {name}.period = {of_period}"""

    def is_reached(unit: Literal["usd", "tokens"], held: str = "") -> str:
        # A limit that is used up stops every step, even one without an estimate.
        used, refused = f"coalesce(c.spent_{unit}, 0){held}", f"coalesce(r.refused_{unit}, 0)"
        reached = f"({used} >= b.limit_{unit} OR {used} > b.limit_{unit} - {refused})"
        return f"coalesce({reached}, {_FALSE})"

    by_spent = " OR ".join(map(is_reached, _UNITS))
    by_held = " OR ".join(is_reached(unit, f" + {held_by_others(clock, unit, 's')}") for unit in _UNITS)
    return _Search(
        f"""{_newest_run(clock)}
            {_looked_up(clock, budget, "b", is_budget, join="LEFT")}
            {_looked_up(clock, counter, "c", is_counter("c", period(today)), join="LEFT")}
            {_looked_up(clock, counter, "h", is_counter("h", "''"), join="LEFT")}""",
        # Each hold takes a look at a lock: first, see whether the limit is used up without them.
        f"""s.stopped_by = '{STOPPED_BY_BUDGET}' AND {_NOT_ENDED}
            AND r.status = '{RunStatus.INTERRUPTED.value}'
            AND substr(r.completion_reason, 1, {len(BUDGET_REASON)}) = '{BUDGET_REASON}'
            AND {"" if is_over else "NOT "}CASE WHEN {by_spent} THEN {_TRUE}
                WHEN coalesce(CAST(h.holds AS text), '{{}}') = '{{}}' THEN {_FALSE} ELSE {by_held} END""",
        since="s.stopped_at",
        detail=name,
        run_id="r.run_id",
    )


def _over_budget(clock: Clock) -> _Search:
    return _stopped_by_budget(clock, is_over=True)


_IS_OPEN: Final = f"{{}}.state IN ({_words(OPEN_EFFECTS)})"


def _effect_unknown(clock: Clock) -> _Search:
    # Each session is found once, by its first unknown effect.
    earlier = f"""EXISTS (SELECT 1 FROM {_EFFECT} AS o WHERE o.session_id = s.id
                AND o.sequence < e.sequence AND {is_unknown(clock, "o")})"""
    return _Search(
        f"{_EFFECT} AS e {_looked_up(clock, _SESSION, 's', 's.id = e.session_id')}",
        f"{_IS_OPEN.format('e')} AND {is_unknown(clock, 'e')} AND NOT {earlier}",
        since="e.started_at",
        key="e.id",
        source_of_page=f"{_SESSION} AS s JOIN {_EFFECT} AS e ON e.session_id = s.id",
        detail="e.effect_id",
        run_id="e.run_id",
    )


def _unanswered(clock: Clock) -> _Search:
    return _Search(
        f"{_SESSION} AS s",
        is_unanswered(clock, f"(SELECT {clock.now})"),
        since="s.next_post_at",
        calls="s.pending_client_tool_calls",
        live="s.live_decisions",
    )


def _waiting(_: Clock) -> _Search:
    return _Search(
        f"{_SESSION} AS s",
        f"""{_NOT_ENDED}
            AND (s.suspension_kind IN ('{WAITING_KIND}') OR s.waiting_kind IS NOT NULL)""",
        since="s.updated_at",
        detail="s.waiting_kind",
        calls="s.pending_client_tool_calls",
        live="s.live_decisions",
    )


_SEARCHES: Final[dict[Condition, Callable[[Clock], _Search]]] = {
    "crashed": _crashed,
    "abandoned": _abandoned,
    "over_budget": _over_budget,
    "effect_unknown": _effect_unknown,
    "unanswered": _unanswered,
    "waiting": _waiting,
}


def _ready_after_budget(clock: Clock) -> _Search:
    return _stopped_by_budget(clock, is_over=False)


def _ready_after_effect(clock: Clock) -> _Search:
    return _Search(
        _newest_run(clock),
        f"""s.stopped_by = '{STOPPED_BY_EFFECT}' AND {_NOT_ENDED}
            AND r.status = '{RunStatus.INTERRUPTED.value}'
            AND substr(r.completion_reason, 1, {len(EFFECT_REASON)}) = '{EFFECT_REASON}'
            AND NOT EXISTS (SELECT 1 FROM {_EFFECT} AS e WHERE e.session_id = s.id
                AND e.effect_id = substr(r.completion_reason, {len(EFFECT_REASON) + 1})
                AND {_IS_OPEN.format("e")})""",
        since="s.stopped_at",
    )


_READY: Final[dict[Reason, Callable[[Clock], _Search]]] = {
    # A worker may have been killed after its last step: the next turn of an ended session ends the run.
    "abandoned": _abandoned_run,
    "budget": _ready_after_budget,
    "effect": _ready_after_effect,
}


class _Row(NamedTuple):
    key: int
    """The key of the session."""
    place: int
    """The key in the order of the statement."""
    tenant: str
    session_id: str
    since: Any
    detail: str | None
    run_id: str | None
    status: str
    suspension_kind: str | None
    calls: str | None
    live: str | None
    condition: Condition
    announced_at: Any = None


def _selected(search: _Search, condition: str, *more: str) -> str:
    columns = [
        "s.id",
        search.key,
        "s.tenant",
        "s.session_id",
        f"{search.since} AS since",
        f"CAST({search.detail} AS text)",
        f"CAST({search.run_id} AS text)",
        "s.status",
        "s.suspension_kind",
        f"CAST({search.calls} AS text)",
        f"CAST({search.live} AS text)",
        f"'{condition}'",
        *more,
    ]
    return f"SELECT {', '.join(columns)} FROM {search.source}"


Tenants: TypeAlias = Literal["one", "some", "all"]
"""The sessions among which a statement searches: of one tenant, of a list of tenants, or of all tenants."""


def _statement(text: Callable[[Clock, str], str], tenants: Tenants) -> Statement:
    # With the plain column, PostgreSQL may combine the index of the condition with all entries of the tenant
    # in another index: with a million sessions, that took five times as long. Citus needs the plain column to
    # ask a single node. On SQLite, ``+`` has the same effect.
    forms: tuple[str, str, str] = ("", "", "")
    if tenants == "one":
        is_one = "s.tenant = (SELECT %(tenant)s)"
        forms = (f"coalesce({is_one}, false) AND", f"{is_one} AND", f"+{is_one} AND")
    elif tenants == "some":
        is_some, is_some_on_sqlite = is_in_list("s.tenant", "tenants", "text")
        forms = (f"coalesce({is_some}, false) AND", f"{is_some} AND", f"+{is_some_on_sqlite} AND")
    postgresql, citus, sqlite = forms
    return Statement(text(POSTGRESQL, postgresql), text(SQLITE, sqlite), citus=(text(CITUS, citus),))


@cache
def find_statement(
    condition: Condition, tenants: Tenants, *, is_aged: bool = False, is_next: bool = False
) -> Statement:
    """Return the statement that finds the sessions with a condition, the longest first.

    With ``is_next``, it begins after the row with the time ``since`` and the key ``place``.
    """

    def text(clock: Clock, of_tenant: str) -> str:
        search = _SEARCHES[condition](clock)
        # A subquery is evaluated once, so an index can be read up to it.
        age = f"AND {search.since} <= (SELECT {clock.after('age_ms')})" if is_aged else ""
        after = f"AND ({search.since}, {search.key}) > (%(since)s, %(place)s)" if is_next else ""
        return f"""
        {_selected(search, condition)}
        WHERE {of_tenant} {search.where} {age} {after}
        ORDER BY since, {search.key} LIMIT %(limit)s"""

    return _statement(text, tenants)


@cache
def _ready_statement(reason: Reason, tenants: Tenants) -> Statement:
    """Return the statement that finds sessions that can go on, those that were announced last at the end."""

    def text(clock: Clock, of_tenant: str) -> str:
        search = _READY[reason](clock)
        return f"""
        {_selected(search, reason, "s.announced_at")}
        WHERE {of_tenant} {search.where} AND NOT {is_driven(clock)}
        ORDER BY s.announced_at NULLS FIRST, since, {search.key} LIMIT %(limit)s"""

    return _statement(text, tenants)


def _of_page(search: _Search) -> _Search:
    return search._replace(source=search.source_of_page or search.source)


@cache
def _conditions_of_keys() -> Statement:
    def text(clock: Clock) -> str:
        return "\n UNION ALL ".join(
            f"{_selected(search, condition)} WHERE s.id IN %(keys)s AND {search.where}"
            for condition, make in _SEARCHES.items()
            for search in (_of_page(make(clock)),)
        )

    return for_keys(Statement(text(POSTGRESQL), text(SQLITE), citus=(text(CITUS),)))


def _found(db: Database, rows: Iterable[_Row]) -> Iterator[tuple[_Row, StuckSession]]:
    """Yield the rows, each with its value, except those that the calls which their statement cannot read
    exclude. This takes one more statement if a state holds an answer that may be the agent's own.
    """
    rows = list(rows)
    suspended = {
        row.key: (row.calls, row.live)
        for row in rows
        if (row.condition == "waiting" and row.suspension_kind == WAITING_KIND)
        or (row.condition == "unanswered" and row.suspension_kind is not None)
    }
    calls = readable_open_calls(db, suspended)
    for row in rows:
        stuck = _stuck(row, calls.get(row.key))
        if stuck is not None:
            yield row, stuck


def _tools(calls: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted({str(call.get("tool_name")) for call in calls.values()})


def _stuck(row: _Row, calls: Mapping[str, Mapping[str, Any]] | None) -> StuckSession | None:
    """Return the session that a row describes, or ``None`` if its tool calls show that the condition does not
    hold: for example, the session is listed as waiting, but every call has been answered.

    ``calls`` are the open calls, ``None`` if the calls cannot be read.
    """
    detail = row.detail
    if row.condition == "waiting" and detail is not None:
        detail = detail.partition(":")[0]
    if row.condition == "waiting" and row.suspension_kind == WAITING_KIND:
        if calls is not None and not calls and detail is None:
            return None
        detail = ", ".join(_tools(calls or {})) or detail
    if row.condition == "unanswered" and waits_for_answer(row.status, row.suspension_kind, calls):
        return None
    return StuckSession(
        session_id=row.session_id,
        tenant=row.tenant,
        condition=row.condition,
        since=as_utc(row.since),
        detail=detail,
        run_id=row.run_id,
    )


# --- The public calls --------------------------------------------------------------------------------


def find_stuck(
    *,
    using: str | None = None,
    tenant: str | None = None,
    conditions: Collection[str] | None = None,
    older_than: timedelta = timedelta(0),
    limit: int = 200,
) -> list[StuckSession]:
    """Return the sessions that cannot go on, the longest first, at most 1,000.

    ``tenant=None`` means all tenants of the database ``using``. By default, ``conditions`` are all but
    ``waiting``. A session is returned once for each of its conditions. ``older_than`` is at most a hundred
    years. Runs one statement for each condition, which reads an index. ``waiting`` takes another one if there
    are answers to approvals that may be the agent's own. ``waiting`` and ``unanswered`` take more if sessions
    of which calls are answered would take the places of others. After 10,000 sessions, the search for a
    condition ends with a warning in the log. Raises `InvalidQuery`.
    """
    chosen, age = checked_conditions(conditions), _checked_age(older_than)
    limit = validation.page_limit(limit, maximum=MOST_STUCK)
    db = Database(using, "" if tenant is None else validation.tenant(tenant))
    parameters: dict[str, Any] = {"tenant": db.tenant}
    if age:
        parameters["age_ms"] = -(age // timedelta(milliseconds=1))
    found: list[StuckSession] = []
    for condition in chosen:
        tenants: Tenants = "all" if tenant is None else "one"
        found += _longest(db, condition, tenants, parameters, limit).values()
    return _longest_first(found, limit)


async def afind_stuck(
    *,
    using: str | None = None,
    tenant: str | None = None,
    conditions: Collection[str] | None = None,
    older_than: timedelta = timedelta(0),
    limit: int = 200,
) -> list[StuckSession]:
    """Async version of `find_stuck`."""
    return await in_thread_to_the_end(
        lambda: find_stuck(
            using=using, tenant=tenant, conditions=conditions, older_than=older_than, limit=limit
        )
    )


def conditions_of(db: Database, keys: Sequence[int]) -> dict[int, StuckSession]:
    """Return the condition to show for each of these sessions that cannot go on, by key.

    A session with a row that cannot be read has no condition to show. One statement, and another one if there
    are answers to approvals that may be the agent's own.
    """
    if not keys:
        return {}
    found: dict[int, StuckSession] = {}
    try:
        rows = list(_rows(db, _conditions_of_keys(), {"keys": list_parameter(db, list(keys))}))
    except IntegrityFault:
        if len(keys) == 1:
            return {}
        return {key: stuck for each in keys for key, stuck in conditions_of(db, [each]).items()}
    for row, stuck in _found(db, sorted(rows, key=lambda row: _SHOWN_FIRST.index(row.condition))):
        found.setdefault(row.key, stuck)
    return found


def is_mere(status: str) -> bool:
    """Return whether a status only says that a session has not ended, so that a condition replaces it."""
    return status in (SessionStatus.ACTIVE, SessionStatus.RUNNING, SessionStatus.INTERRUPTED)


def conditions_of_ids(
    using: str, sessions: Collection[tuple[str, str]]
) -> dict[tuple[str, str], StuckSession]:
    """Return the conditions of `conditions_of` by the tenant and the id of the session.

    One statement more than `conditions_of`.
    """
    if not sessions:
        return {}
    db = Database(using, "")
    tenants, ids = ({each[place] for each in sessions} for place in (0, 1))
    # Ids of another tenant may be among them, which does no harm.
    rows = Session.objects.using(using).filter(tenant__in=tenants, session_id__in=ids)
    keys = db.query(lambda: list(rows.values_list("pk", flat=True)))
    return {(each.tenant, each.session_id): each for each in conditions_of(db, keys).values()}


def find_keys(
    using: str,
    conditions: Collection[str],
    *,
    limit: int = MOST_STUCK,
    tenants: Sequence[str] | None = None,
) -> dict[int, StuckSession]:
    """Return sessions of these tenants, or of all tenants, with one of the conditions, by key, the longest
    first. A session with several of the conditions has the longest one.
    """
    db = Database(using, "")
    found: dict[int, StuckSession] = {}
    parameters: dict[str, Any] = {"tenant": ""}
    if tenants is not None:
        parameters["tenants"] = list_parameter(db, list(tenants))
    for condition in checked_conditions(conditions):
        longest = _longest(db, condition, "all" if tenants is None else "some", parameters, limit)
        for key, stuck in longest.items():
            if key not in found or stuck.since < found[key].since:
                found[key] = stuck
    return dict(sorted(found.items(), key=lambda each: each[1].since)[:limit])


_logger = logging.getLogger(__name__)
_TOO_MANY_ANSWERED: Final = (
    "The search for sessions that are %s has read %s sessions and found only %s: the calls of the others are "
    "answered. Resume or end those sessions; until then, the search does not reach the sessions behind them."
)


def _longest(
    db: Database, condition: Condition, tenants: Tenants, parameters: Mapping[str, Any], limit: int
) -> dict[int, StuckSession]:
    """Return the sessions with a condition by key: at least ``limit``, if there are as many among those that
    it reads.

    This is one page, unless calls exclude some of its sessions. The pages grow: sessions that nobody resumes
    may be many. A session that changes in the meantime may be in two pages.
    """
    found: dict[int, StuckSession] = {}
    page, read = dict(parameters), 0
    for size in growing_pages(limit):
        statement = find_statement(condition, tenants, is_aged="age_ms" in parameters, is_next=read > 0)
        rows = list(_rows(db, statement, page | {"limit": size}))
        read += len(rows)
        for row, stuck in _found(db, rows):
            found.setdefault(row.key, stuck)
        if len(rows) < size or len(found) >= limit:
            break
        if read >= MOST_READ:
            _logger.warning(_TOO_MANY_ANSWERED, condition, read, len(found))
            break
        page |= {"since": rows[-1].since, "place": rows[-1].place}
    return found


def _rows(db: Database, statement: Statement, parameters: dict[str, Any]) -> Iterable[_Row]:
    return (_Row(*row) for row in db.read(statement, parameters))


def announce_ready(*, using: str | None = None, tenant: str | None = None, limit: int = 200) -> int:
    """Send `session_ready` for sessions that can go on, although nothing has arrived for them.

    They are abandoned, their budget was raised or has a new period, or their effect was settled. Returns
    their number. ``tenant=None`` means all tenants of the database ``using``. If there are more sessions than
    ``limit``, those that were announced last come last. Safe to repeat. Raises `InvalidQuery`.
    """
    limit = validation.page_limit(limit, maximum=MOST_STUCK)
    db = Database(using, "" if tenant is None else validation.tenant(tenant))
    parameters = {"tenant": db.tenant, "limit": limit}
    ready: list[tuple[Reason, _Row]] = []
    for reason in _READY:
        statement = _ready_statement(reason, "all" if tenant is None else "one")
        ready += ((reason, row) for row in _rows(db, statement, parameters))
    ready.sort(key=lambda each: _turn(each[1]))
    if len(ready) >= limit:
        ready = ready[:limit]
        mark_announced(using, ((row.tenant, row.key) for _, row in ready))
    for reason, row in ready:
        announce(db, row.session_id, [session_ready], tenant=row.tenant, reason=reason)
    return len(ready)


async def aannounce_ready(*, using: str | None = None, tenant: str | None = None, limit: int = 200) -> int:
    """Async version of `announce_ready`."""
    return await in_thread_to_the_end(lambda: announce_ready(using=using, tenant=tenant, limit=limit))


def _turn(row: _Row) -> tuple[bool, datetime]:
    at = row.announced_at
    return at is not None, as_utc(row.since if at is None else at)


def announce_again(db: Database, session_id: str) -> None:
    """Send `session_ready` with the reason ``again``, because a person asked for it."""
    announce(db, session_id, [session_ready], reason="again")


# --- In memory ---------------------------------------------------------------------------------------


class MemoryConditions:
    """The conditions of the sessions of a tenant in memory."""

    def __init__(self, scope: TenantScope, *, tenant: str) -> None:
        self._scope = scope
        self._tenant = tenant
        self._budgets = MemoryBudgets(scope)
        self._locks = scope.table(LockTable)

    def find(self, conditions: Any, older_than: Any, limit: Any) -> list[StuckSession]:
        """Return the sessions of `find_stuck`."""
        chosen, age = checked_conditions(conditions), _checked_age(older_than)
        limit = validation.page_limit(limit, maximum=MOST_STUCK)
        until = moments.now() - age
        with self._scope.lock:
            found = [
                stuck
                for record in self._scope.sessions.values()
                for condition in chosen
                for stuck in (self._stuck(record, condition),)
                if stuck is not None and stuck.since <= until
            ]
        return _longest_first(found, limit)

    def _stuck(self, record: SessionRecord, condition: Condition) -> StuckSession | None:
        found: tuple[datetime, str | None, str | None] | None
        if condition == "effect_unknown":
            found = self._unknown_effect(record)
        elif SessionStatus(record.columns["status"]).is_terminal:
            found = None
        else:
            found = getattr(self, f"_{condition}")(record)
        if found is None:
            return None
        since, detail, run_id = found
        return StuckSession(
            session_id=record.session_id,
            tenant=self._tenant,
            condition=condition,
            since=since,
            detail=detail,
            run_id=run_id,
        )

    def _crashed(self, record: SessionRecord) -> Any:
        newest = _newest(record)
        if newest is None or newest.run.status is not RunStatus.FAILED:
            return None
        return newest.run.ended_at, newest.run.completion_reason, newest.run.run_id

    def _abandoned(self, record: SessionRecord) -> Any:
        running = record.running_run
        if running is None or not self._scope.is_abandoned(record):
            return None
        lock = self._locks[record.session_id]
        is_expired = lock.token == running.fencing_token and not lock.was_released
        return lock.expires_at if is_expired else running.run.started_at, None, running.run.run_id

    def _over_budget(self, record: SessionRecord) -> Any:
        newest = _newest(record)
        reason = "" if newest is None else newest.run.completion_reason or ""
        if newest is None or newest.run.status is not RunStatus.INTERRUPTED:
            return None
        if not reason.startswith(BUDGET_REASON):
            return None
        name, columns = reason.removeprefix(BUDGET_REASON), record.columns
        root_id = columns["root_session_id"] or record.session_id
        spender = Spender(root_id, columns["user_id"], columns["agent_type"])
        refused = newest.refused_usd or 0, newest.refused_tokens or 0
        for balance in self._budgets.balances(keys_of(spender), record.session_id):
            limits = balance.definition.limit_usd, balance.definition.limit_tokens
            is_reached = any(
                limit is not None and (used >= limit or used > limit - more)
                for limit, used, more in zip(limits, balance.spent + balance.held, refused, strict=True)
            )
            if balance.definition.name == name and is_reached:
                return newest.run.ended_at, name, newest.run.run_id
        return None

    def _unknown_effect(self, record: SessionRecord) -> Any:
        for effect in record.effects.values():
            is_held = self._scope.is_held(record.session_id, effect.fencing_token)
            if effect._replace(is_held=is_held).state_as_read == "unknown":
                return effect.started_at, effect.effect_id, effect.run_id
        return None

    def _unanswered(self, record: SessionRecord) -> Any:
        columns, due_at = record.columns, record.columns["next_post_at"]
        is_due = due_at is not None and due_at <= moments.now()
        calls = columns["status"], columns["suspension_kind"], record.open_calls
        if not is_due or waits_for_answer(*calls) or self._scope.is_locked(record.session_id):
            return None
        return due_at, None, None

    def _waiting(self, record: SessionRecord) -> Any:
        columns = record.columns
        if columns["suspension_kind"] != WAITING_KIND:
            return None
        tools = _tools(record.open_calls or {})
        return (columns["updated_at"], ", ".join(tools), None) if tools else None


def _newest(record: SessionRecord) -> StoredRun | None:
    return max(record.runs.values(), key=lambda stored: stored.run.turn, default=None)
