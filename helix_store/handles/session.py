"""A handle on one session: its id and its fence are said once."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from helix_store.core import validation
from helix_store.core.contracts import StateStore, UsageStore, require_state_store
from helix_store.core.dicts import AnyMessage
from helix_store.core.guards import guard
from helix_store.core.manager_contracts import LockManager
from helix_store.core.types import CheckpointPage, Duration, Message, SessionState
from helix_store.core.usage import UsageRollup
from helix_store.engine.async_twins import async_twin, in_thread_to_the_end
from helix_store.exceptions import ConflictError, SessionNotFound, StaleStateError, shown_id
from helix_store.handles import kinds
from helix_store.handles.step import Step
from helix_store.handles.turn import Turn

__all__ = ["SessionHandle"]

_FIRST_PAUSE_SECONDS: Final = 0.01


class SessionHandle:
    """One session of a store. A handle sends no query before its first call, and reads nothing ahead.

    Every call that writes carries ``fencing_token``. The store is a `StateStore`, of this package or of a
    third party: the handle makes its public calls only.
    """

    def __init__(self, store: StateStore, session_id: str, fencing_token: int | None = None) -> None:
        require_state_store(store)
        self._store = store
        self._id = validation.identifier(session_id, "session_id")
        self._fencing_token = guard(fencing_token=fencing_token).fencing_token
        self._open_step: Step | None = None
        self._mutex = threading.Lock()

    @property
    def id(self) -> str:
        return self._id

    @property
    def store(self) -> StateStore:
        return self._store

    @property
    def fencing_token(self) -> int | None:
        return self._fencing_token

    def __repr__(self) -> str:
        return f"<SessionHandle {self._id!r}>"

    # Reading

    def load(self) -> SessionState:
        """The current state. Raises `SessionNotFound`."""
        state = self._store.load_state(self._id)
        if state is None:
            raise SessionNotFound(self._id)
        return state

    def messages(self, last: int | None = None) -> list[Message]:
        """All messages, or the ``last`` ones, oldest first. Raises `SessionNotFound`."""
        if last is None:
            return self._store.get_messages(self._id).messages
        validation.query_number(last, "last", minimum=1)
        return self._store.get_messages(self._id, limit=last, order="desc").messages[::-1]

    def checkpoints(self, *, limit: int = 20, cursor: str | None = None) -> CheckpointPage:
        """Heads of checkpoints, newest first."""
        return self._store.list_checkpoints(self._id, limit=limit, cursor=cursor)

    def usage(self, tree: bool = False, *, usage: UsageStore | None = None) -> UsageRollup | None:
        """What the session has spent, and with ``tree`` its sub-agents.

        ``usage`` is by default the usage store of the store's kind, database and tenant.
        """
        ledger = kinds.usage_of(self._store) if usage is None else usage
        return ledger.get_rollup(self._id, include_sub_agents=tree)

    # Writing

    def say(self, *messages: AnyMessage) -> int:
        """Append messages outside a step, all or nothing, and return the new message count."""
        self._require_no_step("say")
        return self._store.append_messages(self._id, list(messages), fencing_token=self._fencing_token)

    def update(self, change: Callable[[SessionState], object], *, attempts: int = 5) -> SessionState:
        """Load the state, let ``change`` change it in place, save it, and return it with its new version.

        When the session was changed meanwhile it is loaded again, after a short pause; the `StaleStateError`
        of the last attempt is raised. An exception of ``change`` saves nothing.
        """
        for pause in _pauses(attempts):
            try:
                return self._changed(change)
            except StaleStateError:
                time.sleep(pause)
        return self._changed(change)

    async def aupdate(self, change: Callable[[SessionState], object], *, attempts: int = 5) -> SessionState:
        """Async version of `update`."""
        # Not an `async_twin`: a pause in the shared thread would block the writer that is waited for.
        for pause in _pauses(attempts):
            try:
                return await in_thread_to_the_end(lambda: self._changed(change))
            except StaleStateError:
                await asyncio.sleep(pause)
        return await in_thread_to_the_end(lambda: self._changed(change))

    def _changed(self, change: Callable[[SessionState], object]) -> SessionState:
        self._require_no_step("update")
        state = self.load()
        version = state.version
        change(state)
        state.version = self._store.save_state(
            self._id, state, expected_version=version, fencing_token=self._fencing_token
        )
        return state

    def branch(
        self,
        checkpoint_id: str | None = None,
        *,
        new_session_id: str | None = None,
        message_index: int | None = None,
        title: str | None = None,
    ) -> SessionState:
        """Start a new session from this one, and return its state: `branch_session` of the store."""
        return self._store.branch_session(
            self._id, checkpoint_id, new_session_id=new_session_id, message_index=message_index, title=title
        )

    def rewind(self, checkpoint_id: str, *, expected_version: int | None = None) -> int:
        """Restore state and messages from a checkpoint, and return the new version."""
        return self._store.restore_checkpoint(
            self._id, checkpoint_id, expected_version=expected_version, fencing_token=self._fencing_token
        )

    def delete(self, *, keep_usage: bool = False) -> int:
        """Delete the session with its local descendants, and return the number of sessions deleted."""
        return self._store.delete_session(self._id, keep_usage=keep_usage)

    # Working

    def step(
        self, step_id: str | None = None, *, run_id: str | None = None, operation_id: str | None = None
    ) -> Step:
        """One atomic step, for ``with`` or ``async with``. By default its id is ``step-<number>``."""
        return Step(self, step_id, run_id=run_id, operation_id=operation_id)

    def turn(
        self,
        *,
        locks: LockManager | None = None,
        owner: str | None = None,
        ttl: Duration | None = None,
        usage: UsageStore | None = None,
    ) -> Turn:
        """One worker driving the session until it ends or waits, for ``with`` or ``async with``.

        ``locks`` and ``usage`` are by default those of the store's kind, database and tenant. ``ttl`` is a
        duration or milliseconds. Entering raises `SessionBusy` while another worker drives the session.
        """
        return Turn(self, locks=locks, owner=owner, ttl=ttl, usage=usage)

    aload = async_twin(load)
    amessages = async_twin(messages)
    acheckpoints = async_twin(checkpoints)
    ausage = async_twin(usage)
    asay = async_twin(say)
    abranch = async_twin(branch)
    arewind = async_twin(rewind)
    adelete = async_twin(delete)

    # For steps

    def _begin(self, step: Step) -> None:
        with self._mutex:
            if self._open_step is not None:
                raise ConflictError(
                    f"The step {shown_id(self._open_step.id or 'that begins')} of this session is open; "
                    "leave it before you begin another one."
                )
            self._open_step = step

    def _end(self, step: Step) -> None:
        with self._mutex:
            if self._open_step is step:
                self._open_step = None

    def _require_no_step(self, call: str) -> None:
        if self._open_step is not None:
            raise ConflictError(
                f"A step of this session is open, and {call}() would make it stale; write in the step."
            )


def _pauses(attempts: int) -> Iterator[float]:
    """Seconds to wait after each attempt but the last: growing, and jittered so that writers spread out."""
    validation.whole_number(attempts, "attempts", minimum=1)
    for attempt in range(attempts - 1):
        yield random.uniform(0, _FIRST_PAUSE_SECONDS * 2**attempt)  # noqa: S311  jitter, not a secret
