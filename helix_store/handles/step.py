"""One atomic step: what a worker does between loading a session and committing it."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from helix_store.core import moments
from helix_store.core.dicts import AnyMessage, AnyToolCall
from helix_store.core.merging import with_staged
from helix_store.core.types import (
    TERMINAL_STATUSES,
    RunStatus,
    SessionState,
    SessionStatus,
    StagedChanges,
    StepCommit,
    StepInfo,
    Timestamp,
)
from helix_store.core.validation import messages as checked_messages
from helix_store.engine.async_contexts import BothContexts
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    LockLostError,
    shown_id,
)
from helix_store.handles import kinds, rules
from helix_store.sessions.tool_calls import claimed_calls

if TYPE_CHECKING:
    from helix_store.handles.session import SessionHandle

__all__ = ["Step"]

_NOT_OURS: Final = (FencedOutError, LockLostError)
"""After these another worker may be in the step: what is staged there may be that worker's."""

_logger = logging.getLogger(__name__)


class _Phase(Enum):
    NEW = auto()
    OPEN = auto()
    OVER = auto()


class Step(BothContexts):
    """One step of a session. Entering loads the state; leaving commits all of the step, or nothing.

    The commit has the version that was loaded and the fence of the handle, so it raises `StaleStateError` or
    `FencedOutError` when somebody else wrote meanwhile. An exception in the block commits nothing, discards
    what the step staged, and propagates. A step is used once.
    """

    def __init__(
        self,
        session: SessionHandle,
        step_id: str | None = None,
        *,
        run_id: str | None = None,
        operation_id: str | None = None,
    ) -> None:
        self.session = session
        self.run_id = run_id
        self.commit: StepCommit | None = None
        self._id = step_id
        self._operation_id = operation_id
        self._fencing_token = session.fencing_token
        self._phase = _Phase.NEW
        self._mutex = threading.Lock()
        self._state: SessionState | None = None
        self._version = 0
        self._number = 0
        self._messages: list[AnyMessage] = []
        self._staged: dict[str, StagedChanges] = {}
        self._asked: dict[str, dict[str, Any]] = {}

    @property
    def id(self) -> str:
        """The step id; empty before the step begins, unless it was given."""
        return self._id or ""

    @property
    def number(self) -> int:
        """The number of this step in its session, from 1."""
        return self._number

    @property
    def state(self) -> SessionState:
        """The loaded state, to change in place; after the step the state as committed, with its version.

        Its ``updated_at`` stays the loaded time: a commit does not return when it was stored.
        """
        if self._state is None:
            raise ConflictError("The step has not begun; enter it with `with` or `async with`.")
        return self._state

    def __enter__(self) -> Self:
        if self._phase is not _Phase.NEW:
            raise ConflictError("A step is used once; begin another one with step().")
        self.session._begin(self)
        try:
            self._before()
            state = self.session.load()
            self._number = state.step_count + 1
            self._id = self._id or f"step-{self._number}"
            self._state, self._version = state, state.version
            if self._stored_changes():
                # Of a worker that died in this step.
                self.session.store.discard_staging(self.session.id, self._id)
            self._phase = _Phase.OPEN
        except BaseException:
            self._phase = _Phase.OVER
            self.session._end(self)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        with self._mutex:
            if self._phase is not _Phase.OPEN:
                return False
            self._phase = _Phase.OVER
        try:
            if error is not None:
                self._give_up(error)
                return False
            try:
                self._save()
            except BaseException as exc:
                self._give_up(exc)
                raise
            return False
        finally:
            self.session._end(self)

    # In the block

    def say(self, *messages: AnyMessage) -> None:
        """Append messages with the commit."""
        checked_messages(messages)
        with self._working("say"):
            self._messages += messages

    def stage(
        self,
        tool_call_id: str,
        *,
        merge_changes: dict[str, Any] | None = None,
        patches: list[Any] | None = None,
        timestamp: Timestamp | None = None,
    ) -> None:
        """Stage a tool call's changes to the custom state: durable at once, visible with the commit.

        Any thread may call it. The same tool call replaces its earlier change.
        """
        changes = StagedChanges(
            tool_call_id=tool_call_id,
            patches=[] if patches is None else patches,
            merge_changes=merge_changes,
            timestamp=timestamp,
        )
        with self._working("stage"):
            self._require_lock()
            self.session.store.stage_changes(self.session.id, self.id, changes)
            self._staged[tool_call_id] = copy.deepcopy(changes)

    def wait_for(self, calls: Mapping[str, AnyToolCall]) -> None:
        """Suspend the session with the commit, until each call is answered.

        ``calls`` are entries by tool call id. A ``deadline`` is a duration, an aware time, or epoch
        milliseconds; with ``on_expiry`` "reject" the call is an approval. What the next turn needs
        belongs in the custom state. Raises `InvalidPayload`, and `ConflictError` for a call that the session
        had before.
        """
        with self._working("wait_for"):
            self._require_going_on()
            entries = rules.new_calls(
                calls,
                now=moments.now(),
                run_id=self.run_id,
                limits=kinds.limits_of(self.session.store),
            )
            asked = {**self._asked, **entries}
            # Fails here, in the line that asks, and not at the end of the block.
            self._ask(copy.copy(self.state), asked)
            self._require_unclaimed(entries)
            self._asked = asked

    def finish(self, output: Any = None) -> None:
        """Complete the session with the commit."""
        with self._working("finish"):
            self._require_going_on(finishing=True)
            self.state.status = SessionStatus.COMPLETED
            self.state.output = output

    def fail(self, reason: str | None = None) -> None:
        """Fail the session with the commit; the step's messages and changes are stored."""
        with self._working("fail"):
            self._require_going_on(finishing=True)
            self.state.status = SessionStatus.FAILED
            self.state.failure_reason = reason

    asay = async_twin(say)
    astage = async_twin(stage)
    await_for = async_twin(wait_for)
    afinish = async_twin(finish)
    afail = async_twin(fail)

    @contextmanager
    def _working(self, call: str) -> Iterator[None]:
        """One call of the block at a time; leaving waits for those of other threads."""
        with self._mutex:
            if self._phase is not _Phase.OPEN:
                raise ConflictError(
                    f"The step {shown_id(self.id)} is not open; call {call}() inside of its `with` block."
                )
            yield

    def _require_going_on(self, *, finishing: bool = False) -> None:
        """Raise `ConflictError` for a step that both ends and waits, or ends twice."""
        if self.state.status in TERMINAL_STATUSES or (finishing and self._asked):
            raise ConflictError("A step finishes, fails or waits; it does one of them, once.")

    def _require_unclaimed(self, entries: Mapping[str, dict[str, Any]]) -> None:
        """Raise `ConflictError` for a call of another session of the tree, whose root knows the owners."""
        root_id = rules.other_root(self.state)
        root = None if root_id is None else self.session.store.load_state(root_id)
        if root is not None:
            claimed_calls(root.client_tool_call_ownership, entries, self.session.id)

    # At the end

    def _save(self) -> None:
        state = copy.copy(self.state)
        self._require_lock()
        if self._asked:
            self._ask(state, self._asked)
        else:
            rules.take(state, self._offered(), kinds.limits_of(self.session.store))
        staged = self._stored_changes()
        self._require_staged(staged)
        if staged:
            state.custom_state = with_staged(
                state.custom_state, staged, limits=kinds.limits_of(self.session.store)
            )
        commit = self._write(state, len(staged))
        state.version = commit.new_version
        state.step_count = self._number
        state.message_count += len(self._messages)
        self._state, self.commit = state, commit
        self._after()

    def _write(self, state: SessionState, staged: int) -> StepCommit:
        """The commit: one write, and one transaction with what belongs to it.

        With a store that has no common transaction a kill may fall between two calls. What comes before the
        write is true or void without the step; what comes after it can be repeated from what is stored.
        """
        before, after = self._spending(), self._consequences()
        save = partial(self._save_step, state)
        if not (before or staged or after):
            return save()

        def write() -> StepCommit:
            for call in before:
                call()
            if staged and self.session.store.discard_staging(self.session.id, self.id) != staged:
                raise self._is_not_alone()
            commit = save()
            for call in after:
                call()
            return commit

        return kinds.in_one_transaction(self.session.store, self.session.id, write)

    def _save_step(self, state: SessionState) -> StepCommit:
        return self.session.store.save_state_and_promote_staging(
            self.session.id,
            state,
            self._messages,
            StepInfo(self.id, self._number),
            expected_version=self._version,
            fencing_token=self._fencing_token,
            operation_id=self._operation_id,
            run_id=self.run_id,
        )

    def _consequences(self) -> list[Callable[[], object]]:
        """What follows from a question: its record on the root session, and the end of the run."""
        calls: list[Callable[[], object]] = []
        if not self._asked:
            return calls
        store, session_id = self.session.store, self.session.id
        if rules.other_root(self.state) is not None:
            calls.append(
                partial(
                    store.add_pending_tool_calls,
                    session_id,
                    self._asked,
                    fencing_token=self._fencing_token,
                )
            )
        if self.run_id is not None:
            calls.append(
                partial(
                    store.update_run,
                    session_id,
                    self.run_id,
                    status=RunStatus.SUSPENDED_CLIENT_TOOL,
                    step_count=self._number,
                    fencing_token=self._fencing_token,
                )
            )
        return calls

    def _ask(self, state: SessionState, entries: Mapping[str, dict[str, Any]]) -> None:
        rules.take(state, self._offered(), kinds.limits_of(self.session.store))
        rules.ask(state, entries, step_id=self.id)

    def _stored_changes(self) -> list[StagedChanges]:
        return self.session.store.get_staged_changes(self.session.id, self.id)

    def _require_staged(self, stored: Sequence[StagedChanges]) -> None:
        """Raise `ConflictError` unless everything that this step staged is still there, as it was staged."""
        found = {change.tool_call_id: change for change in stored}
        if any(found.get(tool_call_id) != change for tool_call_id, change in self._staged.items()):
            raise self._is_not_alone()

    def _is_not_alone(self) -> ConflictError:
        self._staged.clear()
        return ConflictError(
            f"Another worker began the step {shown_id(self.id)} and dropped what this one had staged; "
            "let one worker drive the session: take its lock, or use turn()."
        )

    def _give_up(self, error: BaseException) -> None:
        """Discard what was staged. The error goes on: one of the clean-up must not hide it."""
        try:
            if self._staged and not isinstance(error, _NOT_OURS):
                self._require_lock()
                self.session.store.discard_staging(self.session.id, self.id)
        except Exception:
            _logger.warning("What step %r staged was not discarded.", self.id, exc_info=True)

    # For the steps of a turn

    def _before(self) -> None:
        """Called before the state is loaded."""

    def _require_lock(self) -> None:
        """Raise `LockLostError` if somebody else may drive the session now."""

    def _offered(self) -> Container[str]:
        """The ids of the answers that the commit takes."""
        return ()

    def _spending(self) -> list[Callable[[], object]]:
        """The calls that record what was spent."""
        return []

    def _after(self) -> None:
        """Called after the commit."""
