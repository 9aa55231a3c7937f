"""The usage ledger of one process, without a database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from helix_store.core import validation
from helix_store.core.usage import (
    TokenCounts,
    UsageBucket,
    UsageEntry,
    UsageGrouping,
    UsageRollup,
    UsageTimeBucket,
    cost_from_units,
)
from helix_store.counters.rules import Spender
from helix_store.engine.memory import MemoryTable
from helix_store.sessions.memory.scope import TenantScope
from helix_store.sessions.memory.sessions import with_descendants
from helix_store.usage.rules import (
    KindFilter,
    StepFilter,
    UsageQuery,
    bucket_start,
    rollup,
    sum_of,
    time_series,
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

    def record(self, entries: Sequence[UsageEntry]) -> None:
        with self._scope.lock:
            spenders = [self._spender(entry) for entry in entries]
            for entry, spender in zip(entries, spenders, strict=True):
                self._ledger.add(entry, spender)

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
