"""The usage stores: the public calls, reports, and the ledger in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

from helix_store import conf
from helix_store.core import validation
from helix_store.core.dicts import AnyUsageEntry
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payloads import exact_cost
from helix_store.core.types import Timestamp, UsageKind, UserId
from helix_store.core.usage import (
    TokenCounts,
    UsageBucket,
    UsageEntry,
    UsageGroup,
    UsageGrouping,
    UsagePage,
    UsageReport,
    UsageReportGrouping,
    UsageRollup,
    UsageTimeBucket,
    UsageTotal,
    cost_from_units,
    cost_units,
)
from helix_store.counters import Spender
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter, read_cursor, summed, write_cursor
from helix_store.engine.memory import MemoryTable, MemoryWorld
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.models import UsageEntry as UsageRow
from helix_store.sessions.memory import with_descendants
from helix_store.sessions.records import TenantScope
from helix_store.usage.ledger import (
    COSTS_BY_DAY_AND_AGENT,
    COSTS_OF_TENANTS_BY_DAY_AND_AGENT,
    TOKEN_FIELDS,
    DatabaseUsage,
    KindFilter,
    StepFilter,
    UsageQuery,
    bucket_start,
    checked_entry,
    priced,
    report_statement,
    rollup,
    sum_of,
    time_series,
    token_counts,
    totals_of_sessions,
)


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry, its number in the order of recording, and the values of its session at that time."""

    entry: UsageEntry
    ordinal: int
    spender: Spender


@dataclass(slots=True)
class UsageLedger(MemoryTable):
    """The entries of one tenant by session id, in the order of recording."""

    current: dict[str, list[StoredEntry]] = field(default_factory=dict)
    kept: dict[str, list[StoredEntry]] = field(default_factory=dict)
    """Entries of deleted sessions with this id."""
    _ids: set[str] = field(default_factory=set)
    _recorded: int = 0

    def add(self, entry: UsageEntry, spender: Spender) -> None:
        """Record an entry unless its id is known."""
        entry_id = str(entry.id)
        if entry_id in self._ids:
            return
        self._ids.add(entry_id)
        self._recorded += 1
        self.current.setdefault(entry.session_id, []).append(StoredEntry(entry, self._recorded, spender))

    def of(self, session_id: str) -> Sequence[StoredEntry]:
        return self.current.get(session_id, ())

    def all(self) -> Iterator[StoredEntry]:
        for entries in (*self.current.values(), *self.kept.values()):
            yield from entries

    def session_is_gone(self, session_id: str, *, keep_usage: bool) -> None:
        """Delete a session's entries, or keep them separate from a later session with the same id."""
        entries = self.current.pop(session_id, [])
        if keep_usage and entries:
            self.kept.setdefault(session_id, []).extend(entries)
        if not keep_usage:
            self._ids.difference_update(str(stored.entry.id) for stored in entries)

    def clear(self) -> None:
        """Delete every entry."""
        self.current.clear()
        self.kept.clear()
        self._ids.clear()

    def delete(self, session_id: str) -> int:
        """Delete all entries with a session id, including kept ones, and return their number."""
        entries = [*self.current.pop(session_id, ()), *self.kept.pop(session_id, ())]
        self._ids.difference_update(str(stored.entry.id) for stored in entries)
        return len(entries)


class MemoryUsage:
    """The in-memory back end; see `DatabaseUsage` for its operations."""

    def __init__(self, scope: TenantScope, *, knows_sessions: bool) -> None:
        self._scope = scope
        self._ledger = scope.table(UsageLedger)
        self._knows_sessions = knows_sessions

    def record(self, entries: Sequence[UsageEntry], *, locks_holds: bool = False) -> bool:
        with self._scope.lock:
            spenders = [self._spender(entry) for entry in entries]
            for entry, spender in zip(entries, spenders, strict=True):
                self._ledger.add(entry, spender)
        return False

    def _spender(self, entry: UsageEntry) -> Spender:
        if not self._knows_sessions:
            agent_type = entry.source.name if entry.source.type == "agent" else None
            return Spender(root_id=None, user_id=None, agent_type=agent_type)
        columns = self._scope.require(entry.session_id).columns
        return Spender(
            columns["root_session_id"] or entry.session_id, columns["user_id"], columns["agent_type"]
        )

    def select(
        self, session_id: str, kinds: KindFilter, steps: StepFilter, *, limit: int | None, offset: int
    ) -> list[UsageEntry]:
        first, last = steps
        entries = _by_time(
            stored
            for stored in self._of_session(session_id)
            if (kinds is None or stored.entry.kind in kinds)
            and (first is None or stored.entry.step_count >= first)
            and (last is None or stored.entry.step_count <= last)
        )
        end = None if limit is None else offset + limit
        return [stored.entry for stored in entries[offset:end]]

    def rollup(self, session_id: str, *, include_sub_agents: bool) -> UsageRollup | None:
        with self._scope.lock:
            session_ids = self._tree(session_id) if include_sub_agents else [session_id]
            entries = [stored for name in session_ids for stored in self._of_session(name)]
            if not entries and not self._is_known(session_id):
                return None
        return rollup((sum_of(stored.entry) for stored in entries), session_count=len(session_ids))

    def query(self, query: UsageQuery) -> tuple[list[tuple[UsageEntry, int]], int | None, bool]:
        found = _by_time(stored for stored in self._all() if _matches(stored, query))
        total = len(found)
        if query.descending:
            found.reverse()
        if query.after is not None:
            timestamp, ordinal = query.after
            seen = validation.datetime_to_milliseconds(timestamp), ordinal
            found = [
                stored
                for stored in found
                if (_position(stored) < seen if query.descending else _position(stored) > seen)
            ]
        end = query.offset + query.limit
        page = [(stored.entry, stored.ordinal) for stored in found[query.offset : end]]
        return page, total if query.count else None, end < len(found)

    def time_series(
        self, query: UsageQuery, bucket: UsageTimeBucket, group_by: UsageGrouping
    ) -> list[UsageBucket]:
        group_of = _GROUPS[group_by]
        return time_series(
            UsageBucket(
                start=bucket_start(validation.milliseconds_to_datetime(stored.entry.timestamp), bucket),
                group=group_of(stored),
                tokens=stored.entry.tokens or TokenCounts(),
                cost_usd=stored.entry.cost_usd or cost_from_units(0),
                entry_count=1,
            )
            for stored in self._all()
            if _matches(stored, query)
        )

    def exists(self, session_id: str) -> bool:
        with self._scope.lock:
            return bool(self._of_session(session_id))

    def delete(self, session_id: str) -> int:
        with self._scope.lock:
            return self._ledger.delete(session_id)

    def _is_known(self, session_id: str) -> bool:
        return self._scope.find(session_id) is not None

    def _of_session(self, session_id: str) -> Sequence[StoredEntry]:
        if self._knows_sessions and not self._is_known(session_id):
            return self._ledger.kept.get(session_id, ())
        return self._ledger.of(session_id)

    def _all(self) -> list[StoredEntry]:
        with self._scope.lock:
            return list(self._ledger.all())

    def _tree(self, session_id: str) -> list[str]:
        if self._knows_sessions:
            return with_descendants(self._scope.sessions, session_id) or [session_id]
        found = {session_id: None}
        pending = [session_id]
        while pending:
            for stored in self._ledger.of(pending.pop()):
                child_id = stored.entry.sub_session_id
                if child_id is not None and child_id not in found:
                    found[child_id] = None
                    pending.append(child_id)
        return list(found)


def _position(stored: StoredEntry) -> tuple[int, int]:
    return stored.entry.timestamp, stored.ordinal


def _by_time(entries: Iterable[StoredEntry]) -> list[StoredEntry]:
    return sorted(entries, key=_position)


def _matches(stored: StoredEntry, query: UsageQuery) -> bool:
    entry = stored.entry
    at = validation.milliseconds_to_datetime(entry.timestamp)
    return (
        (query.agent_type is None or stored.spender.agent_type == query.agent_type)
        and (query.user_id is None or stored.spender.user_id == query.user_id)
        and (query.model is None or entry.model == query.model)
        and (query.kinds is None or entry.kind in query.kinds)
        and (query.date_from is None or at >= query.date_from)
        and (query.date_to is None or at < query.date_to)
    )


_GROUPS: dict[UsageGrouping, Callable[[StoredEntry], str | None]] = {
    UsageGrouping.MODEL: lambda stored: stored.entry.model,
    UsageGrouping.AGENT_TYPE: lambda stored: stored.spender.agent_type,
    UsageGrouping.USER_ID: lambda stored: stored.spender.user_id,
    UsageGrouping.KIND: lambda stored: stored.entry.kind.value,
}


_FORMULA_STARTS: Final = ("=", "+", "-", "@")

ENTRIES_READ: Final = 1_000
"""The maximum number of entries of one session that are added up."""


@dataclass(frozen=True, slots=True)
class SessionTotal:
    """A session's totals. ``is_partial`` means that the session has more entries than were added up."""

    tokens: int
    cost_usd: Decimal
    is_partial: bool


def usage_report(
    *,
    by: UsageReportGrouping | str,
    using: str | None = None,
    tenant: str | None = None,
    agent_type: str | None = None,
    user_id: UserId | None = None,
    model: str | None = None,
    date_from: Timestamp | None = None,
    date_to: Timestamp | None = None,
    zone: ZoneInfo | str = "UTC",
    limit: int | None = None,
) -> UsageReport:
    """Add up the usage of each group and of all groups together.

    ``by`` is ``session``, ``tree``, ``model``, ``agent_type``, ``user`` or ``day``. ``tenant=None`` means
    every tenant. Filters are combined with AND; ``agent_type`` and ``user_id`` are those of the session at
    the time of recording. ``date_from`` is inclusive, ``date_to`` is exclusive. ``zone`` is the time zone
    that determines where a day begins. The groups with the highest costs come first; days are in order.
    ``limit`` restricts the result to that many of the highest groups, or of the last days. Every entry
    belongs to exactly one group. Entries of a deleted session belong to the group of their session id, which
    is also their tree. Takes one statement; the database computes the sums. Raises `InvalidQuery`.
    """
    return report_of_tenants(
        None if tenant is None else [validation.tenant(tenant)],
        by=by,
        using=using,
        agent_type=agent_type,
        user_id=user_id,
        model=model,
        date_from=date_from,
        date_to=date_to,
        zone=zone,
        limit=limit,
    )


def report_of_tenants(
    tenants: Sequence[str] | None,
    *,
    by: UsageReportGrouping | str,
    using: str | None = None,
    agent_type: str | None = None,
    user_id: UserId | None = None,
    model: str | None = None,
    date_from: Timestamp | None = None,
    date_to: Timestamp | None = None,
    zone: ZoneInfo | str = "UTC",
    limit: int | None = None,
) -> UsageReport:
    """Return `usage_report` for these tenants; ``None`` means every tenant."""
    conf.require_usable_prefix()
    grouping = validation.query_enum(UsageReportGrouping, by, "by")
    db = Database(using, "", None)
    is_one = tenants is not None and len(tenants) == 1
    given = {
        "tenant": tenants[0] if tenants is not None and is_one else None,
        "tenants": None if tenants is None or is_one else list_parameter(db, list(tenants)),
        "agent_type": validation.optional_identifier(agent_type, "agent_type"),
        "user_id": validation.user_id(user_id),
        "model": validation.optional_identifier(model, "model"),
        "date_from": None if date_from is None else validation.aware_datetime(date_from, "date_from"),
        "date_to": None if date_to is None else validation.aware_datetime(date_to, "date_to"),
    }
    filters = {name: value for name, value in given.items() if value is not None}
    rest = {
        "limit": MAX_BIGINT if limit is None else validation.query_number(limit, "limit", minimum=1),
        "zone": time_zone(zone).key,
    }
    statement = report_statement(grouping, tuple(filters))
    # This is not prepared, because the number of entries that a filter selects depends on its values.
    return _report(grouping, db.query(lambda: db.execute(statement, filters | rest)))


def costs_by_day_and_agent(
    *, using: str, date_from: Timestamp, zone: ZoneInfo, tenants: Sequence[str] | None = None
) -> list[tuple[str, str, Decimal]]:
    """Return the costs of these tenants, or of all tenants, since a time, by day, such as ``2026-11-29``, and
    by agent type.

    Takes one statement.
    """
    parameters = {"date_from": validation.aware_datetime(date_from, "date_from"), "zone": zone.key}
    db = Database(using, "", None)
    statement = COSTS_BY_DAY_AND_AGENT
    if tenants is not None:
        statement = COSTS_OF_TENANTS_BY_DAY_AND_AGENT
        parameters["tenants"] = list_parameter(db, list(tenants))
    rows = db.query(lambda: db.execute(statement, parameters))
    return [(str(day), agent, cost_from_units(summed(cost))) for day, agent, cost in rows]


def session_totals(keys: Sequence[int], *, using: str) -> dict[int, SessionTotal]:
    """Return the usage of sessions without their sub-agents, by the keys of their rows. Takes one statement,
    which reads a bounded number of entries for each session.
    """
    db = Database(using, "")
    rows = db.read(totals_of_sessions(ENTRIES_READ), {"keys": list_parameter(db, keys)})
    totals = {}
    for key, *sums in rows:
        count, tokens, cost = sums if db.is_postgresql else sums[0].split(";")
        is_partial = int(count) > ENTRIES_READ
        totals[key] = SessionTotal(summed(tokens), cost_from_units(summed(cost)), is_partial)
    return totals


def unpriced_entries(session_id: str, *, using: str | None = None, tenant: str = "") -> int:
    """Count a session's token entries without a cost, excluding its sub-sessions."""
    db = Database(using, validation.tenant(tenant), None)
    entries = UsageRow.objects.using(db.alias).filter(
        session__tenant=db.tenant,
        session__session_id=validation.identifier(session_id, "session_id"),
        kind=UsageKind.TOKENS,
        cost_usd=None,
    )
    return db.query(entries.count)


def csv_rows(report: UsageReport) -> Iterator[list[str]]:
    """Yield the names of the columns, followed by a row for each group, as text. Costs are exact.

    Stored text that a spreadsheet would treat as a formula gets a leading apostrophe.
    """
    counts = ("entry_count", "tool_calls", "unpriced")
    yield [
        "tenant",
        report.by.value,
        "is_deleted",
        *counts,
        *(f"{name}_tokens" for name in TOKEN_FIELDS),
        "cost_usd",
    ]
    for group in report.groups:
        yield [
            _inert(group.tenant),
            _inert(group.group),
            str(group.is_deleted).lower(),
            *(str(getattr(group, name)) for name in counts),
            *(str(getattr(group.tokens, name)) for name in TOKEN_FIELDS),
            exact_cost(group.cost_usd),
        ]


def _inert(text: str | None) -> str:
    shown = text or ""
    return f"'{shown}" if shown.startswith(_FORMULA_STARTS) else shown


def time_zone(zone: ZoneInfo | str) -> ZoneInfo:
    """Return a time zone by its name, such as ``Asia/Tokyo``. Raises `InvalidQuery`."""
    try:
        found = zone if isinstance(zone, ZoneInfo) else ZoneInfo(zone)
    except (KeyError, OSError, TypeError, ValueError) as exc:
        raise InvalidQuery(f"There is no time zone {zone!r}.", path="zone") from exc
    if not found.key:
        raise InvalidQuery("A time zone needs a name.", path="zone")
    return found


def _report(by: UsageReportGrouping, rows: Iterable[tuple[Any, ...]]) -> UsageReport:
    groups = []
    group_count, total = 0, _sums(())
    for count, tenant, name, is_deleted, *sums in rows:
        if count is None:
            groups.append(UsageGroup(tenant=tenant, group=name, is_deleted=bool(is_deleted), **_sums(sums)))
        else:
            group_count, total = count, _sums(sums)
    groups.sort(key=_by_day if by is UsageReportGrouping.DAY else _by_cost)
    return UsageReport(by=by, groups=groups, group_count=group_count, total=UsageTotal(**total))


def _sums(columns: Iterable[Any]) -> dict[str, Any]:
    entries, tool_calls, unpriced, *tokens, cost = map(summed, columns or (0,) * (len(TOKEN_FIELDS) + 4))
    return {
        "entry_count": entries,
        "tool_calls": tool_calls,
        "unpriced": unpriced,
        "tokens": token_counts(tokens),
        "cost_usd": cost_from_units(cost),
    }


def _by_day(group: UsageGroup) -> str:
    return group.group or ""


def _by_cost(group: UsageGroup) -> tuple[Any, ...]:
    name = (group.tenant or "", group.group is None, group.group or "", group.is_deleted)
    return -cost_units(group.cost_usd), -group.tokens.total, *name


Kinds = UsageKind | str | Collection[UsageKind | str]


class UsageStoreBase:
    """The usage store of the contract; subclasses provide the back end."""

    def __init__(self, backend: DatabaseUsage | MemoryUsage, *, tenant: str) -> None:
        self._backend = backend
        self.tenant: Final = tenant

    # Recording

    def record_entry(self, entry: UsageEntry | AnyUsageEntry) -> str:
        """Record one entry and return its id.

        Tokens without a ``cost_usd`` are priced if the extra ``prices`` is installed and knows the model.
        Joins the caller's transaction. It waits for a deletion of the session, but not for its steps. Raises
        `InvalidPayload`, `SessionNotFound` and `UnsupportedIsolation`, in which case nothing is stored. Safe
        to repeat with an ``id``: an entry with a known id is not recorded.
        """
        (entry_id,) = self._record([priced(checked_entry(entry))])
        return entry_id

    def record_entries(self, entries: Iterable[UsageEntry | AnyUsageEntry]) -> list[str]:
        """Record all entries or none, and return their ids in order; the rest is as for `record_entry`.

        If several entries have the same id, only the first is recorded.
        """
        given = enumerate(validation.items(entries, "entries"))
        return self._record([priced(checked_entry(entry, path=f"entries/{index}")) for index, entry in given])

    def _record(self, entries: Sequence[UsageEntry]) -> list[str]:
        if entries:
            self._backend.record(entries)
        return [str(entry.id) for entry in entries]

    # A session's usage

    def get_entries(
        self,
        session_id: str,
        *,
        kinds: Kinds | None = None,
        step_range: tuple[int | None, int | None] | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[UsageEntry]:
        """Return a session's entries by timestamp and then by recording order; ``limit=None`` returns all.

        ``step_range`` is the first and the last step, both inclusive; each may be ``None``. For a deleted
        session the result is its kept entries; for an unknown session it is empty.
        """
        steps = _step_range(step_range)
        return self._backend.select(
            validation.identifier(session_id, "session_id"),
            _kinds(kinds),
            steps,
            limit=None if limit is None else validation.page_limit(limit, maximum=MAX_BIGINT),
            offset=validation.page_offset(offset),
        )

    def get_rollup(self, session_id: str, *, include_sub_agents: bool = False) -> UsageRollup | None:
        """Return the sums of a session, or of its whole tree, or ``None`` for an unknown session.

        The tree contains every session that can be reached by parent or by local sub-session ref. Each
        session counts once, even in a cycle. The database computes the sums.
        """
        return self._backend.rollup(
            validation.identifier(session_id, "session_id"),
            include_sub_agents=validation.flag(include_sub_agents, "include_sub_agents"),
        )

    def exists(self, session_id: str) -> bool:
        """Return whether the session has entries."""
        return self._backend.exists(validation.identifier(session_id, "session_id"))

    def delete(self, session_id: str) -> int:
        """Delete all entries of a session id and return their number.

        This includes entries that were kept from a deleted session with the same id. One transaction; safe to
        repeat.
        """
        return self._backend.delete(validation.identifier(session_id, "session_id"))

    # Across sessions

    def query_usage(
        self,
        *,
        agent_type: str | None = None,
        kinds: Kinds | None = None,
        user_id: UserId | None = None,
        model: str | None = None,
        date_from: Timestamp | None = None,
        date_to: Timestamp | None = None,
        order: str = "desc",
        limit: int = 50,
        offset: int = 0,
        cursor: str | None = None,
        count: bool = True,
    ) -> UsagePage:
        """Return a page of the entries of all sessions, including kept entries, by timestamp.

        Filters are combined with AND. ``agent_type`` and ``user_id`` are those of the session at the time of
        recording. ``date_from`` is inclusive, ``date_to`` is exclusive. ``limit`` is 1 to 200; a larger one
        means 200. For the next page pass ``next_cursor`` as ``cursor`` with the same filters. Raises
        `InvalidCursor` for any other cursor, and `InvalidQuery` for an invalid query.
        """
        if order not in ("asc", "desc"):
            raise InvalidQuery("order must be asc or desc.", path="order")
        query = UsageQuery(
            agent_type=validation.optional_identifier(agent_type, "agent_type"),
            kinds=_kinds(kinds),
            user_id=validation.user_id(user_id),
            model=validation.optional_identifier(model, "model"),
            date_from=None if date_from is None else validation.aware_datetime(date_from, "date_from"),
            date_to=None if date_to is None else validation.aware_datetime(date_to, "date_to"),
            descending=order == "desc",
            limit=validation.page_limit(limit),
            offset=validation.page_offset(offset),
            count=validation.flag(count, "count"),
        )
        return self._page(query, cursor)

    def timeseries(
        self,
        *,
        bucket: UsageTimeBucket | str = "day",
        group_by: UsageGrouping | str = "model",
        date_from: Timestamp,
        date_to: Timestamp,
        agent_type: str | None = None,
    ) -> list[UsageBucket]:
        """Return sums per ``hour``, ``day``, ``week`` or ``month`` in UTC, ordered by start, then by group.

        ``group_by`` is ``model``, ``agent_type``, ``user_id`` or ``kind``. Each entry from ``date_from``
        inclusive to ``date_to`` exclusive is in one bucket. Buckets without entries are left out. The
        database computes the sums.
        """
        chosen = validation.query_enum(UsageTimeBucket, bucket, "bucket")
        grouping = "user_id" if group_by == "user" else group_by
        return self._backend.time_series(
            UsageQuery(
                date_from=validation.aware_datetime(date_from, "date_from"),
                date_to=validation.aware_datetime(date_to, "date_to"),
                agent_type=validation.optional_identifier(agent_type, "agent_type"),
            ),
            chosen,
            validation.query_enum(UsageGrouping, grouping, "group_by"),
        )

    def _page(self, query: UsageQuery, cursor: str | None) -> UsagePage:
        binding = _cursor_binding(self.tenant, query)
        if cursor is not None:
            if query.offset:
                raise InvalidQuery("Pass a cursor or an offset, not both.", path="cursor")
            timestamp, ordinal = read_cursor(cursor, query=binding)
            query = replace(query, after=(validation.milliseconds_to_datetime(timestamp), ordinal))
        placed, total, has_more = self._backend.query(query)
        next_cursor = None
        if has_more:
            last, ordinal = placed[-1]
            next_cursor = write_cursor([last.timestamp, ordinal], query=binding)
        return UsagePage(
            entries=[entry for entry, _ in placed],
            total=total,
            offset=query.offset,
            limit=query.limit,
            has_more=has_more,
            next_cursor=next_cursor,
        )

    arecord_entry = async_twin(record_entry)
    arecord_entries = async_twin(record_entries)
    aget_entries = async_twin(get_entries)
    aget_rollup = async_twin(get_rollup)
    aexists = async_twin(exists)
    adelete = async_twin(delete)
    aquery_usage = async_twin(query_usage)
    atimeseries = async_twin(timeseries)


class DatabaseUsageStore(UsageStoreBase):
    """The usage ledger in a Django database: one row for each entry, summed by queries.

    Pass the ``using`` and ``tenant`` of the state store that has the sessions. Entries are deleted with their
    session unless ``keep_usage`` is set. There is no counter row, so recordings do not wait for each other.

    Example::

        usage = DatabaseUsageStore()
        page = usage.query_usage(user_id="ada", kinds="tokens")
        print([(entry.session_id, entry.model, entry.tokens) for entry in page])
    """

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), None)
        super().__init__(DatabaseUsage(db), tenant=db.tenant)


class InMemoryUsageStore(UsageStoreBase):
    """The usage ledger in one process; for tests and experiments.

    With the ``world`` of an `InMemoryStateStore`, it follows the contract of the database store: an entry for
    an unknown session is refused. Without a ``world`` it accepts entries of any session, finds sub-agents by
    the entries of kind ``subagent``, and reads the agent type from a source of type ``agent``.

    Example::

        store = InMemoryStore()
        store.new_session("order", agent_type="support")
        print(InMemoryUsageStore(world=store.world).get_rollup("order"))
    """

    def __init__(self, *, tenant: str = "", world: MemoryWorld | None = None) -> None:
        tenant = validation.tenant(tenant)
        self._scope = TenantScope(MemoryWorld() if world is None else world, tenant=tenant, limits=None)
        self._ledger = self._scope.table(UsageLedger)
        super().__init__(MemoryUsage(self._scope, knows_sessions=world is not None), tenant=tenant)

    def clear(self) -> None:
        """Delete every entry of the tenant. Safe to repeat."""
        with self._scope.lock:
            self._ledger.clear()

    def get_all_session_ids(self) -> list[str]:
        """Return the ids of the sessions with entries, in the order of their first entries."""
        with self._scope.lock:
            ledger = self._ledger
            return list(dict.fromkeys((*ledger.kept, *ledger.current)))

    @property
    def size(self) -> int:
        """The number of sessions with entries."""
        return len(self.get_all_session_ids())

    @property
    def total_entry_count(self) -> int:
        with self._scope.lock:
            return sum(1 for _ in self._ledger.all())


def _kinds(kinds: Kinds | None) -> KindFilter:
    if kinds is None:
        return None
    if isinstance(kinds, str):
        kinds = [kinds]
    if not isinstance(kinds, Collection) or isinstance(kinds, bytes | Mapping):
        raise InvalidQuery("kinds must be a kind of usage or a collection of kinds.", path="kinds")
    return sorted(
        {validation.query_enum(UsageKind, kind, "kinds") for kind in validation.items(kinds, "kinds")}
    )


def _step_range(steps: Any) -> StepFilter:
    if steps is None:
        return None, None
    try:
        first, last = (
            None if step is None else validation.whole_number(step, "step_range") for step in steps
        )
    except (TypeError, ValueError, InvalidPayload) as exc:
        message = "step_range must be the first and the last step, whole numbers from 0 or None."
        raise InvalidQuery(message, path="step_range") from exc
    return first, last


def _cursor_binding(tenant: str, query: UsageQuery) -> dict[str, Any]:
    binding = {"of": "usage", "tenant": tenant, **asdict(query)}
    for paging in ("limit", "offset", "after", "count"):
        del binding[paging]
    return binding
