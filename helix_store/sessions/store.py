"""All public calls of a state store in one class, and its door to one session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from helix_store.core.types import SessionState
from helix_store.engine.async_twins import async_twin
from helix_store.sessions.calls.checkpoints import CheckpointCalls
from helix_store.sessions.calls.messages import MessageCalls
from helix_store.sessions.calls.runs import RunCalls
from helix_store.sessions.calls.sessions import SessionCalls
from helix_store.sessions.calls.steps import StepCalls
from helix_store.sessions.calls.waiting import WaitingCalls

if TYPE_CHECKING:
    from helix_store.handles.session import SessionHandle

__all__ = ["StateStoreBase"]

P = ParamSpec("P")


def _as_handle(
    create: Callable[Concatenate[StateStoreBase, P], SessionState],
) -> Callable[Concatenate[StateStoreBase, P], SessionHandle]:
    @functools.wraps(create)
    def new_session(self: StateStoreBase, /, *args: P.args, **kwargs: P.kwargs) -> SessionHandle:
        return self.session(create(self, *args, **kwargs).session_id)

    new_session.__name__ = "new_session"
    new_session.__qualname__ = "StateStoreBase.new_session"
    new_session.__doc__ = "Create a session as `create_session` does, and return a handle on it."
    return new_session


class StateStoreBase(SessionCalls, MessageCalls, StepCalls, CheckpointCalls, RunCalls, WaitingCalls):
    """The state store of the contract; a subclass passes the back end."""

    def session(self, session_id: str, *, fencing_token: int | None = None) -> SessionHandle:
        """A handle on a session, whose writes carry the token. Sends no query, so any id has a handle."""
        # Not at the top: a handle is built on the public calls of a store, in a room above this one.
        from helix_store.handles.session import SessionHandle

        return SessionHandle(self, session_id, fencing_token)

    new_session = _as_handle(SessionCalls.create_session)

    anew_session = async_twin(new_session)
