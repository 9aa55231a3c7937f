"""What a back end of a usage store has to do.

Arguments have been checked when they arrive here, entries have ids and costs, and session ids are those of
the back end's tenant. The entries of a session id are those of the session that has it; when there is none,
those that were kept of a deleted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

from helix_store.core.types import UsageKind
from helix_store.core.usage import (
    UsageBucket,
    UsageEntry,
    UsageGrouping,
    UsageRollup,
    UsageTimeBucket,
)

__all__ = ["EntryFilter", "PlacedEntry", "TimeSeriesQuery", "UsageQuery", "UsageVerbs"]


class PlacedEntry(NamedTuple):
    """An entry, and a number that orders the entries of one moment as they were recorded."""

    entry: UsageEntry
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFilter:
    """Which entries of a session; ``None`` means no filter. Steps are inclusive."""

    kinds: frozenset[UsageKind] | None = None
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Filters are AND; ``None`` means no filter. Dates are from inclusive, to exclusive.

    ``agent_type`` and ``user_id`` are the session's. ``after`` is the moment and place of the last entry
    seen.
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


class UsageVerbs(Protocol):
    def record(self, entries: Sequence[UsageEntry]) -> None:
        """All or nothing; an entry whose id is known is left out. Raises `SessionNotFound`."""
        ...

    def select(
        self, session_id: str, chosen: EntryFilter, *, limit: int | None, offset: int
    ) -> list[UsageEntry]:
        """By time, then as recorded."""
        ...

    def rollup(self, session_id: str, *, include_sub_agents: bool) -> UsageRollup | None: ...

    def query(self, query: UsageQuery) -> tuple[list[PlacedEntry], int | None, bool]:
        """The page, the total when asked for, and whether more follows."""
        ...

    def time_series(self, query: TimeSeriesQuery) -> list[UsageBucket]: ...

    def exists(self, session_id: str) -> bool: ...

    def delete(self, session_id: str) -> int:
        """Everything recorded under the id, kept entries included."""
        ...
