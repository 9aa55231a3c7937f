"""Usage of a turn that has not been recorded yet."""

from __future__ import annotations

import threading
import time
from typing import Any

from helix_store.core.contracts import UsageStore
from helix_store.core.types import Duration, UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.core.validation import milliseconds
from helix_store.usage.entries import checked_entry, priced
from helix_store.usage.store import UsageStoreBase

__all__ = ["Spending"]


class Spending:
    """The usage entries of one run. Any thread may add entries; recording an entry twice has no effect."""

    def __init__(self, usage: UsageStore, session_id: str, *, run_id: str, agent_type: str) -> None:
        self._usage = usage
        self._session_id = session_id
        self._run_id = run_id
        self._source = UsageSource(type="agent", name=agent_type)
        self._entries: list[UsageEntry] = []
        self._added = 0
        self._recorded = 0
        self._sent = 0
        """The number of entries that the last call of `record` has recorded, until `keep` or `forget`."""
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
                timestamp=time.time_ns() // 1_000_000,
                source=self._source,
                run_id=self._run_id,
                # The id belongs to this run alone: another attempt's usage is additional.
                id=f"{self._run_id}:{self._added + 1}",
                **own,
            )
            # An invalid entry is refused in the line that adds it, not when the step commits.
            checked = checked_entry(entry)
            self._entries.append(priced(checked) if isinstance(self._usage, UsageStoreBase) else checked)
            self._added += 1

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to record."""
        return len(self._entries) == self._recorded

    def record(self) -> None:
        """Record the entries in the open transaction. Call `keep` or `forget` afterwards."""
        self._sent = 0
        entries = self._entries[self._recorded :]
        if isinstance(self._usage, UsageStoreBase):
            self._usage._backend.record(entries)
        else:
            self._usage.record_entries(entries)
        self._sent = self._recorded + len(entries)

    def keep(self) -> None:
        """Note that the entries are recorded in a transaction that is still open."""
        with self._mutex:
            self._recorded = max(self._recorded, self._sent)
            self._sent = 0

    def forget(self) -> None:
        """Drop the entries whose record is committed."""
        with self._mutex:
            if self._sent:
                del self._entries[: self._sent]
                self._recorded = self._sent = 0

    def forget_kept(self) -> None:
        """Drop the entries that were recorded in a transaction that has now committed."""
        with self._mutex:
            del self._entries[: self._recorded]
            self._recorded = 0

    def record_again(self) -> None:
        """Mark entries as unrecorded whose transaction was rolled back."""
        with self._mutex:
            self._recorded = 0
