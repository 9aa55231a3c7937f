"""The protocol of a back end of a usage store, and its queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

from helix_store.core.types import UsageKind
from helix_store.core.usage import UsageBucket, UsageEntry, UsageGrouping, UsageRollup, UsageTimeBucket

__all__ = ["EntryFilter", "PlacedEntry", "TimeSeriesQuery", "UsageOperations", "UsageQuery"]


class PlacedEntry(NamedTuple):
    """An entry and its recording number, which orders entries with the same timestamp."""

    entry: UsageEntry
    ordinal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFilter:
    """Filters of a session's entries; ``None`` means no filter. Steps are inclusive."""

    kinds: frozenset[UsageKind] | None = None
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """A page of entries. Filters are combined with AND; ``None`` means no filter. ``agent_type`` and
    ``user_id`` belong to the session. ``date_from`` is inclusive, ``date_to`` is exclusive. ``after`` is the
    timestamp and the ordinal of the last entry of the previous page.
    """

    agent_type: str | None = None
    kinds: frozenset[UsageKind] | None = None
    user_id: str | None = None
    model: str | None = None
    date_from: datetime | None = None
    date_to: datetime | None = None
    descending: bool = True
    limit: int = 50
    offset: int = 0
    after: tuple[datetime, int] | None = None
    count: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeriesQuery:
    bucket: UsageTimeBucket
    group_by: UsageGrouping
    date_from: datetime
    date_to: datetime
    agent_type: str | None = None


class UsageOperations(Protocol):
    """The operations of a back end. Arguments have already been checked, and entries have ids and costs.

    The entries of a session id belong to the existing session, or are the kept entries of a deleted one.
    """

    def record(self, entries: Sequence[UsageEntry]) -> None:
        """Record all entries or none; entries with a known id are skipped. Raises `SessionNotFound`."""
        ...

    def select(
        self, session_id: str, chosen: EntryFilter, *, limit: int | None, offset: int
    ) -> list[UsageEntry]:
        """Return the entries of a session by timestamp, then in the order of recording."""
        ...

    def rollup(self, session_id: str, *, include_sub_agents: bool) -> UsageRollup | None:
        """Return the sums of a session or of its tree, or ``None`` for an unknown session."""
        ...

    def query(self, query: UsageQuery) -> tuple[list[PlacedEntry], int | None, bool]:
        """Return the page, the total if ``query.count``, and whether more entries follow."""
        ...

    def time_series(self, query: TimeSeriesQuery) -> list[UsageBucket]:
        """Return the sums of each bucket and group, ordered by start and group."""
        ...

    def exists(self, session_id: str) -> bool:
        """Return whether the session has entries."""
        ...

    def delete(self, session_id: str) -> int:
        """Delete all entries of the id, kept entries included, and return their number."""
        ...
