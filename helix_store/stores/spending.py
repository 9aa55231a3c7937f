"""The spending of a turn: usage that is not recorded yet, and the estimate of its open step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from helix_store.budgets.rules import Amounts, Hold
from helix_store.core.contracts import UsageStore
from helix_store.core.types import Run, SessionState, UsageKind
from helix_store.core.usage import UsageEntry, UsageSource
from helix_store.counters.rules import Spender
from helix_store.stores.parts import Parts
from helix_store.usage.entries import checked_entry, priced
from helix_store.usage.store import UsageStoreBase


class Spending:
    """The usage entries of one turn, and its hold in the budgets of the session.

    Any thread may add entries; recording an entry twice has no effect. Entries recorded in a transaction of
    the caller are kept until it commits, and recorded again if it is rolled back.
    """

    def __init__(self, parts: Parts, usage: UsageStore | None) -> None:
        self._parts = parts
        self._usage = usage
        self.is_capped = False
        """True if a budget applies to the session."""
        self._held: Hold | None = None
        self._entries: list[UsageEntry] = []
        self._added = 0
        self._recorded = 0
        """The number of entries that have been recorded in a transaction of the caller."""
        self._sent = 0
        """The number of entries that the last recording covered, until `settle`."""
        self._mutex = threading.Lock()

    # Usage

    def add(self, run: Run, state: SessionState, kind: UsageKind, **own: Any) -> None:
        """Add an entry for the step after this state. Raises `InvalidPayload`."""
        with self._mutex:
            entry = UsageEntry(
                kind=kind,
                session_id=run.session_id,
                step_count=state.step_count + 1,
                timestamp=time.time_ns() // 1_000_000,
                source=UsageSource(type="agent", name=state.agent_type),
                run_id=run.run_id,
                # The id belongs to this run alone: another attempt's usage is counted in addition.
                id=f"{run.run_id}:{self._added + 1}",
                **own,
            )
            # An invalid entry is refused in the line that adds it, not when the step commits.
            checked = checked_entry(entry)
            self._entries.append(priced(checked) if isinstance(self._ledger, UsageStoreBase) else checked)
            self._added += 1

    @property
    def _ledger(self) -> UsageStore:
        return self._parts.usage if self._usage is None else self._usage

    # Budgets

    def look_for_budgets(self, state: SessionState) -> None:
        """Record whether any budget applies to the session."""
        # A loaded state need not say whether budgets exist, so assume that they do.
        may_be_capped = getattr(state, "_is_capped", True) and self._parts.is_atomic
        self.is_capped = may_be_capped and self._parts.budgets._applies(_spender(state))

    def hold(self, state: SessionState, estimate: Amounts, fencing_token: int | None) -> None:
        """Hold the estimate of a step in all budgets of the session. Raises `BudgetExceeded`."""
        self._held = self._parts.budgets._begin_step(
            _spender(state), state.session_id, fencing_token or 0, estimate
        )

    # Commits

    def to_record(self) -> Callable[[], object] | None:
        """Return the call that records new entries and releases the hold, or ``None`` if there is neither."""
        record = self._record if len(self._entries) > self._recorded else None
        return record if self._held is None else partial(self._parts.budgets._settle, self._held, record)

    def _record(self) -> None:
        self._sent = 0
        entries, ledger = self._entries[self._recorded :], self._ledger
        if isinstance(ledger, UsageStoreBase):
            ledger._backend.record(entries)
        else:
            ledger.record_entries(entries)
        self._sent = self._recorded + len(entries)

    def record(self) -> None:
        """Record usage that no commit has recorded, and release the hold of a step that did not commit."""
        record = self.to_record()
        if record is not None:
            record()
            self.settle(is_provisional=False)

    def settle(self, *, is_provisional: bool) -> None:
        """Drop the hold and the recorded entries, but keep those in an open transaction of the caller."""
        with self._mutex:
            self._held = None
            if is_provisional:
                self._recorded = max(self._recorded, self._sent)
            elif self._sent:
                del self._entries[: self._sent]
                self._recorded = 0
            self._sent = 0

    def caller_committed(self) -> None:
        """Drop the entries that were recorded in transactions of the caller."""
        with self._mutex:
            del self._entries[: self._recorded]
            self._recorded = 0

    def caller_rolled_back(self) -> None:
        """Mark the entries that were recorded in transactions of the caller as unrecorded."""
        with self._mutex:
            self._recorded = 0


def _spender(state: SessionState) -> Spender:
    return Spender(state.root_session_id or state.session_id, state.user_id, state.agent_type)
