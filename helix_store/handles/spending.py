"""What a turn has spent and not recorded yet."""

from __future__ import annotations

import threading
from typing import Any

from helix_store.core import moments
from helix_store.core.contracts import UsageStore
from helix_store.core.types import Duration, UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.core.validation import datetime_to_milliseconds, milliseconds
from helix_store.usage.entries import checked_entry

__all__ = ["Spending"]


class Spending:
    """The entries of one run. Any thread may add some; recording the same ones twice records them once."""

    def __init__(self, usage: UsageStore, session_id: str, *, run_id: str, agent_type: str) -> None:
        self._usage = usage
        self._session_id = session_id
        self._run_id = run_id
        self._source = UsageSource(type="agent", name=agent_type)
        self._entries: list[UsageEntry] = []
        self._added = 0
        self._mutex = threading.Lock()

    def tokens(self, step_count: int, model: str, counts: TokenCounts, cost_usd: Any) -> None:
        self._add(UsageKind.TOKENS, step_count, model=model, tokens=counts, cost_usd=cost_usd)

    def tool(self, step_count: int, name: str, *, success: bool, duration: Duration) -> None:
        duration_ms = milliseconds(duration, "duration")
        self._add(UsageKind.TOOL, step_count, tool_name=name, success=success, duration_ms=duration_ms)

    def _add(self, kind: UsageKind, step_count: int, **own: Any) -> None:
        with self._mutex:
            entry = UsageEntry(
                kind=kind,
                session_id=self._session_id,
                step_count=step_count,
                timestamp=datetime_to_milliseconds(moments.now()),
                source=self._source,
                run_id=self._run_id,
                # Of this run alone: what another attempt spends is spent again.
                id=f"{self._run_id}:{self._added + 1}",
                **own,
            )
            # Refused in the line that is wrong, and not with the step.
            self._entries.append(checked_entry(entry))
            self._added += 1

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def record(self) -> int:
        """Record the entries, in the transaction that is open, and return their number."""
        entries = list(self._entries)
        if len(entries) == 1:
            # One statement, where several take two.
            self._usage.record_entry(entries[0])
        elif entries:
            self._usage.record_entries(entries)
        return len(entries)

    def forget(self, count: int) -> None:
        """Drop entries whose record is committed."""
        with self._mutex:
            del self._entries[:count]
