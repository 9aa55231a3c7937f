"""A session of a store: the stores that it uses, and the calls with its id."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any, Final, NoReturn, Protocol, Self, cast

from helix_store import conf
from helix_store.budgets import Amounts, BudgetStoreBase
from helix_store.core import validation
from helix_store.core.approvals import ActingUser, ApprovedCall
from helix_store.core.contracts import LockManager, StateStore, UsageStore, require_state_store
from helix_store.core.dicts import AnyMessage
from helix_store.core.limits import Limits
from helix_store.core.patches import with_staged
from helix_store.core.posts import Post, PostPage, PostStore
from helix_store.core.types import (
    CheckpointPage,
    Message,
    Run,
    SessionState,
    StagedChanges,
    Timestamp,
    UserId,
)
from helix_store.core.usage import UsageRollup
from helix_store.engine.async_twins import async_twin, in_thread_to_the_end
from helix_store.engine.uncommitted import UncommittedWrite
from helix_store.exceptions import (
    ConflictError,
    InvalidPayload,
    NotSupportedOnBackend,
    SessionNotFound,
    StaleStateError,
    shown_id,
)
from helix_store.sessions.effects import End, Entered, Intent
from helix_store.sessions.messages import has_open_calls
from helix_store.sessions.state import STORE_OWNED, converted_fields, default_step_id, next_step_count
from helix_store.sessions.steps import (
    CommittedStep,
    OpenedStep,
    StagedRow,
    StepWrite,
    TurnEntry,
    are_stored,
    dropped_staging,
)


class StoreSet:
    """The stores of one database and tenant, and their common transaction."""

    is_atomic = True
    """True if several calls can be one transaction, or if the data is lost anyway when the process ends."""

    sessions: StateStore

    @property
    def locks(self) -> LockManager:
        raise NotImplementedError

    @property
    def usage(self) -> UsageStore:
        raise NotImplementedError

    @property
    def budgets(self) -> BudgetStoreBase:
        raise NotImplementedError

    @property
    def limits(self) -> Limits:
        raise NotImplementedError

    def approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, int, ApprovedCall]:
        """Return the version of a session, the asking and a call that was approved in it.

        Raises `NotApproved` and `ApprovalUsed`.
        """
        raise NotImplementedError

    def open_claims(self, state: SessionState) -> Collection[str]:
        """Return the ids of the calls whose answers in a loaded state nobody has given."""
        return ()

    @property
    def in_callers_transaction(self) -> bool:
        """True if a write becomes part of a transaction of the caller.

        Other connections cannot see these writes until that transaction is committed.
        """
        return False

    def uncommitted_write(self) -> UncommittedWrite | None:
        """Follow the open transaction of the caller for a write in it; ``None`` without one.

        With autocommit off, the write counts as lost at once, because Django does not report its outcome.
        """
        return None

    def enter_effect(self, session_id: str, intent: Intent, fencing_token: int | None) -> Entered:
        """Begin an attempt of an effect, or return what an earlier one has left."""
        raise NotImplementedError

    def end_effect(self, session_id: str, end: End, fencing_token: int | None) -> None:
        """Store the end of an attempt. Raises `ConflictError` if it was settled or repeated by then."""
        raise NotImplementedError

    def announce_unknown(self, session_id: str, effect_id: str) -> None:
        """Send `effect_unknown`."""
        raise NotImplementedError

    def require_permissions(self, entries: Mapping[str, dict[str, Any]]) -> None:
        """Raise `InvalidPayload` if a checked call needs a permission that does not exist."""

    def record_calls(self, session_id: str, entries: dict[str, Any], fencing_token: int | None) -> None:
        """Record the owner of calls, which a step has stored, on the root of its session."""
        self.sessions.add_pending_tool_calls(session_id, entries, fencing_token=fencing_token)

    def load(self, session_id: str) -> SessionState | None:
        """Return the current state of a session, whose id is valid."""
        return self.sessions.load_state(session_id)

    def enter(self, session_id: str) -> TurnEntry | None:
        """Return the data with which a turn begins, or ``None`` if the session does not exist."""
        state = self.load(session_id)
        return None if state is None else TurnEntry(state)

    def start_run(
        self, session_id: str, *, keeps_status: bool = False, **guard: Any
    ) -> tuple[Run, str | None]:
        """Start a run as the state store does; return it and the id of the run that it has superseded.

        With ``keeps_status``, the status of the session stays as it is. Only a store with budgets needs that.
        """
        return self.sessions.start_run(session_id, **guard), None

    def end_run(self, session_id: str, run_id: str, *, refused: Amounts | None, **update: Any) -> None:
        """End a run as `update_run` does, and store what a budget has refused it."""
        self.sessions.update_run(session_id, run_id, **update)

    def open_step(
        self, session_id: str, step_id: str | None, run_id: str | None, *, is_capped: bool
    ) -> OpenedStep | None:
        """Return the data with which a step begins, or ``None`` if the session does not exist.

        ``step_id`` may be the default id.
        """
        state = self.sessions.load_state(session_id)
        if state is None:
            return None
        interrupt = None if run_id is None else self.sessions.check_interrupt(session_id, run_id=run_id)
        step_id = step_id or default_step_id(next_step_count(state))
        staged = self.sessions.get_staged_changes(session_id, step_id)
        return OpenedStep(state, bool(staged), interrupt)

    def stage(self, session_id: str, step_id: str, changes: StagedChanges) -> StagedRow | None:
        """Stage a change, and return its row if the step can promote the row without reading it."""
        self.sessions.stage_changes(session_id, step_id, changes)
        return None

    def commit_step(self, step: StepWrite) -> CommittedStep:
        """Commit a step and the calls that belong to it, in one transaction if the store supports it.

        Raises `ConflictError` if any change that the step staged no longer exists.
        """
        raise NotImplementedError


class HasStoreSet:
    """A store that belongs to the stores of its database and tenant."""

    @property
    def _stores(self) -> StoreSet:
        """The stores of the same database and tenant."""
        raise NotImplementedError


class ThirdPartyStore(StoreSet):
    """A state store that only has the calls of the contract.

    A process can be killed between two calls. A call made before a step must be valid or have no effect
    without the step; a call made after it must be repeatable from the stored data.
    """

    is_atomic = False

    def __init__(self, sessions: StateStore) -> None:
        require_state_store(sessions)
        self.sessions = sessions

    @property
    def locks(self) -> LockManager:
        raise self._has_no("locks", "lock manager")

    @property
    def usage(self) -> UsageStore:
        raise self._has_no("usage", "usage store")

    @property
    def budgets(self) -> NoReturn:
        raise NotSupportedOnBackend(f"A {type(self.sessions).__name__} has no budgets.")

    @property
    def limits(self) -> Limits:
        limits = getattr(self.sessions, "limits", None)
        return limits if isinstance(limits, Limits) else conf.limits()

    def approved_call(self, session_id: str, tool_call_id: str) -> NoReturn:
        raise NotSupportedOnBackend(f"A {type(self.sessions).__name__} does not keep approvals.")

    def enter_effect(self, session_id: str, intent: Intent, fencing_token: int | None) -> NoReturn:
        raise NotSupportedOnBackend(f"A {type(self.sessions).__name__} has no effects.")

    def commit_step(self, step: StepWrite) -> CommittedStep:
        if step.record is not None:
            # A third-party store has no transaction in which the step and its usage could be one write.
            step.record(None)
        return replace(step, record=None).written_by(self._save)

    def _save(self, step: StepWrite) -> CommittedStep:
        """Promote staged changes here: the store could also do this, but it would not return them.

        If this process removes them, nobody else has removed them in the meantime.
        """
        # Only the calls of the contract are made, and none of them looks up an operation alone.
        step.check_refusal()
        store, session_id, step_id = self.sessions, step.session_id, step.info.step_id
        state = step.state
        staged = store.get_staged_changes(session_id, step_id)
        if not are_stored(step.staged or {}, staged):
            raise dropped_staging(step_id)
        if staged:
            state = copy.copy(state)
            state.custom_state = with_staged(state.custom_state, staged, limits=self.limits)
            if store.discard_staging(session_id, step_id) != len(staged):
                raise dropped_staging(step_id)
        commit = store.save_state_and_promote_staging(
            session_id,
            state,
            step.messages,
            step.info,
            expected_version=step.expected_version,
            fencing_token=step.fencing_token,
            operation_id=step.operation_id,
            run_id=step.run_id,
        )
        return commit, {**converted_fields(state), "custom_state": state.custom_state}

    def _has_no(self, argument: str, part: str) -> InvalidPayload:
        reason = f"a {type(self.sessions).__name__} has no {part} of its kind; give the call a {part}"
        return InvalidPayload(path=argument, reason=reason)


def require_manager(manager: object, argument: str, call: str) -> None:
    """Raise `InvalidPayload` for an argument that is no object with this call."""
    if not callable(getattr(manager, call, None)):
        reason = f"expected an object with {call}(), got {type(manager).__name__}; by default, leave it out"
        raise InvalidPayload(path=argument, reason=reason)


_FIRST_PAUSE_SECONDS: Final = 0.01
_LOOK_BACK: Final = 20


class _OpenStep(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def loaded_state(self) -> SessionState | None: ...


class _OpenTurn(Protocol):
    def _announces(self, effect_id: str) -> bool:
        """Announce an unknown effect after the run has ended. Return ``False`` if the turn was left."""


class NotCopied:
    """A base class of objects that cannot be copied or pickled, unless they say how to copy them."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} cannot be copied or pickled; pass the session id and the fencing "
            "token, and open another handle with store.session()."
        )


class SessionHandleBase(NotCopied):
    """The calls of a handle on a session, except those that open steps, turns and effects."""

    def __init__(
        self, store: StateStore | HasStoreSet, session_id: str, fencing_token: int | None = None
    ) -> None:
        if isinstance(store, StoreSet):
            self._stores: StoreSet = store
        else:
            self._stores = store._stores if isinstance(store, HasStoreSet) else ThirdPartyStore(store)
        self.store: Final = self._stores.sessions
        self.id: Final = validation.identifier(session_id, "session_id")
        if fencing_token is not None:
            validation.whole_number(fencing_token, "fencing_token")
        self.fencing_token: Final = fencing_token
        self._has_posts: Final = hasattr(self.store, "receive_posts")
        self._open_step: _OpenStep | None = None
        self._open_turn: _OpenTurn | None = None
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r}>"

    # Django copies what a `TestCase` keeps in `setUpTestData` for each test.

    def __copy__(self) -> Self:
        """Return another handle on the same session, with the same stores and without an open step."""
        return type(self)(self.store, self.id, self.fencing_token)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)

    # Reading

    def load(self) -> SessionState:
        """Return the current state. Raises `SessionNotFound`."""
        state = self._stores.load(self.id)
        if state is None:
            raise SessionNotFound(self.id)
        return state

    def messages(self, last: int | None = None) -> list[Message]:
        """Return all messages, or the ``last`` ones, oldest first. Raises `SessionNotFound`."""
        if last is None:
            return self.store.get_messages(self.id).messages
        validation.query_number(last, "last", minimum=1)
        return self.store.get_messages(self.id, limit=last, order="desc").messages[::-1]

    def checkpoints(self, *, limit: int = 20, cursor: str | None = None) -> CheckpointPage:
        """List the heads of checkpoints, newest first."""
        return self.store.list_checkpoints(self.id, limit=limit, cursor=cursor)

    def usage(self, tree: bool = False, *, usage: UsageStore | None = None) -> UsageRollup | None:
        """Return the session's usage, and with ``tree`` also that of its sub-agents.

        By default, ``usage`` is the usage store of the same database and tenant.
        """
        if usage is not None:
            require_manager(usage, "usage", "get_rollup")
        validation.flag(tree, "tree")
        ledger = self._stores.usage if usage is None else usage
        return ledger.get_rollup(self.id, include_sub_agents=tree)

    # Writing

    def say(self, *messages: AnyMessage) -> int:
        """Append messages outside a step, all or nothing, and return the new message count."""
        self._require_no_step("say")
        return self.store.append_messages(self.id, list(messages), fencing_token=self.fencing_token)

    def post(
        self,
        message: AnyMessage,
        *,
        key: str | None = None,
        author: UserId | ActingUser | None = None,
        not_before: Timestamp | None = None,
    ) -> Post:
        """Post a message, which the next commit of a turn receives: `post_message` of the store."""
        return self._post_store().post_message(
            self.id, message, key=key, author=author, not_before=not_before
        )

    def posts(
        self, *, states: Collection[str] = ("waiting",), limit: int = 50, cursor: str | None = None
    ) -> PostPage:
        """Return a page of the session's posts in these states."""
        return self._post_store().list_posts(self.id, states=states, limit=limit, cursor=cursor)

    def _receive(self, state: SessionState, fencing_token: int | None) -> list[Message]:
        """Receive due posts on top of a state that was just loaded, unless tool calls are open."""
        if has_open_calls(self._history_backwards(state.message_count)):
            return []
        return self._post_store().receive_posts(
            self.id, expected_version=state.version, fencing_token=fencing_token
        )

    def _history_backwards(self, count: int) -> Iterator[Message]:
        for offset in range(0, count, _LOOK_BACK):
            page = self.store.get_messages(self.id, offset=offset, limit=_LOOK_BACK, order="desc")
            yield from page.messages

    def _post_store(self) -> PostStore:
        if not self._has_posts:
            raise NotSupportedOnBackend(f"A {type(self.store).__name__} has no posts.")
        return cast(PostStore, self.store)

    def update(self, change: Callable[[SessionState], object], *, attempts: int = 5) -> SessionState:
        """Load the state, call ``change`` to modify it in place, save it, and return it with its new version.

        If another writer has changed the session since it was loaded, it is loaded again after a short pause;
        the last attempt raises its `StaleStateError`. If ``change`` raises, nothing is saved.
        """
        _require_function(change)
        for pause in _pauses(attempts):
            try:
                return self._changed(change)
            except StaleStateError:
                time.sleep(pause)
        return self._changed(change)

    async def aupdate(self, change: Callable[[SessionState], object], *, attempts: int = 5) -> SessionState:
        """Async version of `update`."""
        _require_function(change)
        # This is not an `async_twin`: a pause in the shared thread would block the writer it waits for.
        for pause in _pauses(attempts):
            try:
                return await in_thread_to_the_end(lambda: self._changed(change))
            except StaleStateError:
                await asyncio.sleep(pause)
        return await in_thread_to_the_end(lambda: self._changed(change))

    def _changed(self, change: Callable[[SessionState], object]) -> SessionState:
        self._require_no_step("update")
        state = self.load()
        owned = {name: getattr(state, name) for name in STORE_OWNED}
        mode = state.mode
        change(state)
        version = self.store.save_state(
            self.id, state, expected_version=owned["version"], fencing_token=self.fencing_token
        )
        for name, value in {**owned, **converted_fields(state), "version": version}.items():
            setattr(state, name, value)
        state.mode = state.mode or mode
        return state

    def branch(
        self,
        checkpoint_id: str | None = None,
        *,
        new_session_id: str | None = None,
        message_index: int | None = None,
        title: str | None = None,
    ) -> Self:
        """Start a new session from this one as `branch_session` does, and return a handle on it.

        The handle has no fencing token.
        """
        state = self.store.branch_session(
            self.id, checkpoint_id, new_session_id=new_session_id, message_index=message_index, title=title
        )
        return type(self)(self.store, state.session_id)

    def rewind(self, checkpoint_id: str, *, expected_version: int | None = None) -> int:
        """Restore state and messages from a checkpoint, and return the new version."""
        return self.store.restore_checkpoint(
            self.id, checkpoint_id, expected_version=expected_version, fencing_token=self.fencing_token
        )

    def delete(self, *, keep_usage: bool = False) -> int:
        """Delete the session with its local descendants, and return the number of sessions deleted."""
        return self.store.delete_session(self.id, keep_usage=keep_usage)

    aload = async_twin(load)
    amessages = async_twin(messages)
    acheckpoints = async_twin(checkpoints)
    ausage = async_twin(usage)
    asay = async_twin(say)
    apost = async_twin(post)
    aposts = async_twin(posts)
    abranch = async_twin(branch)
    arewind = async_twin(rewind)
    adelete = async_twin(delete)

    # For steps

    def _begin(self, step: _OpenStep) -> None:
        with self._mutex:
            if self._open_step is not None:
                raise ConflictError(
                    f"The step {shown_id(self._open_step.id or 'that begins')} of this session is open; "
                    "leave it before you begin another one."
                )
            self._open_step = step

    def _end(self, step: _OpenStep) -> None:
        with self._mutex:
            if self._open_step is step:
                self._open_step = None

    def _require_no_step(self, call: str) -> None:
        if self._open_step is not None:
            raise ConflictError(
                f"A step of this session is open, and {call}() would make it stale; write in the step."
            )


def _require_function(change: object) -> None:
    if not callable(change) or iscoroutinefunction(change):
        reason = "expected a function of the state, and no coroutine function"
        raise InvalidPayload(path="change", reason=reason)


def _pauses(attempts: int) -> Iterator[float]:
    """Yield the seconds to wait after each attempt except the last, growing and with random jitter."""
    validation.whole_number(attempts, "attempts", minimum=1)
    for attempt in range(attempts - 1):
        yield random.uniform(0, _FIRST_PAUSE_SECONDS * 2**attempt)  # noqa: S311  jitter, not a secret
