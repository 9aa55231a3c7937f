"""A handle on one session, and the base of the stores that open one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from helix_store.core.budgets import Dollars
from helix_store.core.contracts import UsageStore
from helix_store.core.manager_contracts import LockManager
from helix_store.core.types import Duration, SessionState
from helix_store.engine.async_twins import async_twin
from helix_store.sessions.store import StateStoreBase
from helix_store.stores.bound import BoundSession
from helix_store.stores.parts import HasParts
from helix_store.stores.step import Step
from helix_store.stores.turn import Turn

P = ParamSpec("P")


class SessionHandle(BoundSession):
    """One session of a store. A handle sends no query before its first call, and never reads ahead.

    Every write carries ``fencing_token``. The store is any `StateStore`, from this package or a third party;
    the handle makes only its public calls.
    """

    def step(
        self, step_id: str | None = None, *, run_id: str | None = None, operation_id: str | None = None
    ) -> Step:
        """Return an atomic step for ``with`` or ``async with``. Its default id is ``step-<number>``."""
        return Step(self, step_id, run_id=run_id, operation_id=operation_id)

    def turn(
        self,
        *,
        locks: LockManager | None = None,
        owner: str | None = None,
        ttl: Duration | None = None,
        usage: UsageStore | None = None,
        receive: bool = True,
        estimate_usd: Dollars | None = None,
        estimate_tokens: int | None = None,
    ) -> Turn:
        """Return a turn for ``with`` or ``async with``: one worker drives the session until it ends or waits.

        By default, ``locks`` and ``usage`` belong to the same database and tenant. ``ttl`` is a duration or
        milliseconds. Entering raises `SessionBusy` while another worker drives the session. Entering the turn
        and each commit receive due posts, unless ``receive`` is false. Each step holds the estimates in the
        budgets that apply to the session.
        """
        return Turn(
            self,
            locks=locks,
            owner=owner,
            ttl=ttl,
            usage=usage,
            receive=receive,
            estimate_usd=estimate_usd,
            estimate_tokens=estimate_tokens,
        )


def _as_handle(
    create: Callable[Concatenate[StateStoreBase, P], SessionState],
) -> Callable[Concatenate[OpensSessions, P], SessionHandle]:
    @functools.wraps(create)
    def new_session(self: OpensSessions, /, *args: P.args, **kwargs: P.kwargs) -> SessionHandle:
        state: SessionState = getattr(self._parts.sessions, create.__name__)(*args, **kwargs)
        return self.session(state.session_id)

    new_session.__name__ = "new_session"
    new_session.__qualname__ = "OpensSessions.new_session"
    new_session.__doc__ = "Create a session as `create_session` does, and return a handle on it."
    return new_session


class OpensSessions(HasParts):
    """A store that opens handles."""

    def session(self, session_id: str, *, fencing_token: int | None = None) -> SessionHandle:
        """Return a handle on a session whose writes carry the token. Sends no query and accepts any id."""
        return SessionHandle(self, session_id, fencing_token)

    new_session = _as_handle(StateStoreBase.create_session)

    anew_session = async_twin(new_session)
