"""The calls of one session that need neither a step nor a turn."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Final, Protocol, cast

from helix_store.core import validation
from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.dicts import AnyMessage
from helix_store.core.posts import Post, PostPage, PostStore
from helix_store.core.types import CheckpointPage, Message, SessionState, Timestamp, UserId
from helix_store.core.usage import UsageRollup
from helix_store.engine.async_twins import async_twin, in_thread_to_the_end
from helix_store.exceptions import (
    ConflictError,
    NotSupportedOnBackend,
    SessionNotFound,
    StaleStateError,
    shown_id,
)
from helix_store.sessions.posts import has_open_calls
from helix_store.stores.parts import HasParts, Parts, ThirdPartyStore

_FIRST_PAUSE_SECONDS: Final = 0.01
_LOOK_BACK: Final = 20


class _OpenStep(Protocol):
    @property
    def id(self) -> str: ...


class BoundSession:
    """One session of a store, whose id and fencing token need not be passed to every call."""

    def __init__(
        self, store: StateStore | HasParts, session_id: str, fencing_token: int | None = None
    ) -> None:
        if isinstance(store, Parts):
            self._parts: Parts = store
        else:
            self._parts = store._parts if isinstance(store, HasParts) else ThirdPartyStore(store)
        self.store: Final = self._parts.sessions
        self.id: Final = validation.identifier(session_id, "session_id")
        if fencing_token is not None:
            validation.whole_number(fencing_token, "fencing_token")
        self.fencing_token: Final = fencing_token
        self._has_posts: Final = hasattr(self.store, "receive_posts")
        self._open_step: _OpenStep | None = None
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id!r}>"

    # Reading

    def load(self) -> SessionState:
        """Return the current state. Raises `SessionNotFound`."""
        state = self._parts.load(self.id)
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
        ledger = self._parts.usage if usage is None else usage
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
        author: UserId | None = None,
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
        for pause in _pauses(attempts):
            try:
                return self._changed(change)
            except StaleStateError:
                time.sleep(pause)
        return self._changed(change)

    async def aupdate(self, change: Callable[[SessionState], object], *, attempts: int = 5) -> SessionState:
        """Async version of `update`."""
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
        version = state.version
        change(state)
        state.version = self.store.save_state(
            self.id, state, expected_version=version, fencing_token=self.fencing_token
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
        """Start a new session from this one as the store's `branch_session` does, and return its state."""
        return self.store.branch_session(
            self.id, checkpoint_id, new_session_id=new_session_id, message_index=message_index, title=title
        )

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


def _pauses(attempts: int) -> Iterator[float]:
    """Yield the seconds to wait after each attempt except the last, growing and with random jitter."""
    validation.whole_number(attempts, "attempts", minimum=1)
    for attempt in range(attempts - 1):
        yield random.uniform(0, _FIRST_PAUSE_SECONDS * 2**attempt)  # noqa: S311  jitter, not a secret
