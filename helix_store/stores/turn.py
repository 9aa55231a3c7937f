"""One worker driving a session until it ends or waits."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from helix_store.budgets.rules import NOTHING, Amounts, checked_estimate
from helix_store.core import validation
from helix_store.core.budgets import Dollars
from helix_store.core.contracts import UsageStore
from helix_store.core.manager_contracts import HeldLock, LockManager
from helix_store.core.types import (
    TERMINAL_STATUSES,
    Duration,
    Message,
    Run,
    RunStatus,
    SessionState,
    SessionStatus,
    UsageKind,
)
from helix_store.core.usage import TokenCounts
from helix_store.engine.async_twins import BothContexts, async_twin
from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    LockLostError,
    SessionBusy,
    StaleStateError,
    TurnInterrupted,
)
from helix_store.sessions.requests import OpenedStep
from helix_store.stores import rules
from helix_store.stores.bound import BoundSession
from helix_store.stores.provisional import Progress, ProvisionalSteps, may_wait_here
from helix_store.stores.run_errors import described_error
from helix_store.stores.spending import Spending
from helix_store.stores.step import Step

_LONGEST_HOST_NAME: Final = 150
_ATTEMPTS: Final = 5

_logger = logging.getLogger(__name__)

R = TypeVar("R")


class Turn(BothContexts):
    """The lock of a session and one run, from `__enter__` to `__exit__`.

    Entering takes the lock and keeps it alive, resumes a session whose calls are answered, receives due
    posts, and starts a run that supersedes the run of a worker that died. If the session has ended or is
    still waiting, the turn is not active and has no run. Leaving ends the run according to the stored state
    and releases the lock.
    """

    def __init__(
        self,
        session: BoundSession,
        *,
        locks: LockManager | None = None,
        owner: str | None = None,
        ttl: Duration | None = None,
        usage: UsageStore | None = None,
        receive: bool = True,
        estimate_usd: Dollars | None = None,
        estimate_tokens: int | None = None,
    ) -> None:
        self.session = session
        self.run: Run | None = None
        self.results: dict[str, dict[str, Any]] = {}
        """The answers since the last turn, by tool call id. The first step that commits consumes them."""
        self._locks = session._parts.locks if locks is None else locks
        this_thread = f"{socket.gethostname()[:_LONGEST_HOST_NAME]}:{os.getpid()}:{threading.get_ident()}"
        self._owner = this_thread if owner is None else owner
        self._ttl_ms = None if ttl is None else validation.milliseconds(ttl, "ttl")
        self._lock: HeldLock | None = None
        self.fencing_token: int | None = None
        """The token of the turn's lock, for writes that the turn does not make itself."""
        self._progress: Progress | None = None
        self._spending = Spending(session._parts, usage)
        self._interrupt: TurnInterrupted | None = None
        self._is_used = False
        self._has_left = False
        self._receives = receive
        self._estimate = _estimated(estimate_usd, estimate_tokens, NOTHING)
        self._provisional = ProvisionalSteps()
        self._must_ask = False
        self._mutex = threading.RLock()

    # State

    @property
    def state(self) -> SessionState:
        """The state of the last step, or the state at the start of the turn.

        A step in the caller's transaction counts unless that transaction, or its savepoint, is rolled back.
        After a rollback, this is the stored state; in an event loop, where the store cannot be queried, it is
        the state before that step until the next step begins.
        """
        return self._current().state

    def _current(self) -> Progress:
        if not self._has_left and (self._provisional or self._must_ask):
            self._follow_commits(may_load=may_wait_here())
        if self._progress is None:
            raise ConflictError("The turn has not begun; enter it with `with` or `async with`.")
        return self._progress

    @property
    def is_active(self) -> bool:
        """True if the session continues in this turn: it has not ended, does not wait and was not stopped."""
        if self.run is None or self._has_left or self._interrupt is not None:
            return False
        state, run_has_ended, was_ended = self._current()
        is_open = state.status not in (*TERMINAL_STATUSES, SessionStatus.PAUSED)
        return is_open and not (run_has_ended or was_ended)

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
        or is raised again by each later call. If a budget of the session does not allow the step,
        `BudgetExceeded` is raised, with the same effect. The step holds the estimates, by default those of
        the turn, until it ends. Raises `ConflictError` if the turn is not active.
        """
        if self._interrupt is not None:
            raise self._interrupt
        if self.run is None or not self.is_active:
            raise _is_over()
        estimate = _estimated(estimate_usd, estimate_tokens, self._estimate)
        return _TurnStep(self, self.run.run_id, step_id, operation_id=operation_id, estimate=estimate)

    def tokens(
        self,
        *,
        model: str,
        prompt: int = 0,
        completion: int = 0,
        reasoning: int = 0,
        cached: int = 0,
        total: int | None = None,
        cost_usd: Any = None,
    ) -> None:
        """Record the tokens of a model's answer, with the next step that commits or, without one, at the end.

        By default, ``total`` is the sum of ``prompt`` and ``completion``.
        """
        total = prompt + completion if total is None else total
        counts = TokenCounts(
            prompt=prompt, completion=completion, reasoning=reasoning, cached=cached, total=total
        )
        self._spend(UsageKind.TOKENS, model=model, tokens=counts, cost_usd=cost_usd)

    def tool(self, name: str, success: bool, duration: Duration) -> None:
        """Record a tool call and its duration (a `timedelta` or ms), as `tokens` does. Safe in any thread."""
        duration_ms = validation.milliseconds(duration, "duration")
        self._spend(UsageKind.TOOL, tool_name=name, success=success, duration_ms=duration_ms)

    def _spend(self, kind: UsageKind, **own: Any) -> None:
        if self.run is None or self._has_left:
            raise ConflictError("The turn has no run; record usage between its start and its end.")
        self._spending.add(self.run, self.state, kind, **own)

    def receive(self) -> list[Message]:
        """Receive due posts now, unless tool calls are open, and return their messages.

        Raises `ConflictError` in an open step, and if the turn is not active.
        """
        self.session._require_no_step("receive")
        self._require_lock()
        self._require_active()
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
        # Load before locking: a lock acquired for a session that does not exist would be stored forever.
        state = self.session.load()
        lock = self._locks.acquire(self.session.id, ttl_ms=self._ttl_ms, owner=self._owner)
        if lock is None:
            raise SessionBusy(self.session.id)
        self._lock, self.fencing_token = lock, lock.fencing_token
        try:
            if self.session._parts.connection_of_caller is None:
                lock.keep_alive()
            self._progress = Progress(self._attempted(self._taken_up, state, StaleStateError, ConflictError))
        except BaseException:
            self._has_left = True
            self._release(lock)
            raise
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
        standing = rules.standing_of(state)
        if not standing.can_continue:
            # Read under the lock: an answer may have arrived just before it and found the session busy.
            state = self.session.load()
            standing = rules.standing_of(state)
            if not standing.can_continue:
                self._settle(state)
                return state
        self.results = standing.answers
        self._spending.look_for_budgets(state)
        # A loaded state need not say whether posts are waiting, so assume that they are.
        may_receive = self._receives and self.session._has_posts and getattr(state, "_has_posts", True)
        if standing.is_suspended:
            state = store.resume(session_id, expected_version=state.version, fencing_token=token)
        if may_receive and state.status != SessionStatus.PAUSED and self.session._receive(state, token):
            state = self.session.load()
        was_active = state.status == SessionStatus.ACTIVE
        self.run = store.start_run(session_id, expected_version=state.version, fencing_token=token)
        return state if was_active else self.session.load()

    def _settle(self, state: SessionState) -> None:
        """Finish the work that a worker left unfinished if it died after its last step."""
        store, session_id = self.session.store, self.session.id
        asked = rules.calls_of(state).unanswered
        if asked and rules.other_root(state) is not None and not self.session._parts.is_atomic:
            store.add_pending_tool_calls(session_id, asked, fencing_token=self.fencing_token)
        run = store.get_current_run(session_id)
        if run is not None:
            self._end_run(run.run_id, *rules.outcome_of(state), step_count=state.step_count)

    # Leaving

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._lock is None or self._has_left:
            return False
        self._has_left = True
        is_quiet = error is not None and error is self._interrupt
        try:
            self._leave(None if is_quiet else error)
        finally:
            self._release(self._lock)
        return is_quiet

    def _leave(self, error: BaseException | None) -> None:
        try:
            if self.run is not None:
                # For a third-party store, nothing else shows whether its writes were rolled back.
                self._must_ask |= not self.session._parts.is_atomic
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
        status, reason = rules.end_of_run(state, error, self._interrupt, was_ended=was_ended)
        failure = None if error is None else described_error(error)
        try:
            self._end_run(run.run_id, status, reason, step_count=state.step_count, error=failure)
        except (ConflictError, FencedOutError):
            # The run was superseded: another worker has the session, but every step of this turn is stored.
            _logger.info("The run %r was superseded before its turn ended.", run.run_id)

    def _end_run(
        self, run_id: str, status: RunStatus, reason: str | None, *, step_count: int, error: Any = None
    ) -> None:
        self.session.store.update_run(
            self.session.id,
            run_id,
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

    # Called by the steps of the turn

    def _require_lock(self) -> None:
        """Raise `LockLostError` unless the lock is held: another worker may be in the same step."""
        if self._has_left or self._lock is None:
            raise LockLostError("The turn is over; begin another one with turn().")
        if not self._lock.is_trusted():
            self._lock.refresh()

    def _require_active(self) -> None:
        """Raise `ConflictError` unless the turn is active; after a lost step, the store decides."""
        self._follow_commits()
        if self._interrupt is None and not self.is_active:
            raise _is_over()

    def _step_is_over(self, progress: Progress) -> None:
        connection = self.session._parts.connection_of_caller
        with self._mutex:
            before, self._progress = self._current(), progress
            if connection is not None:
                self._provisional.add(connection, before)
            self._spending.settle(is_provisional=connection is not None)

    def _follow_commits(self, *, may_load: bool = True) -> None:
        """Undo the steps of a caller's transaction that was rolled back, to match the stored state."""
        if not (self._provisional or self._must_ask):
            return
        with self._mutex:
            before = self._provisional.settle()
            if before is not None:
                self._progress, self._must_ask = before, True
                self._spending.caller_rolled_back()
            elif not self._provisional:
                self._spending.caller_committed()
            if self._must_ask and may_load:
                self._ask()

    def _ask(self) -> None:
        state = self.session.load()
        run = self.session.store.get_current_run(self.session.id)
        run_has_ended = run is None or self.run is None or run.run_id != self.run.run_id
        was_ended = self._progress is not None and self._progress.was_ended
        self._progress, self._must_ask = Progress(state, run_has_ended, was_ended), False


class _TurnStep(Step):
    """A step with the fence and the run of a turn."""

    def __init__(
        self, turn: Turn, run_id: str, step_id: str | None, *, operation_id: str | None, estimate: Amounts
    ) -> None:
        super().__init__(turn.session, step_id, run_id=run_id, operation_id=operation_id)
        self._turn = turn
        self._estimate = estimate
        self._fencing_token = turn.fencing_token
        self._receives = turn._receives
        self._offered = turn.results

    def _open(self, run_id: str | None = None, *, is_capped: bool = False) -> OpenedStep:
        spending = self._turn._spending
        may_exceed = spending.is_capped and any(self._estimate)
        self._turn._require_lock()
        self._turn._require_active()
        opened = super()._open(self.run_id, is_capped=spending.is_capped and not may_exceed)
        try:
            if opened.interrupt is not None:
                raise TurnInterrupted(opened.interrupt.kind.value, opened.interrupt.reason)
            if may_exceed or (spending.is_capped and opened.may_be_stopped):
                spending.hold(opened.state, self._estimate, self._fencing_token)
        except TurnInterrupted as exc:
            self._turn._interrupt = exc
            raise
        return opened

    def _require_lock(self) -> None:
        self._turn._require_lock()

    def _before_commit(self) -> Callable[[], object] | None:
        self._turn._require_lock()
        return self._turn._spending.to_record()

    def _after(self, state: SessionState) -> None:
        was_ended = self._ends_turn and not self.received
        self._turn._step_is_over(Progress(state, bool(self._asked), was_ended))

    def _give_up(self, error: BaseException) -> None:
        super()._give_up(error)
        if self.session._parts.connection_of_caller is not None:
            # The error rolls back the caller's transaction, including the usage; the turn records the usage
            # later.
            return
        try:
            self._turn._spending.record()
        except Exception:
            _logger.warning("The usage of step %r is not recorded yet.", self.id, exc_info=True)


def _estimated(usd: Dollars | None, tokens: int | None, default: Amounts) -> Amounts:
    return default if usd is None and tokens is None else checked_estimate(usd, tokens, default)


def _is_over() -> ConflictError:
    return ConflictError("The turn is not active: the session ended or waits; look at is_active.")
