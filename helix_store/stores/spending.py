"""What a turn spends, and what it reserves for its next step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from helix_store.budgets import Amounts, Hold, Reservation, checks_in_commits, renew, reserve, settle
from helix_store.core import moments, validation
from helix_store.core.contracts import UsageStore
from helix_store.core.manager_contracts import HeldLock
from helix_store.core.types import Run, SessionState, StepCommit, UsageKind
from helix_store.core.usage import UsageEntry, UsageSource
from helix_store.counters import Spender
from helix_store.exceptions import BudgetExceeded, FencedOutError
from helix_store.locks import Lock
from helix_store.stores.session import StoreSet
from helix_store.usage.ledger import checked_entry, priced
from helix_store.usage.store import UsageStoreBase


class _DatabaseTime:
    """The database's clock, as this process has last read it."""

    def __init__(self) -> None:
        self._at: datetime | None = None
        self._read_at = 0.0

    def read(self, at: datetime | None) -> None:
        """Take the time that the database has just returned, if it has returned one."""
        if at is not None:
            self._at, self._read_at = at, time.monotonic()

    def now(self) -> int:
        """Return the time in epoch milliseconds. Before the first reading, this process's clock counts."""
        if self._at is None:
            return validation.datetime_to_milliseconds(moments.now())
        passed = timedelta(seconds=time.monotonic() - self._read_at)
        return validation.datetime_to_milliseconds(self._at + passed)


class Spending:
    """The usage entries of one turn, and what it has reserved in the budgets of the session.

    Any thread may add entries; recording an entry twice has no effect. Entries recorded in a transaction of
    the caller are kept until it commits, and recorded again if it is rolled back.
    """

    def __init__(self, stores: StoreSet, usage: UsageStore | None, estimate: Amounts) -> None:
        self._stores = stores
        self._usage = usage
        self.estimate = estimate
        """The estimate of each step without one of its own."""
        self.is_capped = False
        """True if a budget applies to the session."""
        self.reserved: Amounts | None = None
        """What the budgets have allowed the next step; ``None`` if it has to check them when it begins."""
        self.must_renew = False
        """True if a reservation was rolled back with a transaction of the caller."""
        self._held: Hold | None = None
        self._renewed: Reservation | None = None
        """What the open commit has reserved, until `settle`."""
        self._time = _DatabaseTime()
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
                timestamp=self._time.now(),
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
        return self._stores.usage if self._usage is None else self._usage

    def read_time_of(self, lock: HeldLock) -> None:
        """Read the database's time from the end of a lock's term, which has just begun."""
        if isinstance(lock, Lock):
            self._time.read(lock.expires_at - timedelta(milliseconds=lock.ttl_ms))

    # Reservations

    def begin(
        self, state: SessionState, fencing_token: int | None, *, is_capped: bool
    ) -> BudgetExceeded | None:
        """Look for budgets of the session and reserve the first step; return the error of a refusal."""
        self.is_capped = is_capped and self._stores.is_atomic
        return self.reserve(state, self.estimate, fencing_token) if self.is_capped else None

    def reserve(
        self, state: SessionState, estimate: Amounts, fencing_token: int | None
    ) -> BudgetExceeded | None:
        """Hold an estimate in all budgets of the session, in place of what the turn holds.

        Return the error of a refusal. The turn then holds what it held before.
        """
        held = reserve(self._stores.budgets, _spender(state), state.session_id, fencing_token or 0, estimate)
        self._take(held._replace(hold=held.hold or self._held), estimate)
        return held.refusal

    def _take(self, reservation: Reservation, estimate: Amounts) -> None:
        self.is_capped, self._held = reservation.is_capped, reservation.hold
        is_allowed = reservation.is_checked and reservation.refusal is None
        self.reserved = estimate if is_allowed else None
        self._time.read(reservation.at)

    # Commits

    def to_record(
        self,
        state: SessionState,
        fencing_token: int | None,
        goes_on: Callable[[StepCommit | None], bool],
        *,
        may_go_on: bool,
    ) -> Callable[[StepCommit | None], object] | None:
        """Return the call of a commit that records new entries and reserves the next step, or ``None``.

        ``goes_on`` returns whether the turn is active after the commit. Otherwise, the hold is released.
        """
        record = self._to_record()
        if not self.is_capped:
            return None if record is None else lambda _: record()
        budgets = self._stores.budgets
        reserves = may_go_on and (any(self.estimate) or checks_in_commits(budgets))
        if record is None and self._held is None and not reserves:
            return None
        renew = partial(self._renew, record, state, fencing_token)

        def write(commit: StepCommit | None) -> None:
            self._renewed = None
            if goes_on(commit):
                self._renewed = renew()
            elif self._held is not None:
                settle(budgets, self._held, record)
            elif record is not None:
                record()

        return write

    def _renew(
        self,
        record: Callable[[], bool] | None,
        state: SessionState,
        fencing_token: int | None,
        *,
        is_guarded: bool = False,
    ) -> Reservation:
        return renew(
            self._stores.budgets,
            _spender(state),
            state.session_id,
            fencing_token or 0,
            self.estimate,
            self._held,
            record,
            is_guarded=is_guarded,
        )

    def _to_record(self) -> Callable[[], bool] | None:
        return self._record if len(self._entries) > self._recorded else None

    def _record(self) -> bool:
        """Record new entries, and return whether they may have reached the limit of a budget."""
        self._sent = 0
        entries, ledger = self._entries[self._recorded :], self._ledger
        may_stop = False
        if isinstance(ledger, UsageStoreBase):
            locks_holds = self._held is not None or (self.is_capped and any(self.estimate))
            may_stop = ledger._backend.record(entries, locks_holds=locks_holds)
        else:
            ledger.record_entries(entries)
        self._sent = self._recorded + len(entries)
        return may_stop

    def record(self) -> None:
        """Record usage that no commit has recorded, and release the hold."""
        record = self._to_record()
        if self._held is not None:
            settle(self._stores.budgets, self._held, record)
        elif record is not None:
            record()
        else:
            return
        self.settle(is_uncommitted=False)

    def record_again(
        self,
        state: SessionState,
        fencing_token: int | None,
        *,
        is_lost: bool = False,
        is_uncommitted: bool = False,
    ) -> BudgetExceeded | None:
        """Record usage that no commit has recorded, and reserve the next step again.

        Return the error of a refusal. Without usage, a reservation is kept unless it was lost. A worker that
        has lost its lock only records.
        """
        if not self.is_capped:
            self.record()
            return None
        record = self._to_record()
        if record is None and not is_lost and self.reserved in (None, self.estimate):
            return None
        is_guarded = self._held is not None or any(self.estimate)
        try:
            self._renewed = self._renew(record, state, fencing_token, is_guarded=is_guarded)
        except FencedOutError:
            self.record()
            return None
        return self.settle(is_uncommitted=is_uncommitted)

    def settle(self, *, is_uncommitted: bool) -> BudgetExceeded | None:
        """Take what a commit has recorded and reserved, and return the error of a refusal.

        Entries that were recorded in an open transaction of the caller are kept.
        """
        with self._mutex:
            renewed, self._renewed = self._renewed, None
            if renewed is None:
                self._held = self.reserved = None
            else:
                self._take(renewed, self.estimate)
            if is_uncommitted:
                self._recorded = max(self._recorded, self._sent)
            elif self._sent:
                del self._entries[: self._sent]
                self._recorded = 0
            self._sent = 0
        return None if renewed is None else renewed.refusal

    def caller_committed(self) -> None:
        """Drop the entries that were recorded in transactions of the caller."""
        with self._mutex:
            del self._entries[: self._recorded]
            self._recorded = 0

    def caller_rolled_back(self) -> None:
        """Mark what was recorded and reserved in transactions of the caller as lost."""
        with self._mutex:
            self._recorded = 0
            self.reserved, self.must_renew = None, self.is_capped


def _spender(state: SessionState) -> Spender:
    return Spender(state.root_session_id or state.session_id, state.user_id, state.agent_type)
