"""The base of the suite: `make_manager`, and the hooks that a back end may provide."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from helix_store.locks import Lock, LockManagerBase
from helix_store.testing.base import SuiteTests

__all__ = ["LONG", "SHORT", "LockTests"]

LONG = 60_000
"""A TTL that does not expire during a test."""
SHORT = 20
"""A TTL that a test waits for."""

_PATIENCE_SECONDS = 30.0


class LockTests(SuiteTests):
    """The base class of every part. A subclass provides `make_manager` and, where it can, the other hooks."""

    def make_manager(self, *, tenant: str = "", default_ttl_ms: int | None = None) -> LockManagerBase:
        """Return a manager to test. Managers of one test share their locks; tests share nothing."""
        raise NotImplementedError("Provide make_manager() to run the suite.")

    @pytest.fixture
    def locks(self) -> LockManagerBase:
        return self.make_manager(default_ttl_ms=LONG)

    @staticmethod
    def acquired(locks: LockManagerBase, name: str = "name", *, ttl_ms: int = LONG) -> Lock:
        lock = locks.acquire(name, ttl_ms=ttl_ms)
        assert lock is not None, f"the lock {name!r} is held"
        return lock

    def expired(self, locks: LockManagerBase, name: str = "name") -> Lock:
        """Return a lock that has expired."""
        lock = self.acquired(locks, name, ttl_ms=SHORT)
        self.until(lambda: not locks.is_locked(name))
        return lock

    @staticmethod
    def until(condition: Callable[[], bool]) -> None:
        """Wait for a condition that time or another thread makes true."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "the condition did not become true"
            time.sleep(0.001)
