"""The turn of a handle: a run under a lock, with what it spends and reserves in budgets."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from helix_store.budgets import (
    NOTHING,
    Amounts,
    Hold,
    Reservation,
    checked_estimate,
    checks_in_commits,
    renew,
    reserve,
    settle,
)
from helix_store.core import moments, validation
from helix_store.core.contracts import HeldLock, LockManager, UsageStore
from helix_store.core.effects import Reconcile
from helix_store.core.types import (
    TERMINAL_STATUSES,
    Duration,
    Message,
    Run,
    RunStatus,
    SessionState,
    SessionStatus,
    StepCommit,
    UsageKind,
)
from helix_store.core.usage import Dollars, TokenCounts, UsageEntry, UsageSource
from helix_store.counters import Spender
from helix_store.engine.async_twins import BothContexts, async_twin
from helix_store.exceptions import (
    BudgetExceeded,
    ConflictError,
    EffectUnknown,
    FencedOutError,
    HelixStoreError,
    LockLostError,
    SessionBusy,
    SessionNotFound,
    StaleStateError,
    TurnInterrupted,
    shown_id,
)
from helix_store.locks import Lock, are_same_locks
from helix_store.sessions.effects import Entered
from helix_store.sessions.state import loaded_of, next_step_count
from helix_store.sessions.steps import OpenedStep, StepWrite
from helix_store.stores.effect import OpenEffect, described_error
from helix_store.stores.session import NotCopied, SessionHandleBase, StoreSet, require_manager
from helix_store.stores.step import (
    Progress,
    Step,
    UncommittedSteps,
    calls_of,
    end_of_run,
    may_wait_here,
    other_root,
    outcome_of,
    readiness_of,
)
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
                step_count=next_step_count(state),
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
        """Read the database's time from a lock's term, which has just begun."""
        if isinstance(lock, Lock):
            self._time.read(lock.requested_at)

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

    def to_record(self, step: _TurnStep) -> Callable[[StepCommit | None], object] | None:
        """Return the call of a commit that records new entries and reserves the next step, or ``None``.

        If the turn does not go on after the commit, the hold is released.
        """
        record = self._to_record()
        if not self.is_capped:
            return None if record is None else lambda _: record()
        budgets = self._stores.budgets
        reserves = step._may_go_on and (any(self.estimate) or checks_in_commits(budgets))
        if record is None and self._held is None and not reserves:
            return None
        state, fencing_token = step.state, step._fencing_token

        def write(commit: StepCommit | None) -> None:
            self._renewed = None
            if step._goes_on(commit):
                may_be_stopped = step._may_be_stopped
                self._renewed = self._renew(record, state, fencing_token, may_be_stopped=may_be_stopped)
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
        may_be_stopped: bool | None,
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
            may_be_stopped=may_be_stopped,
        )

    @property
    def asks_commits(self) -> bool:
        """True if the statement of a commit can say whether a budget may stop the next step."""
        return (
            self.is_capped
            and self._held is None
            and not any(self.estimate)
            and not checks_in_commits(self._stores.budgets)
        )

    def check(
        self, state: SessionState, fencing_token: int | None, *, may_be_stopped: bool
    ) -> BudgetExceeded | None:
        """Allow the next step, which has no estimate, after a commit, and return the error of a refusal."""
        if may_be_stopped:
            return self.reserve(state, NOTHING, fencing_token)
        self.reserved = NOTHING
        return None

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
            # The rollback has taken the last check back.
            may_be_stopped = True if is_lost else None
            self._renewed = self._renew(
                record, state, fencing_token, is_guarded=is_guarded, may_be_stopped=may_be_stopped
            )
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


_COUNTED: Final = dict.fromkeys(("prompt", "completion"), validation.whole_number)
_LONGEST_HOST_NAME: Final = 150
_ATTEMPTS: Final = 5

_logger = logging.getLogger(__name__)

R = TypeVar("R")


class Turn(NotCopied, BothContexts):
    """The lock of a session and one run, from `__enter__` to `__exit__`.

    Entering takes the lock and keeps it alive, resumes a session whose calls are answered, receives due
    posts, and starts a run that supersedes the run of a worker that died. If the session has ended, is still
    waiting or is at rest, the turn is not active and has no run. If a budget refuses it, it has a run, but is
    not active, and the session stays as it is. Leaving ends the run according to the stored state and
    releases the lock.

    Example::

        with session.turn() as turn:
            while turn.is_active:
                with turn.step() as step:
                    step.say({"role": "assistant", "content": f"You said: {turn.messages()[-1]['content']}"})
                    step.end_turn()
    """

    def __init__(
        self,
        session: SessionHandleBase,
        *,
        locks: LockManager | None = None,
        owner: str | None = None,
        ttl: Duration | None = None,
        usage: UsageStore | None = None,
        receive: bool = True,
        rest: bool = True,
        estimate_usd: Dollars | None = None,
        estimate_tokens: int | None = None,
    ) -> None:
        if locks is not None:
            require_manager(locks, "locks", "acquire")
        if usage is not None:
            require_manager(usage, "usage", "record_entries")
        flags: dict[str, object] = {"receive": receive, "rest": rest}
        for name, flag in flags.items():
            if type(flag) is not bool:
                validation.flag(flag, name)
        self.session = session
        self.run: Run | None = None
        self.results: dict[str, dict[str, Any]] = {}
        """The answers since the last turn, by tool call id. The first step that commits consumes them."""
        self._locks = session._stores.locks if locks is None else locks
        this_thread = f"{socket.gethostname()[:_LONGEST_HOST_NAME]}:{os.getpid()}:{threading.get_ident()}"
        self._owner = this_thread if owner is None else validation.identifier(owner, "owner")
        self._ttl_ms = None if ttl is None else validation.milliseconds(ttl, "ttl")
        self._lock: HeldLock | None = None
        self.fencing_token: int | None = None
        """The token of the turn's lock, for writes that the turn does not make itself."""
        self._progress: Progress | None = None
        estimate = _estimated(estimate_usd, estimate_tokens, NOTHING)
        self._spending = Spending(session._stores, usage, estimate)
        self._interrupt: TurnInterrupted | None = None
        self._effects: dict[str, _TurnEffect] = {}
        """The effects that this turn attempts at the moment, by their ids."""
        self._unknown_effects: dict[str, None] = {}
        """The ids of the effects to announce as unknown once the run has ended."""
        self._refused: Amounts | None = None
        """The estimate that a budget has refused."""
        self._is_stop_uncommitted = False
        """True if a transaction of the caller stopped the turn: its rollback takes that back."""
        self._is_used = False
        self._has_left = False
        self._receives = receive
        self._rests = rest
        self.recovered: Run | None = None
        """The run of a worker that died, which this turn has ended."""
        self.tracing: dict[str, Any] | None = None
        """The tracing context with which the session was suspended, if this turn has resumed it."""
        self._newest_run: Run | None = None
        self._is_at_rest = False
        self._uncommitted = UncommittedSteps()
        self._must_ask = False
        self._unseen: _TurnStep | None = None
        self._told_error: BaseException | None = None
        """The error that told the caller that a commit may have failed, or that the session has ended."""
        self._mutex = threading.RLock()

    # State

    @property
    def state(self) -> SessionState:
        """The state of the last step, or the state at the start of the turn.

        While a step is open, this is its state, so that a change in place is stored with the step. Otherwise
        it is a copy: no step stores changes of it.

        A step in the caller's transaction counts unless that transaction, or its savepoint, is rolled back.
        After a rollback, or a commit that raised an error, this is the stored state; in an event loop, where
        the store cannot be queried, it is the state before that step until the next step begins.
        """
        step = self.session._open_step
        state = None if step is None else step.loaded_state
        return self._current().state if state is None else state

    def _current(self) -> Progress:
        if not self._has_left and (self._uncommitted or self._must_ask or self._spending.must_renew):
            self._follow_commits(may_load=may_wait_here())
        if self._progress is None:
            raise ConflictError("The turn has not begun; enter it with `with` or `async with`.")
        return self._progress

    @property
    def is_active(self) -> bool:
        """True if the session continues in this turn: it has not ended, does not wait and was not stopped."""
        if self.run is None or self._has_left:
            return False
        state, run_has_ended, was_ended = self._current()
        return self._interrupt is None and _is_open(state) and not (run_has_ended or was_ended)

    @property
    def stopped_by(self) -> TurnInterrupted | None:
        """The error that stopped the turn, such as `BudgetExceeded`, or ``None``.

        It stops the turn before the next model call: `is_active` is then false, and `step` raises the error,
        which ends the turn quietly.
        """
        if self._progress is not None:
            # The rollback of a transaction of the caller may take back what has stopped the turn.
            self._current()
        return self._interrupt

    def messages(self, last: int | None = None) -> list[Message]:
        """Return all messages of the session, or the ``last`` ones, oldest first."""
        return self.session.messages(last)

    amessages = async_twin(messages)

    # Working

    def step(
        self,
        step_id: str | None = None,
        *,
        operation_id: str | None = None,
        estimate_usd: Dollars | None = None,
        estimate_tokens: int | None = None,
    ) -> Step:
        """Return the next step, with the fence and the run of this turn.

        Entering the step raises `TurnInterrupted` if somebody asked the session to stop: that ends the turn,
        or is raised again by each later call in its block. After a budget has stopped the turn, this raises
        `stopped_by` there.
        Estimates replace what the turn has reserved for the step, when the step begins; if a budget does not
        allow that, `BudgetExceeded` is raised. Raises `ConflictError` if the turn is not active, and for an
        estimate with a lock manager of another store; entering the step raises it if the session was ended or
        suspended elsewhere.
        """
        run = self._required_run()
        estimate = _estimated(estimate_usd, estimate_tokens, self._spending.estimate)
        self._require_own_locks(estimate)
        return _TurnStep(self, run.run_id, step_id, operation_id=operation_id, estimate=estimate)

    def _required_run(self) -> Run:
        """Return the run of an active turn. Raises `ConflictError`, or what has stopped the turn."""
        is_active = self.is_active
        # After the block, no turn is left that the error could end quietly.
        if self._interrupt is not None and not self._has_left:
            raise self._interrupt
        if self._is_at_rest:
            raise _rests()
        if self.run is None or not is_active:
            raise _is_over()
        return self.run

    def effect(
        self,
        effect_id: str,
        *,
        tool_name: str = "",
        input: Any = None,
        approval: bool = False,
        retry: bool = False,
        reconcile: Reconcile | None = None,
    ) -> OpenEffect:
        """Return an effect for ``with`` or ``async with``: a call of the world outside the database.

        Entering stores the intent, and `Effect.done` the result, so that no later worker makes the call
        again. If a worker was killed in between, entering raises `EffectUnknown`, which ends the turn as an
        interrupt does. With ``retry``, the call is made again instead, which is right if the service honours
        the idempotency key `Effect.key`. ``reconcile`` is called with the effect before; it asks the service,
        and calls `done` or `not_done`. With ``approval``, ``effect_id`` is the id of an approved call, whose
        approval this effect uses. Entering raises `TurnInterrupted` if somebody asked the session to stop,
        and `ConflictError` if the turn is not active, if the session was ended elsewhere, and in a
        transaction.
        """
        self._required_run()
        return _TurnEffect(
            self,
            effect_id,
            tool_name=tool_name,
            input=input,
            approval=approval,
            retry=retry,
            reconcile=reconcile,
        )

    def tokens(
        self,
        *,
        model: str,
        prompt: int = 0,
        completion: int = 0,
        duration: Duration | None = None,
        reasoning: int = 0,
        cached: int = 0,
        cache_write: int = 0,
        audio_prompt: int = 0,
        audio_completion: int = 0,
        total: int | None = None,
        cost_usd: Any = None,
    ) -> None:
        """Record the tokens of a model's answer, with the next step that commits or, without one, at the end.

        By default, ``total`` is the sum of ``prompt`` and ``completion``, which include the other counts as
        in `TokenCounts`. The ``duration`` of the model's call is a `timedelta` or ms.
        """
        if type(prompt) is not int or type(completion) is not int:
            validation.arguments(_COUNTED, prompt=prompt, completion=completion)
        counts = TokenCounts(
            prompt=prompt,
            completion=completion,
            reasoning=reasoning,
            cached=cached,
            cache_write=cache_write,
            audio_prompt=audio_prompt,
            audio_completion=audio_completion,
            total=prompt + completion if total is None else total,
        )
        took = None if duration is None else validation.milliseconds(duration, "duration")
        self._spend(UsageKind.TOKENS, model=model, tokens=counts, duration_ms=took, cost_usd=cost_usd)

    def tool(self, name: str, success: bool, duration: Duration) -> None:
        """Record a tool call and its duration (a `timedelta` or ms), as `tokens` does. Safe in any thread."""
        duration_ms = validation.milliseconds(duration, "duration")
        self._spend(UsageKind.TOOL, tool_name=name, success=success, duration_ms=duration_ms)

    atokens = async_twin(tokens)
    atool = async_twin(tool)

    def _spend(self, kind: UsageKind, **own: Any) -> None:
        if self._is_at_rest:
            raise _rests()
        if self.run is None or self._has_left:
            raise ConflictError("The turn has no run; record usage between its start and its end.")
        self._spending.add(self.run, self._current().state, kind, **own)

    def receive(self) -> list[Message]:
        """Receive due posts now, unless tool calls are open, and return their messages.

        Raises `ConflictError` in an open step, and if the turn is not active, also if it was stopped.
        """
        if self._is_at_rest:
            raise _rests()
        self.session._require_no_step("receive")
        if not self.is_active:
            raise _is_over()
        self._require_lock()
        return self._attempted(self._received_after, self.session.load(), StaleStateError)

    areceive = async_twin(receive)

    def _received_after(self, state: SessionState) -> list[Message]:
        received = self.session._receive(state, self.fencing_token)
        self._progress = self._current()._replace(state=self.session.load() if received else state)
        return received

    # Beginning

    def __enter__(self) -> Self:
        if self._is_used:
            raise ConflictError("A turn is used once; begin another one with turn().")
        self._is_used = True
        self._require_own_locks(self._spending.estimate)
        if any(self._spending.estimate) and self.session._stores.in_callers_transaction:
            raise ConflictError(
                "A turn with an estimate cannot begin inside of atomic(): a rollback would take back what it "
                "reserves, but not what it spends; begin the turn first."
            )
        # Load before locking: a lock acquired for a session that does not exist would be stored forever.
        entry = self.session._stores.enter(self.session.id)
        if entry is None:
            raise SessionNotFound(self.session.id)
        state, self._newest_run = entry.state, entry.newest_run
        if entry.is_at_rest and self._rests and not readiness_of(self.session._stores, state).answers:
            self._progress, self._is_at_rest = Progress(state), True
            return self
        lock = self._locks.acquire(self.session.id, ttl_ms=self._ttl_ms, owner=self._owner)
        if lock is None:
            raise SessionBusy(self.session.id)
        self._lock, self.fencing_token = lock, lock.fencing_token
        self._spending.read_time_of(lock)
        try:
            if not self.session._stores.in_callers_transaction:
                lock.keep_alive()
            self._progress = Progress(self._attempted(self._taken_up, state, StaleStateError, ConflictError))
        except BaseException:
            self._has_left = True
            self._release(lock)
            raise
        self.session._open_turn = self
        return self

    def _attempted(
        self, call: Callable[[SessionState], R], state: SessionState, *errors: type[Exception]
    ) -> R:
        """Make a call with a loaded state; after these errors, repeat it with the state at that moment."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return call(state)
            except errors:
                state = self.session.load()
        return call(state)

    def _taken_up(self, state: SessionState) -> SessionState:
        """Resume the session unless it has ended or is waiting, and return its state.

        Raises `ConflictError` if another worker resumed or ended it after it was loaded.
        """
        store, session_id, token = self.session.store, self.session.id, self.fencing_token
        readiness = readiness_of(self.session._stores, state)
        if not readiness.can_continue:
            # Read under the lock: an answer may have arrived just before it and found the session busy.
            state = self.session.load()
            readiness = readiness_of(self.session._stores, state)
            if not readiness.can_continue:
                self._settle(state)
                return state
        self.results = readiness.answers
        self._interrupt = None
        # A state of another store says neither whether budgets exist nor whether posts wait: assume both.
        loaded = loaded_of(state)
        refusal = self._spending.begin(state, self.fencing_token, is_capped=loaded.is_capped)
        self._stop(refusal, self._spending.estimate)
        # A turn that a budget has refused does nothing: its session stays as it is, and its posts waiting.
        is_refused = refusal is not None
        may_receive = self._receives and not is_refused and self.session._has_posts and loaded.has_posts
        if readiness.is_suspended and not is_refused:
            state = store.resume(session_id, expected_version=state.version, fencing_token=token)
            self.tracing = state.tracing_context
        status = state.status
        if self.run is None:
            self.run, superseded = self.session._stores.start_run(
                session_id, keeps_status=is_refused, expected_version=state.version, fencing_token=token
            )
            self.recovered = None if superseded is None else self._run_with_id(superseded)
        if status != SessionStatus.ACTIVE and not is_refused:
            state = self.session.load()
        # After the start of the run: if this worker dies, an abandoned run shows that nobody has answered.
        if may_receive and status != SessionStatus.PAUSED and self.session._receive(state, token):
            state = self.session.load()
        return state

    def _settle(self, state: SessionState) -> None:
        """Finish the work that a worker left unfinished if it died after its last step."""
        store, session_id = self.session.store, self.session.id
        asked = calls_of(state).unanswered
        if asked and other_root(state) is not None and not self.session._stores.is_atomic:
            store.add_pending_tool_calls(session_id, asked, fencing_token=self.fencing_token)
        run = store.get_current_run(session_id)
        if run is not None:
            self._end_run(run.run_id, *outcome_of(state), step_count=state.step_count)
            if self.run is None or run.run_id != self.run.run_id:
                self.recovered = run

    def _run_with_id(self, run_id: str) -> Run | None:
        if self._newest_run is not None and self._newest_run.run_id == run_id:
            return self._newest_run
        # It began, and its worker died, after this turn had loaded the session.
        runs = self.session.store.list_runs(self.session.id, limit=2)
        return next((run for run in runs if run.run_id == run_id), None)

    # Leaving

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._lock is None or self._has_left:
            return False
        with self._mutex:
            self._has_left = True
        if self.session._open_turn is self:
            self.session._open_turn = None
        of = self.session._stores, self.session.id
        if self._interrupt is None and isinstance(error, EffectUnknown) and error._of == of:
            # An effect of a handle on the same session.
            self._interrupt = error
        is_quiet = error is not None and error is self._interrupt
        try:
            self._leave(None if is_quiet else error)
        finally:
            self._release(self._lock)
            for effect_id in self._unknown_effects:
                self.session._stores.announce_unknown(self.session.id, effect_id)
        return is_quiet

    def _leave(self, error: BaseException | None) -> None:
        try:
            if self.run is not None:
                # For a third-party store, nothing else shows whether its writes were rolled back.
                self._must_ask |= not self.session._stores.is_atomic
                self._follow_commits()
            self._spending.record()
            if self.run is not None and not self._current().run_has_ended:
                self._end_by(self.run, error)
        except Exception:
            if error is None:
                raise
            # The error of the block propagates. The next turn ends the run.
            _logger.warning("The run of session %r was not ended.", self.session.id, exc_info=True)

    def _end_by(self, run: Run, error: BaseException | None) -> None:
        state, _, was_ended = self._current()
        if isinstance(error, FencedOutError | LockLostError):
            return
        if error is self._told_error and (was_ended or not _is_open(state)):
            # The run ends as the stored session did: by the commit whose reply was lost, or elsewhere.
            error = None
        status, reason = end_of_run(state, error, self._interrupt, was_ended=was_ended)
        failure = None if error is None else described_error(error)
        try:
            refused = self._refused if status is RunStatus.INTERRUPTED else None
            self._end_run(
                run.run_id, status, reason, step_count=state.step_count, error=failure, refused=refused
            )
        except (ConflictError, FencedOutError):
            # The run was superseded: another worker has the session, but every step of this turn is stored.
            _logger.info("The run %r was superseded before its turn ended.", run.run_id)

    def _end_run(
        self,
        run_id: str,
        status: RunStatus,
        reason: str | None,
        *,
        step_count: int,
        error: Any = None,
        refused: Amounts | None = None,
    ) -> None:
        self.session._stores.end_run(
            self.session.id,
            run_id,
            refused=refused,
            status=status,
            step_count=step_count,
            completion_reason=reason,
            error=error,
            fencing_token=self.fencing_token,
        )

    def _release(self, lock: HeldLock) -> None:
        try:
            lock.release()
        except Exception:
            # Its keep-alive has stopped, so the lock expires by itself.
            _logger.warning("The lock of session %r was not released.", self.session.id, exc_info=True)

    # Called by the steps of the turn, and by effects

    def _announces(self, effect_id: str) -> bool:
        with self._mutex:
            if not self._has_left:
                self._unknown_effects[effect_id] = None
            return not self._has_left

    def _require_lock(self) -> None:
        """Raise `LockLostError` unless the lock is held: another worker may be in the same step."""
        if self._has_left or self._lock is None:
            raise LockLostError("The turn is over; begin another one with turn().")
        if not self._lock.is_trusted():
            self._lock.refresh()

    def _step_is_over(self, progress: Progress, *, may_be_stopped: bool | None) -> None:
        write = self.session._stores.uncommitted_write()
        with self._mutex:
            before, self._progress = self._current(), progress
            if write is not None:
                self._uncommitted.add(write, before)
            refusal = self._spending.settle(is_uncommitted=write is not None)
            self._stop(refusal, self._spending.estimate)
        if may_be_stopped is not None and self._spending.reserved is None and self.is_active:
            self._check(progress.state, may_be_stopped=may_be_stopped, is_uncommitted=write is not None)

    def _check(self, state: SessionState, *, may_be_stopped: bool, is_uncommitted: bool) -> None:
        """Check the budgets for a next step for which the commit has reserved nothing.

        If they refuse it, the turn stops.
        """
        try:
            refusal = self._spending.check(state, self.fencing_token, may_be_stopped=may_be_stopped)
        except HelixStoreError:
            if is_uncommitted:
                raise
            # The step is stored. The next one checks the budgets when it begins.
            _logger.warning("The budgets of session %r were not checked.", self.session.id, exc_info=True)
            return
        self._stop(refusal, self._spending.estimate)

    def _commit_failed(self, step: _TurnStep, error: BaseException) -> None:
        """Take the progress from the store: the error need not mean that the step is not stored.

        In a transaction of the caller, its rollback takes back the step.
        """
        if not self.session._stores.in_callers_transaction:
            with self._mutex:
                self._unseen, self._told_error, self._must_ask = step, error, True

    def _require_open(self, state: SessionState) -> None:
        """Raise `ConflictError` if a session that was just loaded has ended or is suspended."""
        if _is_open(state):
            return
        with self._mutex:
            self._told_error, self._must_ask = _is_over(), True
        raise self._told_error

    def _follow_commits(self, *, may_load: bool = True) -> None:
        """Undo the steps of a caller's transaction that was rolled back, to match the stored state."""
        if not (self._uncommitted or self._must_ask or self._spending.must_renew):
            return
        with self._mutex:
            before = self._uncommitted.settle()
            if before is not None:
                self._progress, self._must_ask = before, True
                self._spending.caller_rolled_back()
                if self._is_stop_uncommitted:
                    self._interrupt, self._is_stop_uncommitted = None, False
            elif not self._uncommitted:
                self._spending.caller_committed()
                self._is_stop_uncommitted = False
            if self._must_ask and may_load:
                self._ask()
        if self._spending.must_renew and may_load:
            self._reserve_again()

    def _reserve_again(self) -> None:
        """Reserve the next step again after a rollback, unless the turn is over."""
        self._spending.must_renew = False
        if self._has_left or self._interrupt is not None or not self.is_active or self._progress is None:
            return
        write = self.session._stores.uncommitted_write()
        if write is not None:
            self._uncommitted.add(write, self._progress)
        refusal = self._spending.record_again(
            self._progress.state,
            self.fencing_token,
            is_lost=True,
            is_uncommitted=write is not None,
        )
        self._stop(refusal, self._spending.estimate)

    def _stop(self, error: TurnInterrupted | None, refused: Amounts | None = None) -> None:
        """Stop the turn by an error, if there is one: no step begins after it."""
        if error is None:
            return
        self._interrupt, self._refused = error, refused
        self._is_stop_uncommitted = refused is not None and self.session._stores.in_callers_transaction

    def _require_own_locks(self, estimate: Amounts) -> None:
        """Raise `ConflictError` for an estimate whose hold no lock of this store would keep."""
        stores = self.session._stores
        if any(estimate) and not (stores.is_atomic and are_same_locks(self._locks, stores.locks)):
            raise ConflictError(
                "An estimate needs the lock manager of the session's store, whose lock keeps what is "
                "reserved; leave out locks=, or the estimate."
            )

    def _ask(self) -> None:
        state = self.session.load()
        run = self.session.store.get_current_run(self.session.id)
        run_has_ended = run is None or self.run is None or run.run_id != self.run.run_id
        was_ended = self._progress is not None and self._progress.was_ended
        if self._unseen is not None:
            was_ended = was_ended or self._unseen._has_ended_turn(state)
        self._progress, self._must_ask, self._unseen = Progress(state, run_has_ended, was_ended), False, None


class _TurnStep(Step):
    """A step with the fence and the run of a turn."""

    def __init__(
        self, turn: Turn, run_id: str, step_id: str | None, *, operation_id: str | None, estimate: Amounts
    ) -> None:
        super().__init__(turn.session, step_id, run_id=run_id, operation_id=operation_id)
        self._turn = turn
        self._estimate = estimate
        self._write: StepWrite | None = None
        self._fencing_token = turn.fencing_token
        self._receives = turn._receives
        self._offered = turn.results

    def _open(self, run_id: str | None = None, *, is_capped: bool = False) -> OpenedStep:
        turn, spending = self._turn, self._turn._spending
        turn._require_lock()
        # After a lost step, the store decides.
        turn._follow_commits()
        turn._required_run()
        must_check = spending.is_capped and spending.reserved != self._estimate
        may_exceed = must_check and any(self._estimate)
        opened = super()._open(self.run_id, is_capped=must_check and not may_exceed)
        if opened.interrupt is not None:
            interrupt = TurnInterrupted(opened.interrupt.kind.value, opened.interrupt.reason)
            turn._stop(interrupt)
            raise interrupt
        turn._require_open(opened.state)
        if may_exceed or (must_check and opened.may_be_stopped):
            self._reserve(opened.state)
        return opened

    def _reserve(self, state: SessionState) -> None:
        turn = self._turn
        write = self.session._stores.uncommitted_write()
        if write is not None:
            turn._uncommitted.add(write, turn._current())
        refusal = turn._spending.reserve(state, self._estimate, self._fencing_token)
        if refusal is not None:
            turn._stop(refusal, self._estimate)
            raise refusal

    def _save(self) -> None:
        try:
            super()._save()
        except BaseException as exc:
            self._turn._commit_failed(self, exc)
            raise

    def _has_ended_turn(self, state: SessionState) -> bool:
        """Return whether the commit of this step is stored and ended the turn. Its reply was not seen."""
        without_posts = self.state.message_count + len(self._messages)
        is_stored = state.step_count >= self.number
        return self._ends_turn and is_stored and state.message_count <= without_posts

    def _require_lock(self) -> None:
        self._turn._require_lock()

    def _before_commit(self) -> Callable[[StepCommit | None], object] | None:
        self._turn._require_lock()
        return self._turn._spending.to_record(self)

    @property
    def _may_go_on(self) -> bool:
        # A commit that receives posts goes on, whatever its step has asked for.
        ends = self._ends_turn or not _is_open(self.state)
        return not self._asked and (self._receives or not ends)

    @property
    def _may_be_stopped(self) -> bool | None:
        """Whether a budget may stop the next step, if the commit has found it out."""
        return None if self._write is None else self._write.may_be_stopped

    def _to_write(
        self,
        state: SessionState,
        record: Callable[[StepCommit | None], object] | None,
        opened: Sequence[str],
    ) -> StepWrite:
        write = self._write = super()._to_write(state, record, opened)
        spending = self._turn._spending
        if spending.is_capped:
            write.is_capped = spending.asks_commits and self._may_go_on
        return write

    def _goes_on(self, commit: StepCommit | None) -> bool:
        """Return whether the turn is active after the commit of this step."""
        if self._asked or commit is None:
            return False
        if self._ends_turn:
            return bool(commit.received)
        return _is_open(self.state) or (self._write is not None and self._write.is_continued)

    def _after(self, state: SessionState) -> None:
        was_ended = self._ends_turn and not self.received
        progress = Progress(state, bool(self._asked), was_ended)
        self._turn._step_is_over(progress, may_be_stopped=self._may_be_stopped)

    def _give_up(self, error: BaseException) -> None:
        super()._give_up(error)
        if self.session._stores.in_callers_transaction:
            # The error rolls back the caller's transaction, including the usage; the turn records the usage
            # later.
            return
        turn = self._turn
        try:
            if self._state is not None and turn._interrupt is None:
                refusal = turn._spending.record_again(self._state, self._fencing_token)
                turn._stop(refusal, turn._spending.estimate)
            else:
                turn._spending.record()
        except Exception:
            _logger.warning("The usage of step %r is not recorded yet.", self.id, exc_info=True)


class _TurnEffect(OpenEffect):
    """An effect with the fence and the run of a turn."""

    def __init__(self, turn: Turn, effect_id: str, **given: Any) -> None:
        super().__init__(turn.session, effect_id, **given)
        self._turn = turn
        self._fencing_token = turn.fencing_token

    def _begin(self) -> None:
        turn = self._turn
        run = turn._required_run()
        turn._require_lock()
        self.run_id, self.step_count = run.run_id, next_step_count(turn._current().state)
        with turn._mutex:
            if turn._effects.setdefault(self.id, self) is not self:
                raise ConflictError(f"Another thread of this turn attempts the effect {shown_id(self.id)}.")

    def _entered(self, *, may_retry: bool) -> Entered:
        try:
            return super()._entered(may_retry=may_retry)
        except TurnInterrupted as interrupt:
            self._turn._stop(interrupt)
            raise

    def _end(self) -> None:
        with self._turn._mutex:
            if self._turn._effects.get(self.id) is self:
                del self._turn._effects[self.id]

    def _stop(self, unknown: EffectUnknown) -> None:
        self._turn._interrupt = unknown
        if not self._turn._announces(self.id):
            super()._stop(unknown)


def _estimated(usd: Dollars | None, tokens: int | None, default: Amounts) -> Amounts:
    return default if usd is None and tokens is None else checked_estimate(usd, tokens, default)


def _is_open(state: SessionState) -> bool:
    """Return whether a session has not ended and is not suspended."""
    return state.status not in (*TERMINAL_STATUSES, SessionStatus.PAUSED)


def _rests() -> ConflictError:
    return ConflictError(
        "The turn is not active: the session is at rest, because nothing has arrived since its last turn; to "
        "begin a turn anyway, use turn(rest=False)."
    )


def _is_over() -> ConflictError:
    return ConflictError(
        "The turn is not active: it was stopped or left, or the session ended or waits; look at is_active."
    )
