"""The protocol of a usage store."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from helix_store.core.dicts import AnyUsageEntry
from helix_store.core.types import Timestamp, UsageKind, UserId
from helix_store.core.usage import (
    UsageBucket,
    UsageEntry,
    UsageGrouping,
    UsagePage,
    UsageRollup,
    UsageTimeBucket,
)

__all__ = ["UsageStore"]


class UsageStore(Protocol):
    """Usage of sessions. `helix_store.testing.UsageStoreContract` tests the behaviour of each method.

    Each method has an async counterpart with the same signature and the prefix ``a``: ``aget_rollup``.
    """

    def record_entry(self, entry: UsageEntry | AnyUsageEntry) -> str: ...

    def record_entries(self, entries: Iterable[UsageEntry | AnyUsageEntry]) -> list[str]: ...

    def get_entries(
        self,
        session_id: str,
        *,
        kinds: UsageKind | str | Collection[UsageKind | str] | None = None,
        step_range: tuple[int | None, int | None] | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[UsageEntry]: ...

    def get_rollup(self, session_id: str, *, include_sub_agents: bool = False) -> UsageRollup | None: ...

    def exists(self, session_id: str) -> bool: ...

    def delete(self, session_id: str) -> int: ...

    def query_usage(
        self,
        *,
        agent_type: str | None = None,
        kinds: UsageKind | str | Collection[UsageKind | str] | None = None,
        user_id: UserId | None = None,
        model: str | None = None,
        date_from: Timestamp | None = None,
        date_to: Timestamp | None = None,
        order: str = "desc",
        limit: int = 50,
        offset: int = 0,
        cursor: str | None = None,
        count: bool = True,
    ) -> UsagePage: ...

    def timeseries(
        self,
        *,
        bucket: UsageTimeBucket | str = "day",
        group_by: UsageGrouping | str = "model",
        date_from: Timestamp,
        date_to: Timestamp,
        agent_type: str | None = None,
    ) -> list[UsageBucket]: ...
