"""One worker driving a session until it ends or waits."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Container
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from helix_store.core import validation
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
)
from helix_store.core.usage import TokenCounts
from helix_store.engine.async_contexts import BothContexts
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    LockLostError,
    SessionBusy,
    StaleStateError,
    TurnInterrupted,
)
from helix_store.handles import kinds, rules
from helix_store.handles.spending import Spending
from helix_store.handles.step import Step

if TYPE_CHECKING:
    from helix_store.handles.session import SessionHandle

__all__ = ["Turn"]

_LONGEST_HOST_NAME: Final = 150
_ATTEMPTS: Final = 5

_logger = logging.getLogger(__name__)


class Turn(BothContexts):
    """The lock of a session and one run of it, from `__enter__` to `__exit__`.

    Entering takes the lock and keeps it alive, takes a session up again whose calls are answered, and starts
    a run; the run of a worker that died is superseded. A session that still waits or has ended gives a turn
    that is not active and has no run. Leaving ends the run by what is stored, and releases the lock.
    """

    def __init__(
        self,
        session: SessionHandle,
        *,
        locks: LockManager | None = None,
        owner: str | None = None,
        ttl: Duration | None = None,
        usage: UsageStore | None = None,
    ) -> None:
        self.session = session
        self.run: Run | None = None
        self.results: dict[str, dict[str, Any]] = {}
        """The answers since the last turn, by tool call id. The first step that commits takes them."""
        self._locks = kinds.locks_of(session.store) if locks is None else locks
        self._usage = usage
        self._owner = _this_thread() if owner is None else owner
        self._ttl_ms = None if ttl is None else validation.milliseconds(ttl, "ttl")
        self._lock: HeldLock | None = None
        self._state: SessionState | None = None
        self._spending: Spending | None = None
        self._interrupt: TurnInterrupted | None = None
        self._is_used = False
        self._has_left = False
        self._run_has_ended = False
        self._mutex = threading.Lock()

    # What the turn is

    @property
    def state(self) -> SessionState:
        """The state of the last step, or that with which the turn began."""
        if self._state is None:
            raise ConflictError("The turn has not begun; enter it with `with` or `async with`.")
        return self._state

    @property
    def is_active(self) -> bool:
        """Whether the session goes on in this turn: it has neither ended nor waits, and nobody stopped it."""
        return (
            self.run is not None
            and not (self._has_left or self._run_has_ended)
            and self._interrupt is None
            and self.state.status not in (*TERMINAL_STATUSES, SessionStatus.PAUSED)
        )

    @property
    def fencing_token(self) -> int | None:
        """The token of the turn's lock, for writes that the turn does not make itself."""
        return None if self._lock is None else self._lock.fencing_token

    def messages(self, last: int | None = None) -> list[Message]:
        """All messages of the session, or the ``last`` ones, oldest first."""
        return self.session.messages(last)

    amessages = async_twin(messages)

    # Working

    def step(self, step_id: str | None = None, *, operation_id: str | None = None) -> Step:
        """The next step, with the fence and the run of this turn.

        Entering it raises `TurnInterrupted` when somebody asked the session to stop: that ends the turn, or
        is raised again by each later call. Raises `ConflictError` if the turn is not active.
        """
        if self._interrupt is not None:
            raise self._interrupt
        if self.run is None or not self.is_active:
            raise ConflictError("The turn is not active: the session ended or waits; look at is_active.")
        return _TurnStep(self, self.run.run_id, step_id, operation_id=operation_id)

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
        """Record the tokens of a model's answer: with the step that commits next, or without it.

        ``total`` is by default the sum of ``prompt`` and ``completion``.
        """
        if total is None:
            total = prompt + completion
        counts = TokenCounts(
            prompt=prompt, completion=completion, reasoning=reasoning, cached=cached, total=total
        )
        self._ledger().tokens(self._next_number(), model, counts, cost_usd)

    def tool(self, name: str, success: bool, duration: Duration) -> None:
        """Record a tool call and its duration (a `timedelta` or ms) as `tokens` does. Safe in any thread."""
        self._ledger().tool(self._next_number(), name, success=success, duration=duration)

    def _ledger(self) -> Spending:
        with self._mutex:
            if self.run is None or self._has_left:
                raise ConflictError("The turn has no run; record usage between its begin and its end.")
            if self._spending is None:
                usage = kinds.usage_of(self.session.store) if self._usage is None else self._usage
                self._spending = Spending(
                    usage, self.session.id, run_id=self.run.run_id, agent_type=self.state.agent_type
                )
            return self._spending

    def _next_number(self) -> int:
        return self.state.step_count + 1

    # Beginning

    def __enter__(self) -> Self:
        if self._is_used:
            raise ConflictError("A turn is used once; begin another one with turn().")
        self._is_used = True
        # Before the lock: the lock of a session that does not exist would be stored for ever.
        state = self.session.load()
        lock = self._locks.acquire(self.session.id, ttl_ms=self._ttl_ms, owner=self._owner)
        if lock is None:
            raise SessionBusy(self.session.id)
        self._lock = lock
        try:
            if kinds.can_see_commits(self.session.store):
                lock.keep_alive()
            self._state = self._begun(state)
        except BaseException:
            self._has_left = True
            self._release(lock)
            raise
        return self

    def _begun(self, state: SessionState) -> SessionState:
        """Take the session up, from the state that was loaded before the lock or from a later one."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return self._taken_up(state)
            except StaleStateError:
                state = self.session.load()
        return self._taken_up(state)

    def _taken_up(self, state: SessionState) -> SessionState:
        store, session_id = self.session.store, self.session.id
        if _has_ended(state) or rules.is_waiting(state):
            # Read under the lock: an answer may have come before it, and its worker found the session busy.
            state = self.session.load()
            if _has_ended(state) or rules.is_waiting(state):
                self._settle(state)
                return state
        self.results = rules.calls_of(state).answers
        if rules.is_suspended(state):
            state = store.resume(session_id, expected_version=state.version, fencing_token=self.fencing_token)
        was_active = state.status == SessionStatus.ACTIVE
        self.run = store.start_run(
            session_id, expected_version=state.version, fencing_token=self.fencing_token
        )
        return state if was_active else self.session.load()

    def _settle(self, state: SessionState) -> None:
        """Do what a worker that died after its last step has left undone."""
        store, session_id = self.session.store, self.session.id
        asked = rules.calls_of(state).unanswered
        if asked and rules.other_root(state) is not None and not kinds.shares_transactions(store):
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
            self._record_spending()
            if self.run is not None and not self._run_has_ended:
                self._end_by(self.run, error)
        except Exception:
            if error is None:
                raise
            # The error of the block goes on. The next turn ends the run.
            _logger.warning("The run of session %r was not ended.", self.session.id, exc_info=True)

    def _end_by(self, run: Run, error: BaseException | None) -> None:
        state = self.state
        if isinstance(error, FencedOutError | LockLostError):
            return
        failure = None
        status, reason = rules.outcome_of(state)
        if error is not None:
            status, reason = RunStatus.FAILED, type(error).__name__
            failure = {"type": reason}
        elif self._interrupt is not None:
            status, reason = RunStatus.INTERRUPTED, self._interrupt.reason or self._interrupt.kind
        try:
            self._end_run(run.run_id, status, reason, step_count=state.step_count, error=failure)
        except (ConflictError, FencedOutError):
            # Superseded: another worker has the session, and every step of this turn is stored.
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

    def _record_spending(self) -> None:
        if self._spending is not None and not self._spending.is_empty:
            self._spending.forget(self._spending.record())

    def _release(self, lock: HeldLock) -> None:
        try:
            lock.release()
        except Exception:
            # Its keep-alive has stopped, so it ends with its term.
            _logger.warning("The lock of session %r was not released.", self.session.id, exc_info=True)

    # For the steps of the turn

    def _require_lock(self) -> None:
        """Raise `LockLostError` unless the lock is held: another worker may be in the same step."""
        if self._has_left or self._lock is None:
            raise LockLostError("The turn is over; begin another one with turn().")
        if not self._lock.is_trusted():
            self._lock.refresh()

    def _look_for_interrupt(self, run_id: str) -> None:
        request = self.session.store.check_interrupt(self.session.id, run_id=run_id)
        if request is not None:
            self._interrupt = TurnInterrupted(request.kind.value, request.reason)
            raise self._interrupt

    def _step_is_over(self, step: Step, *, run_has_ended: bool) -> None:
        self._state = step.state
        self._run_has_ended = run_has_ended


class _TurnStep(Step):
    """A step with the fence and the run of a turn."""

    def __init__(self, turn: Turn, run_id: str, step_id: str | None, *, operation_id: str | None) -> None:
        super().__init__(turn.session, step_id, run_id=run_id, operation_id=operation_id)
        self._turn = turn
        self._run_id = run_id
        self._fencing_token = turn.fencing_token
        self._spent = 0

    def _before(self) -> None:
        self._turn._require_lock()
        self._turn._look_for_interrupt(self._run_id)

    def _require_lock(self) -> None:
        self._turn._require_lock()

    def _offered(self) -> Container[str]:
        return self._turn.results

    def _spending(self) -> list[Callable[[], object]]:
        spending = self._turn._spending
        return [] if spending is None or spending.is_empty else [partial(self._record, spending)]

    def _record(self, spending: Spending) -> None:
        self._spent = spending.record()

    def _after(self) -> None:
        if self._turn._spending is not None:
            self._turn._spending.forget(self._spent)
        self._turn._step_is_over(self, run_has_ended=bool(self._asked))

    def _give_up(self, error: BaseException) -> None:
        super()._give_up(error)
        if not kinds.can_see_commits(self.session.store):
            # The caller's transaction ends with the error, and what it records. The turn records it later.
            return
        try:
            self._turn._record_spending()
        except Exception:
            _logger.warning("What step %r spent is not recorded yet.", self.id, exc_info=True)


def _has_ended(state: SessionState) -> bool:
    return state.status in TERMINAL_STATUSES


def _this_thread() -> str:
    """Host, process and thread."""
    return f"{socket.gethostname()[:_LONGEST_HOST_NAME]}:{os.getpid()}:{threading.get_ident()}"
