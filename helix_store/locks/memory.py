"""Locks in memory, and a manager that locks nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from helix_store.core import moments, validation
from helix_store.core.guards import Guard
from helix_store.core.locks import LockInfo
from helix_store.core.types import Duration
from helix_store.engine.memory import MemoryRows, MemoryWorld
from helix_store.locks.manager import LockManagerBase
from helix_store.locks.rules import Term

__all__ = ["InMemoryLockManager", "LockTable", "MemoryLocks", "NoOpLockManager"]

_OVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class StoredLock:
    """The newest term of a name, which may be over."""

    owner: str
    token: int
    expires_at: datetime
    deadline: float
    """The end of the term on the monotonic clock, which decides; ``expires_at`` is only reported."""

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self.deadline


class LockTable(MemoryRows[StoredLock]):
    """The newest term of each name. It is never deleted, because the tokens of a name only grow."""

    def check_fence(self, name: str, guard: Guard) -> None:
        """Raise `FencedOutError` for a write with an older token than the newest one of this name."""
        lock = self.get(name)
        guard.check_fence(None if lock is None else lock.token)


class InMemoryLockManager(LockManagerBase):
    """Locks in one process with the contract of the database's locks; for tests and trials.

    An `InMemoryStateStore` with the same ``world`` checks the tokens of these locks.
    """

    def __init__(
        self, *, tenant: str = "", world: MemoryWorld | None = None, default_ttl_ms: Duration | None = None
    ) -> None:
        tenant = validation.tenant(tenant)
        self._locks = MemoryLocks(MemoryWorld() if world is None else world, tenant)
        super().__init__(self._locks, tenant=tenant, default_ttl_ms=default_ttl_ms)

    def clear(self) -> None:
        """Release every lock of the tenant; tokens keep growing. Safe to repeat."""
        for lock in self.get_active_locks():
            self.force_release(lock.name)


class MemoryLocks:
    """`LockOperations` in memory."""

    def __init__(self, world: MemoryWorld, tenant: str) -> None:
        self._lock = world.lock
        self._stored = world.table(LockTable, tenant)

    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        with self._lock:
            newest = self._stored.get(name)
            if newest is not None and newest.lasts:
                return None
            return self.take_over(name, owner=owner, ttl_ms=ttl_ms)

    def take_over(self, name: str, *, owner: str, ttl_ms: int) -> Term:
        with self._lock:
            newest = self._stored.get(name)
            token = 1 if newest is None else newest.token + 1
            lock = self._stored[name] = StoredLock(owner, token, *_end_of_term(ttl_ms))
        return Term(lock.token, lock.expires_at)

    def refresh(self, name: str, *, owner: str, fencing_token: int, ttl_ms: int) -> datetime | None:
        with self._lock:
            if not self._is_own_term(name, owner, fencing_token):
                return None
            lock = self._stored[name] = StoredLock(owner, fencing_token, *_end_of_term(ttl_ms))
        return lock.expires_at

    def release(self, name: str, *, owner: str, fencing_token: int) -> bool:
        with self._lock:
            if not self._is_own_term(name, owner, fencing_token):
                return False
            self._stored[name] = replace(self._stored[name], deadline=_OVER)
        return True

    def force_release(self, name: str) -> bool:
        with self._lock:
            lock = self._stored.get(name)
            if lock is None or not lock.lasts:
                return False
            self._stored[name] = replace(lock, token=lock.token + 1, deadline=_OVER)
        return True

    def is_locked(self, name: str) -> bool:
        lock = self._stored.get(name)
        return lock is not None and lock.lasts

    def active(self) -> list[LockInfo]:
        with self._lock:
            stored = sorted(self._stored.items())
        return [
            LockInfo(name=name, owner=lock.owner, fencing_token=lock.token, expires_at=lock.expires_at)
            for name, lock in stored
            if lock.lasts
        ]

    def _is_own_term(self, name: str, owner: str, fencing_token: int) -> bool:
        lock = self._stored.get(name)
        return lock is not None and lock.lasts and (lock.owner, lock.token) == (owner, fencing_token)


def _end_of_term(ttl_ms: int) -> tuple[datetime, float]:
    return moments.now() + timedelta(milliseconds=ttl_ms), time.monotonic() + ttl_ms / 1000


class NoOpLockManager(LockManagerBase):
    """A manager whose calls always succeed and lock nothing; for a single worker, and for tests.

    Arguments are checked. Tokens grow with the clock of this process, so they are larger than the tokens of
    real locks that a store knows.
    """

    def __init__(self, *, tenant: str = "", default_ttl_ms: Duration | None = None) -> None:
        super().__init__(_NoOpLocks(), tenant=validation.tenant(tenant), default_ttl_ms=default_ttl_ms)


class _NoOpLocks:
    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term:
        return Term(_TOKENS.next(), _end_without_storage(ttl_ms))

    take_over = acquire

    def refresh(self, name: str, *, owner: str, fencing_token: int, ttl_ms: int) -> datetime:
        return _end_without_storage(ttl_ms)

    def release(self, name: str, *, owner: str, fencing_token: int) -> bool:
        return True

    def force_release(self, name: str) -> bool:
        return True

    def is_locked(self, name: str) -> bool:
        return False

    def active(self) -> list[LockInfo]:
        return []


class _Tokens:
    """Microseconds since 1970, or the last token plus one if that is larger."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._last = 0

    def next(self) -> int:
        with self._mutex:
            self._last = max(self._last + 1, time.time_ns() // 1000)
            return self._last


_TOKENS: Final = _Tokens()


def _end_without_storage(ttl_ms: int) -> datetime:
    return moments.now() + timedelta(milliseconds=ttl_ms)
