"""The step of a handle."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from enum import Enum, auto
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

from helix_store.core import moments, validation
from helix_store.core.approvals import Actor, ApprovedCall
from helix_store.core.dicts import AnyMessage, AnyToolCall
from helix_store.core.limits import UNLIMITED, Limits
from helix_store.core.payloads import copy_json, encode
from helix_store.core.types import (
    TERMINAL_STATUSES,
    UNSET,
    Message,
    RunStatus,
    SessionMode,
    SessionState,
    SessionStatus,
    StagedChanges,
    StepCommit,
    StepInfo,
    Timestamp,
)
from helix_store.core.validation import messages as checked_messages
from helix_store.engine.async_twins import BothContexts, async_twin
from helix_store.engine.uncommitted import UncommittedWrite
from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    InvalidPayload,
    LockLostError,
    SessionNotFound,
    StaleStateError,
    TurnInterrupted,
    shown_id,
)
from helix_store.sessions.state import (
    SUSPENSION_FIELDS,
    default_step_id,
    next_step_count,
    set_loaded,
)
from helix_store.sessions.steps import OpenedStep, StagedRow, StepWrite, are_stored
from helix_store.sessions.tool_calls import ToolCalls, checked_calls, claimed_calls
from helix_store.stores.session import NotCopied, SessionHandleBase, StoreSet

_END_TURN: Final = "end_turn"
_SUSPENDED: Final = frozenset({SessionStatus.PAUSED, SessionStatus.INTERRUPTED})


def calls_of(state: SessionState) -> ToolCalls:
    return ToolCalls(state.pending_client_tool_calls, state.completed_client_tool_calls)


def other_root(state: SessionState) -> str | None:
    """Return the root of the session's tree, which records the owners of calls; ``None`` for the root."""
    return None if state.root_session_id == state.session_id else state.root_session_id


def is_suspended(state: SessionState) -> bool:
    """Return whether `resume` can continue the session."""
    return state.status in _SUSPENDED and any(
        getattr(state, name) is not None for name in SUSPENSION_FIELDS if name != "tracing_context"
    )


class Readiness(NamedTuple):
    """The situation of a session before a turn."""

    answers: dict[str, dict[str, Any]]
    """The answers that are offered to the turn, by tool call id."""
    is_suspended: bool
    """True if `resume` can continue the session."""
    can_continue: bool
    """True if the session has not ended and does not wait for an answer."""


def readiness_of(stores: StoreSet, state: SessionState) -> Readiness:
    """Return the situation of a session with this loaded state.

    This takes one statement if an answer may be the agent's own, otherwise none.
    """
    suspended, has_ended = is_suspended(state), state.status in TERMINAL_STATUSES
    if not state.pending_client_tool_calls:
        return Readiness({}, suspended, can_continue=not has_ended)
    calls, claims = calls_of(state), stores.open_claims(state)
    is_waiting = suspended and bool(calls.unanswered or claims)
    answers = {key: answer for key, answer in calls.answers.items() if key not in claims}
    return Readiness(answers, suspended, can_continue=not (has_ended or is_waiting))


def new_calls(calls: Any, *, now: datetime, run_id: str | None, limits: Limits) -> dict[str, dict[str, Any]]:
    """Return the complete entries of the calls that a step waits for. Raises `InvalidPayload`.

    A ``deadline`` is a duration from now or an aware datetime. With ``on_expiry`` "reject", the call is an
    approval, by default with its own id as approval id.
    """
    if not isinstance(calls, Mapping):
        raise InvalidPayload(path="calls", reason="expected a dict of calls by tool call id")
    asked_at = validation.datetime_to_milliseconds(now)
    given = {
        tool_call_id: _completed(tool_call_id, call, run_id)
        for tool_call_id, call in validation.items(calls.items(), "calls")
    }
    return checked_calls(given, requested_at=asked_at, limits=limits)


def _completed(tool_call_id: Any, call: Any, run_id: str | None) -> Any:
    if not isinstance(call, Mapping):
        return call
    entry = dict(call)
    entry.setdefault("run_id", run_id)
    if entry.get("on_expiry") == "reject" and entry.get("approval_id") is None:
        entry["approval_id"] = tool_call_id
    return entry


def take(state: SessionState, tool_call_ids: Container[str], limits: Limits) -> None:
    """Move the answers that were offered to a turn to the completed calls of a state."""
    calls = calls_of(state)
    if calls.take(tool_call_ids):
        state.pending_client_tool_calls = calls.pending
        state.completed_client_tool_calls = calls.kept(limits)


def ask(state: SessionState, entries: Mapping[str, dict[str, Any]], *, step_id: str) -> list[str]:
    """Make a state wait for calls, as `suspend` does, and return the ids of those that were not open before.

    Raises `ConflictError` if the state has another call with one of these ids.
    """
    calls = calls_of(state)
    opened = calls.add(entries)
    state.pending_client_tool_calls = calls.pending
    if other_root(state) is None:
        state.client_tool_call_ownership = claimed_calls(
            state.client_tool_call_ownership, entries, state.session_id
        )
    state.status = SessionStatus.PAUSED
    state.suspension_kind = RunStatus.SUSPENDED_CLIENT_TOOL
    state.suspension_context = {"tool_call_ids": list(entries)}
    state.suspended_awaiting_children = None
    state.suspended_step_id = step_id
    return opened


def outcome_of(state: SessionState) -> tuple[RunStatus, str | None]:
    """Return the status and the reason of a run whose last step stored this state."""
    if state.status == SessionStatus.FAILED:
        return RunStatus.FAILED, validation.failure_reason(state.failure_reason)
    if is_suspended(state):
        return state.suspension_kind or RunStatus.SUSPENDED_STEP_PARTIAL, None
    return RunStatus.COMPLETED, None


def end_of_run(
    state: SessionState,
    error: BaseException | None,
    interrupt: TurnInterrupted | None,
    *,
    was_ended: bool,
) -> tuple[RunStatus, str | None]:
    """Return the status and the reason of the run of a turn that ends with this state or error."""
    if error is not None:
        return RunStatus.FAILED, type(error).__name__
    if interrupt is not None:
        return RunStatus.INTERRUPTED, interrupt.reason or interrupt.kind
    status, reason = outcome_of(state)
    return status, _END_TURN if was_ended else reason


class Progress(NamedTuple):
    """The progress of a turn: the state, and whether a step has ended the run or the turn."""

    state: SessionState
    run_has_ended: bool = False
    was_ended: bool = False


class _UncommittedStep(NamedTuple):
    write: UncommittedWrite
    before: Progress


class UncommittedSteps(list[_UncommittedStep]):
    """The steps of a turn whose transaction was open when they ended, oldest first."""

    def add(self, write: UncommittedWrite, before: Progress) -> None:
        """Track a step that has ended in an open transaction of the caller."""
        self.append(_UncommittedStep(write, before))

    def settle(self) -> Progress | None:
        """Drop committed and lost steps, and return the progress before the first lost one."""
        for number, (write, before) in enumerate(self):
            if write.is_lost:
                del self[number:]
                return before
        self[:] = [step for step in self if not step.write.is_committed]
        return None


def may_wait_here() -> bool:
    """Return whether this code may query a database, which is not allowed in an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


_NOT_OURS: Final = (FencedOutError, LockLostError)
"""After these errors, another worker may be in the same step and own its staged changes."""

_OF_AN_ATTEMPT: Final = frozenset({"requested_at", "deadline", "run_id"})
"""The fields that differ if a repeated step makes the same call again."""

_logger = logging.getLogger(__name__)


class _Phase(Enum):
    NEW = auto()
    OPEN = auto()
    OVER = auto()


def _ends_twice() -> ConflictError:
    return ConflictError("A step can finish, fail, wait or end its turn, but only one of these and once.")


class Step(NotCopied, BothContexts):
    """One step of a session. Entering it loads the state; leaving it commits the whole step, or nothing.

    The commit passes the loaded version and the handle's fence, so it raises `StaleStateError` or
    `FencedOutError` if somebody else has written since. An exception in the block commits nothing, discards
    the step's staged changes, and propagates. A step can be used only once.

    Example::

        with session.step() as step:
            step.state.custom_state["seat"] = "12A"
            step.say({"role": "assistant", "content": "You have seat 12A."})
    """

    def __init__(
        self,
        session: SessionHandleBase,
        step_id: str | None = None,
        *,
        run_id: str | None = None,
        operation_id: str | None = None,
    ) -> None:
        for name, value in (("step_id", step_id), ("operation_id", operation_id)):
            if value is not None:
                validation.identifier(value, name)
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
        # What the step keeps of the loaded state, whatever the block assigns to it.
        self._owned: tuple[int, SessionMode | None, datetime | None, datetime | None] = (0, None, None, None)
        self.number = 0
        """The number of this step in its session, from 1."""
        self._messages: list[AnyMessage] = []
        self._staged: dict[str, StagedChanges] = {}
        self._rows: dict[str, StagedRow | None] = {}
        self._staged_in_block: dict[str, UncommittedWrite] = {}
        """The changes that were staged in a transaction of the caller."""
        self._asked: dict[str, dict[str, Any]] = {}
        self._ended: list[Any] | None = None
        """How the block has ended the session: the status, and the reason of a failure."""
        self._had_ended = False
        self._refusal: ConflictError | None = None
        """The error of a call for which the loaded state is too late, unless the step is a repeat."""
        self._used: dict[str, tuple[int, ApprovedCall]] = {}
        self._earlier_output: Any = UNSET
        self._ends_turn = False
        self._receives = False
        # The ids of the answers that the commit takes.
        self._offered: Collection[str] = ()

    @property
    def received(self) -> list[Message]:
        """The messages of posts that the commit received."""
        return [] if self.commit is None else self.commit.received

    @property
    def id(self) -> str:
        """The step id. It is empty before the step begins, unless an id was passed."""
        return self._id or ""

    @property
    def state(self) -> SessionState:
        """The loaded state, which you change in place; after the step, the committed state with its version.

        Its ``updated_at`` is that of the loaded state: a commit does not return the time of storage.
        """
        if self._state is None:
            raise ConflictError("The step has not begun; enter it with `with` or `async with`.")
        return self._state

    @property
    def loaded_state(self) -> SessionState | None:
        """`state`, or ``None`` before the step begins."""
        return self._state

    def __enter__(self) -> Self:
        if self._phase is not _Phase.NEW:
            raise ConflictError("A step is used once; begin another one with step().")
        self.session._begin(self)
        try:
            opened = self._open()
            state = opened.state
            self.number = next_step_count(state)
            self._id = self._id or default_step_id(self.number)
            self._state, self._version = state, state.version
            self._owned = state.message_count, state.mode, state.created_at, state.updated_at
            self._had_ended = state.status in TERMINAL_STATUSES
            if opened.has_staged:
                # A worker that died in this step may have staged these changes.
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
        """Append messages when the step commits."""
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
        """Stage a tool call's changes to the custom state: durable immediately, visible after the commit.

        Any thread may call this method. The same tool call replaces its earlier change. If your own
        transaction or savepoint around this call is rolled back, stage the change again: otherwise, the step
        raises `ConflictError` instead of committing.
        """
        changes = StagedChanges(
            tool_call_id=tool_call_id,
            patches=[] if patches is None else patches,
            merge_changes=merge_changes,
            # The commit compares the changes with the stored ones.
            timestamp=None if timestamp is None else validation.epoch_milliseconds(timestamp, "timestamp"),
        )
        with self._working("stage"):
            self._require_lock()
            self._rows[tool_call_id] = self.session._stores.stage(self.session.id, self.id, changes)
            self._staged[tool_call_id] = copy.deepcopy(changes)
            self._staged_in_block.pop(tool_call_id, None)
            write = self.session._stores.uncommitted_write()
            # With autocommit off, only the store knows whether the change was rolled back.
            if write is not None and write.is_open:
                self._staged_in_block[tool_call_id] = write

    def wait_for(self, calls: Mapping[str, AnyToolCall]) -> None:
        """Suspend the session when the step commits, until each call is answered.

        ``calls`` are entries by tool call id. A ``deadline`` is a duration, an aware time, or epoch
        milliseconds; with ``on_expiry`` "reject", the call is an approval. To keep data for the next turn,
        store it in the custom state. A call that is open already may be named again. Raises `InvalidPayload`,
        and `ConflictError` for an id that the session has given to another call, or that was answered.
        """
        with self._working("wait_for"):
            self._require_going_on()
            entries = new_calls(
                calls,
                now=moments.now(),
                run_id=self.run_id,
                limits=self.session._stores.limits,
            )
            self.session._stores.require_permissions(entries)
            asked = {**self._asked, **entries}
            # An invalid call fails in the line that makes it, and not at the end of the block.
            try:
                self._ask(copy.copy(self.state), asked)
            except ConflictError as conflict:
                self._refuse(conflict)
            root_id = other_root(self.state)
            root = None if root_id is None else self.session.store.load_state(root_id)
            if root is not None:
                # The root of the tree records the owners of calls.
                claimed_calls(root.client_tool_call_ownership, entries, self.session.id)
            self._asked = asked

    def ask_approval(
        self,
        call_id: str,
        tool_name: str,
        input: Any,
        *,
        permission: str | None = None,
        requester: Actor | None = None,
        approvals: int = 1,
        editable: bool = False,
        deadline: timedelta | Timestamp | None = None,
        on_expiry: Literal["reject", "fail"] | None = "reject",
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Suspend the session when the step commits, until people have approved or rejected a call.

        The approval id is the id of the call. Only an active Django user with the ``permission`` may answer,
        and not the ``requester``, a Django user or text. The ``deadline`` is a duration or a time; when it
        has passed, ``on_expiry`` is the answer. ``metadata`` holds your own data. Raises the errors of
        `wait_for`, also for a permission that does not exist.
        """
        if type(call_id) is not str:
            validation.identifier(call_id, "call_id")
        if on_expiry not in ("reject", "fail", None):
            raise InvalidPayload(path="on_expiry", reason='expected "reject", "fail" or None')
        given = {
            "permission": permission,
            "requester": requester,
            "deadline": deadline,
            # Every other default needs a deadline.
            "on_expiry": on_expiry if deadline is not None or on_expiry == "reject" else None,
            "metadata": metadata,
        }
        call = {
            "tool_name": tool_name,
            "input": input,
            "approval_id": call_id,
            "approvals": approvals,
            "editable": editable,
            **{name: value for name, value in given.items() if value is not None},
        }
        self.wait_for({call_id: call})

    def use_approval(self, tool_call_id: str) -> ApprovedCall:
        """Return the call that was approved, edited or not, and mark it as used when the step commits.

        It is read from the database, not from `state`. Raises `NotApproved`, and `ApprovalUsed` if a
        committed step has used it.
        """
        if type(tool_call_id) is not str:
            validation.identifier(tool_call_id, "tool_call_id")
        with self._working("use_approval"):
            if tool_call_id not in self._used:
                self._require_lock()
                version, asking, call = self.session._stores.approved_call(self.session.id, tool_call_id)
                if version != self._version:
                    raise StaleStateError(self._version, version)
                self._used[tool_call_id] = asking, call
            call = self._used[tool_call_id][1]
            return replace(call, input=copy_json(call.input), actors=list(call.actors))

    def finish(self, output: Any = None) -> None:
        """Complete the session when the step commits, unless the commit of a turn finds a due post.

        In that case the session stays active without the output, and the turn continues.
        """
        with self._working("finish"):
            self._require_going_on(finishing=True)
            self._ended = [SessionStatus.COMPLETED.value]
            self._earlier_output = self.state.output
            self.state.status = SessionStatus.COMPLETED
            self.state.output = output

    def fail(self, reason: str | None = None) -> None:
        """Fail the session when the step commits; the step's messages and changes are stored."""
        if reason is not None:
            validation.failure_reason(reason, "reason")
        with self._working("fail"):
            self._require_going_on(finishing=True)
            self._ended = [SessionStatus.FAILED.value, reason]
            self.state.status = SessionStatus.FAILED
            self.state.failure_reason = reason

    def end_turn(self) -> None:
        """End the turn when the step commits, unless the commit receives posts. The session stays active.

        It has no effect in a step outside a turn.
        """
        with self._working("end_turn"):
            self._require_going_on(finishing=True)
            self._ends_turn = True

    asay = async_twin(say)
    astage = async_twin(stage)
    await_for = async_twin(wait_for)
    aask_approval = async_twin(ask_approval)
    ause_approval = async_twin(use_approval)
    afinish = async_twin(finish)
    afail = async_twin(fail)
    aend_turn = async_twin(end_turn)

    @contextmanager
    def _working(self, call: str) -> Iterator[None]:
        """Run one call of the block at a time; leaving the block waits for calls in other threads."""
        with self._mutex:
            if self._phase is not _Phase.OPEN:
                raise ConflictError(
                    f"The step {shown_id(self.id)} is not open; call {call}() inside of its `with` block."
                )
            yield

    def _require_going_on(self, *, finishing: bool = False) -> None:
        """Raise `ConflictError` if a step both ends and waits, or ends twice."""
        has_ended = self.state.status in TERMINAL_STATUSES
        if (
            self._ended
            or self._ends_turn
            or (finishing and self._asked)
            or (has_ended and not self._had_ended)
        ):
            raise _ends_twice()
        if has_ended:
            self._refuse(_ends_twice())

    def _refuse(self, conflict: ConflictError) -> None:
        """Raise an error about the loaded state.

        With an operation id, the commit raises it: the state may have changed because the step is a repeat.
        """
        if self._operation_id is None:
            raise conflict
        self._refusal = self._refusal or conflict

    # At the end

    def _save(self) -> None:
        self._require_staged_in_block()
        state = copy.copy(self.state)
        record = self._before_commit()
        opened: list[str] = []
        if self._asked and self._refusal is None:
            opened = self._ask(state, self._asked)
        else:
            self._take_offered(state)
        if self._operation_id is not None:
            set_loaded(state, intent=self._intent())
        write = self._to_write(state, record, opened)
        commit, stored = self.session._stores.commit_step(write)
        if self._operation_id is not None and write.is_earlier(commit):
            self._discard_staged()
            self._asked = {}
            state = self.session.load()
        else:
            if write.is_continued and write.continued is not None:
                state = write.continued
            if self._operation_id is not None:
                set_loaded(state, intent=None)
            for name, value in stored.items():
                setattr(state, name, value)
            message_count, mode, state.created_at, state.updated_at = self._owned
            # The mode is written once, and a step without one keeps it.
            state.mode = state.mode or mode
            state.version = commit.new_version
            state.step_count = self.number
            state.message_count = message_count + len(self._messages) + len(commit.received)
        self._state, self.commit = state, commit
        self._after(state)

    def _require_staged_in_block(self) -> None:
        """Raise `ConflictError` if the caller has rolled back a change that it staged."""
        lost = [
            shown_id(tool_call_id) for tool_call_id, write in self._staged_in_block.items() if write.is_lost
        ]
        if lost:
            raise ConflictError(
                f"Your transaction or savepoint around stage() was rolled back, and with it the changes of "
                f"{', '.join(lost)}; stage them again in the same step, or begin another step."
            )

    def _to_write(
        self,
        state: SessionState,
        record: Callable[[StepCommit | None], object] | None,
        opened: Sequence[str],
    ) -> StepWrite:
        rows = [row for row in self._rows.values() if row is not None]
        has_ended = state.status in TERMINAL_STATUSES
        can_go_on = not has_ended or self._earlier_output is not UNSET
        receives = self._receives and not self._asked and can_go_on
        return StepWrite(
            session_id=self.session.id,
            state=state,
            messages=self._messages,
            info=StepInfo(self.id, self.number),
            expected_version=self._version,
            fencing_token=self._fencing_token,
            operation_id=self._operation_id,
            run_id=self.run_id,
            staged=self._staged,
            uses=[asking for asking, _ in self._used.values()],
            staged_rows=[] if len(rows) < len(self._rows) else rows,
            after=self._consequences(),
            record=record,
            receives=receives,
            continued=self._continued(state) if receives and has_ended else None,
            opened=opened,
            refusal=self._refusal,
        )

    def _continued(self, state: SessionState) -> SessionState | None:
        """Return the state to store instead of one that finishes the session, if posts are due."""
        if self._earlier_output is UNSET:
            return None
        continued = copy.copy(state)
        continued.status, continued.output = SessionStatus.ACTIVE, self._earlier_output
        return continued

    def _intent(self) -> str:
        """Return the block's changes except messages, as text that is the same if the step is repeated."""
        ended = self._ended
        if ended is not None and self.state.status == SessionStatus.COMPLETED:
            ended = [*ended, self.state.output]
        return encode(
            {
                "staged": {
                    tool_call_id: [changes.patches, changes.merge_changes]
                    for tool_call_id, changes in self._staged.items()
                },
                "asked": {
                    tool_call_id: {name: value for name, value in call.items() if name not in _OF_AN_ATTEMPT}
                    for tool_call_id, call in self._asked.items()
                },
                "ended": ended,
            },
            limit=UNLIMITED,
            path="",
        )

    def _consequences(self) -> list[Callable[[], object]]:
        """Return the calls that follow a question: the record on the root session, and the end of the run."""
        calls: list[Callable[[], object]] = []
        if not self._asked:
            return calls
        store, session_id = self.session.store, self.session.id
        if other_root(self.state) is not None:
            calls.append(
                partial(
                    self.session._stores.record_calls,
                    session_id,
                    self._asked,
                    self._fencing_token,
                )
            )
        if self.run_id is not None:
            calls.append(
                partial(
                    store.update_run,
                    session_id,
                    self.run_id,
                    status=RunStatus.SUSPENDED_CLIENT_TOOL,
                    step_count=self.number,
                    fencing_token=self._fencing_token,
                )
            )
        return calls

    def _ask(self, state: SessionState, entries: Mapping[str, dict[str, Any]]) -> list[str]:
        self._take_offered(state)
        return ask(state, entries, step_id=self.id)

    def _take_offered(self, state: SessionState) -> None:
        if self._offered:
            take(state, self._offered, self.session._stores.limits)

    def _discard_staged(self) -> None:
        """Discard the step's staged changes, unless another worker has dropped them."""
        store, session_id = self.session.store, self.session.id
        if self._staged and are_stored(self._staged, store.get_staged_changes(session_id, self.id)):
            store.discard_staging(session_id, self.id)

    def _give_up(self, error: BaseException) -> None:
        """Discard staged changes. An error during the cleanup must not mask the original one."""
        try:
            if self._staged and not isinstance(error, _NOT_OURS):
                self._require_lock()
                self._discard_staged()
        except Exception:
            _logger.warning("The staged changes of step %r were not discarded.", self.id, exc_info=True)

    # Overridden by the steps of a turn

    def _open(self, run_id: str | None = None, *, is_capped: bool = False) -> OpenedStep:
        """Read the data with which the step begins. Raises `SessionNotFound`."""
        opened = self.session._stores.open_step(self.session.id, self._id, run_id, is_capped=is_capped)
        if opened is None:
            raise SessionNotFound(self.session.id)
        return opened

    def _require_lock(self) -> None:
        """Raise `LockLostError` if somebody else may be driving the session now."""

    def _before_commit(self) -> Callable[[StepCommit | None], object] | None:
        """Return the call that records what the step has spent. Raises the errors of `_require_lock`."""
        return None

    def _after(self, state: SessionState) -> None:
        """Run after the commit of this state."""
