"""The base of the suite: `make_store`, and the hooks that a back end may provide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.limits import Limits
from helix_store.exceptions import HelixStoreError
from helix_store.testing.base import SuiteTests
from helix_store.testing.state_store.samples import contents, full_session

__all__ = ["Contents", "HeldLock", "LockManager", "StoreTests"]

T = TypeVar("T")

Contents = dict[str, str]
"""What `contents` returns."""


class HeldLock(Protocol):
    """The part of an acquired lock that the suite uses."""

    @property
    def fencing_token(self) -> int: ...

    def release(self) -> bool: ...


class LockManager(Protocol):
    """The part of a lock manager that the suite uses."""

    def acquire(self, name: str) -> HeldLock | None: ...


class StoreTests(SuiteTests):
    """The base class of every part. A subclass provides `make_store` and, where it can, the other hooks."""

    def make_store(self, *, tenant: str = "", limits: Limits | None = None) -> StateStore:
        """Return a store to test. Stores of one test share their storage; tests share nothing."""
        raise NotImplementedError("Provide make_store() to run the suite.")

    def make_lock_manager(self, *, tenant: str = "") -> LockManager | None:
        """Return the lock manager whose tokens the store checks. ``None`` skips the tests of fencing."""
        return None

    @pytest.fixture
    def store(self) -> StateStore:
        return self.make_store()

    @pytest.fixture
    def session_id(self, store: StateStore) -> str:
        """Create an empty session and return its id."""
        return store.create_session(agent_type="agent").session_id

    @pytest.fixture
    def stored(self, store: StateStore) -> StateStore:
        """Return the store with a session ``session`` that has every kind of data."""
        full_session(store, "session")
        return store

    @pytest.fixture
    def before(self, stored: StateStore) -> Contents:
        """Return what is stored for the session of `stored`, before the test."""
        return contents(stored, "session")

    def at_once(self, *calls: Callable[[], T]) -> list[T | HelixStoreError]:  # type: ignore[override]
        """Make calls at the same time, each in its own thread, and return results or errors in order."""

        def outcome(call: Callable[[], T]) -> T | HelixStoreError:
            try:
                return call()
            except HelixStoreError as exc:
                return exc

        return super().at_once(*(partial(outcome, call) for call in calls))
