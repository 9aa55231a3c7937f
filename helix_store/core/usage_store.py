"""What a usage store must offer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol

from helix_store.core.types import UsageKind
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
    """What sessions spend. `helix_store.testing.UsageStoreContract` says what each method must do.

    Every method has an async twin of the same signature under the prefix ``a``: ``aget_rollup``.
    """

    def record_entry(self, entry: UsageEntry | Mapping[str, Any]) -> str: ...

    def record_entries(self, entries: Iterable[UsageEntry | Mapping[str, Any]]) -> list[str]: ...

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
        user_id: str | None = None,
        model: str | None = None,
        date_from: datetime | int | None = None,
        date_to: datetime | int | None = None,
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
        date_from: datetime | int,
        date_to: datetime | int,
        agent_type: str | None = None,
    ) -> list[UsageBucket]: ...
