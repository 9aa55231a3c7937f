"""The in-memory back end, and the back end without locks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, Self

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.locks import LockInfo
from helix_store.engine.memory import MemoryRows, MemoryWorld
from helix_store.locks.rules import Term

_RELEASED: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class StoredLock:
    """The newest term of a name, which may be over."""

    owner: str
    token: int
    expires_at: datetime
    deadline: float
    """The end of the term on the monotonic clock, which decides; ``expires_at`` is only reported."""

    @classmethod
    def until(cls, owner: str, token: int, ttl_ms: int) -> Self:
        """Return a term that begins now."""
        expires_at = moments.now() + timedelta(milliseconds=ttl_ms)
        return cls(owner, token, expires_at, time.monotonic() + ttl_ms / 1000)

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self.deadline

    @property
    def was_released(self) -> bool:
        return self.deadline == _RELEASED

    def ended(self) -> Self:
        """Return the term after its release."""
        return replace(self, deadline=_RELEASED)


class LockTable(MemoryRows[StoredLock]):
    """The newest term of each name. It is never deleted, because the tokens of a name only grow."""

    def check_fence(self, name: str, guard: Guard) -> None:
        """Raise `FencedOutError` for a write with an older token than the newest one of this name."""
        lock = self.get(name)
        guard.check_fence(None if lock is None else lock.token)


class MemoryLocks:
    """The in-memory back end; see `DatabaseLocks` for its operations."""

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
            lock = self._stored[name] = StoredLock.until(owner, token, ttl_ms)
        return Term(lock.token, lock.expires_at)

    def refresh(self, name: str, *, owner: str, fencing_token: int, ttl_ms: int) -> datetime | None:
        with self._lock:
            if not self._is_own_term(name, owner, fencing_token):
                return None
            lock = self._stored[name] = StoredLock.until(owner, fencing_token, ttl_ms)
        return lock.expires_at

    def release(self, name: str, *, owner: str, fencing_token: int) -> bool:
        with self._lock:
            if not self._is_own_term(name, owner, fencing_token):
                return False
            self._stored[name] = self._stored[name].ended()
        return True

    def force_release(self, name: str) -> bool:
        with self._lock:
            lock = self._stored.get(name)
            if lock is None or not lock.lasts:
                return False
            self._stored[name] = replace(lock.ended(), token=lock.token + 1)
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


class NoOpLocks:
    """The back end of a manager whose calls always succeed and lock nothing."""

    _mutex = threading.Lock()
    _newest_token = 0

    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term:
        with self._mutex:
            # Microseconds since 1970, in all managers of this process.
            token = NoOpLocks._newest_token = max(NoOpLocks._newest_token + 1, time.time_ns() // 1000)
        return Term(token, moments.now() + timedelta(milliseconds=ttl_ms))

    take_over = acquire

    def refresh(self, name: str, *, owner: str, fencing_token: int, ttl_ms: int) -> datetime:
        return moments.now() + timedelta(milliseconds=ttl_ms)

    def release(self, name: str, *, owner: str, fencing_token: int) -> bool:
        return True

    def force_release(self, name: str) -> bool:
        return True

    def is_locked(self, name: str) -> bool:
        return False

    def active(self) -> list[LockInfo]:
        return []
