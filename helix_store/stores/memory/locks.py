"""Locks in this process alone."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from django.utils import timezone

from helix_store.core import validation
from helix_store.core.locks import LockInfo, Term
from helix_store.stores.api.locks import LockManagerBase
from helix_store.stores.memory.lock_records import StoredLock
from helix_store.stores.memory.scope import TenantScope
from helix_store.stores.memory.world import MemoryWorld

__all__ = ["InMemoryLockManager", "MemoryLocks"]

_OVER: Final = float("-inf")


class InMemoryLockManager(LockManagerBase):
    """Locks in one process, under the contract of the database's locks; for tests and trials.

    Give it the ``world`` of an `InMemoryStateStore`, and that store checks its tokens.
    """

    def __init__(
        self, *, tenant: str = "", world: MemoryWorld | None = None, default_ttl_ms: int | None = None
    ) -> None:
        tenant = validation.tenant(tenant)
        scope = TenantScope(MemoryWorld() if world is None else world, tenant=tenant, limits=None)
        self._locks = MemoryLocks(scope)
        super().__init__(self._locks, tenant=tenant, default_ttl_ms=default_ttl_ms)

    def clear(self) -> None:
        """Take every lock of the tenant from its holder; tokens keep growing. Safe to repeat."""
        for lock in self.get_active_locks():
            self.force_release(lock.name)


class MemoryLocks:
    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        with self._scope.lock:
            newest = self._stored.get(name)
            if newest is not None and newest.lasts:
                return None
            token = 1 if newest is None else newest.token + 1
            lock = self._stored[name] = StoredLock(owner, token, *_end_of_term(ttl_ms))
        return Term(lock.token, lock.expires_at)

    def refresh(self, name: str, *, owner: str, fencing_token: int, ttl_ms: int) -> datetime | None:
        with self._scope.lock:
            if not self._is_own_term(name, owner, fencing_token):
                return None
            lock = self._stored[name] = StoredLock(owner, fencing_token, *_end_of_term(ttl_ms))
        return lock.expires_at

    def release(self, name: str, *, owner: str, fencing_token: int) -> bool:
        with self._scope.lock:
            if not self._is_own_term(name, owner, fencing_token):
                return False
            self._stored[name] = replace(self._stored[name], deadline=_OVER)
        return True

    def force_release(self, name: str) -> bool:
        with self._scope.lock:
            lock = self._stored.get(name)
            if lock is None or not lock.lasts:
                return False
            self._stored[name] = replace(lock, token=lock.token + 1, deadline=_OVER)
        return True

    def is_locked(self, name: str) -> bool:
        lock = self._stored.get(name)
        return lock is not None and lock.lasts

    def active(self) -> list[LockInfo]:
        with self._scope.lock:
            stored = sorted(self._stored.items())
        return [
            LockInfo(name=name, owner=lock.owner, fencing_token=lock.token, expires_at=lock.expires_at)
            for name, lock in stored
            if lock.lasts
        ]

    @property
    def _stored(self) -> dict[str, StoredLock]:
        return self._scope.data.locks

    def _is_own_term(self, name: str, owner: str, fencing_token: int) -> bool:
        lock = self._stored.get(name)
        return lock is not None and lock.lasts and (lock.owner, lock.token) == (owner, fencing_token)


def _end_of_term(ttl_ms: int) -> tuple[datetime, float]:
    return timezone.now() + timedelta(milliseconds=ttl_ms), time.monotonic() + ttl_ms / 1000
