"""What every part of the suite stands on: how a usage store is made, and the hooks it may fill in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import pytest

from helix_store.core.contracts import StateStore, UsageStore

__all__ = ["UsageTests"]

T = TypeVar("T")


class UsageTests:
    """The base of every part. A subclass provides both stores and, where it can, the other hooks."""

    def make_store(self, *, tenant: str = "") -> UsageStore:
        """A usage store to test. Stores made in one test share their storage; tests share nothing."""
        raise NotImplementedError("Provide make_store() to run the suite.")

    def make_state_store(self, *, tenant: str = "") -> StateStore:
        """The state store whose sessions spend; it shares storage with `make_store` of the same tenant."""
        raise NotImplementedError("Provide make_state_store() to run the suite.")

    def storage_untouched(self) -> AbstractContextManager[None]:
        """A context that fails when storage is read or written inside; by default nothing is watched."""
        return nullcontext()

    def leave_thread(self) -> None:
        """Called at the end of every thread that the suite starts: give back what belongs to the thread."""

    @pytest.fixture
    def usage(self, session_id: str) -> UsageStore:
        """A store without entries, which knows the session of `session_id`."""
        return self.make_store()

    @pytest.fixture
    def sessions(self) -> StateStore:
        return self.make_state_store()

    @pytest.fixture
    def session_id(self, sessions: StateStore) -> str:
        """The session ``session`` of the user ``user`` and the agent type ``agent``, with no entries."""
        return sessions.create_session("session", agent_type="agent", user_id="user").session_id

    def at_once(self, *calls: Callable[[], T]) -> list[T]:
        """Make calls at the same moment, each in a thread of its own; what each returned, in order."""
        start = threading.Barrier(len(calls))

        def outcome(call: Callable[[], T]) -> T:
            try:
                start.wait()
                return call()
            finally:
                self.leave_thread()

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(outcome, calls))
