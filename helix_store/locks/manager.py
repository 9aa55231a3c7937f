"""The lock managers: they check arguments and return locks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Final

from helix_store import conf
from helix_store.core import validation
from helix_store.core.locks import LockInfo
from helix_store.core.types import Duration
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import StoreBusy
from helix_store.locks.database import DatabaseLocks
from helix_store.locks.lock import Lock, LockBackend
from helix_store.locks.memory import MemoryLocks, NoOpLocks
from helix_store.locks.rules import Term, process_owner, retry_pauses, ttl_milliseconds

__all__ = ["DatabaseLockManager", "InMemoryLockManager", "LockManagerBase", "NoOpLockManager"]

_RULES: Final[dict[str, validation.Rule]] = {"name": validation.identifier, "owner": validation.identifier}
_HELD: Final = "The lock was held until the timeout; try again later."


class LockManagerBase:
    """The lock manager of the contract; a subclass provides the back end.

    Names are unique within ``tenant``. ``default_ttl_ms`` is the TTL of calls without a ``ttl_ms``; its
    default is ``HELIX_STORE["DEFAULT_LOCK_TTL_MS"]``.
    """

    def __init__(self, backend: LockBackend, *, tenant: str, default_ttl_ms: Duration | None) -> None:
        self._backend = backend
        self.tenant: Final = tenant
        self._default_ttl_ms = (
            None if default_ttl_ms is None else ttl_milliseconds(default_ttl_ms, "default_ttl_ms")
        )
        self._nonce = uuid.uuid4().hex

    @property
    def default_ttl_ms(self) -> int:
        if self._default_ttl_ms is not None:
            return self._default_ttl_ms
        return ttl_milliseconds(conf.default_lock_ttl_ms(), "DEFAULT_LOCK_TTL_MS")

    def acquire(self, name: str, *, ttl_ms: Duration | None = None, owner: str | None = None) -> Lock | None:
        """Acquire a lock for one term, or return ``None`` at once if it is held, even by the same owner.

        Joins the caller's transaction: others see the term only after its commit. Inside the caller's
        transaction the session row of that name is locked before the lock row, as in every guarded write; the
        call returns ``None`` if that row is busy. It never waits for a holder, a contender or a session.
        Raises `InvalidPayload` and then stores nothing. Not idempotent: a repeat finds the name held.
        """
        return self._begin(self._backend.acquire, name, ttl_ms, owner)

    def take_over(
        self,
        name: str,
        *,
        ttl_ms: Duration | None = None,
        owner: str | None = None,
        timeout_ms: Duration = 10_000,
    ) -> Lock:
        """End the term of any holder and begin a new one, for a worker that replaces another. One statement,
        so no one can acquire the name in between, and later guarded writes of the former holder are refused.
        While a guarded write is running, the call tries again after jittered pauses. Raises `StoreBusy` if
        one is still running after ``timeout_ms``, and `InvalidPayload`. Not idempotent: a repeat ends the
        first one's term.
        """
        for pause in retry_pauses(validation.milliseconds(timeout_ms, "timeout_ms")):
            if lock := self._begin(self._backend.take_over, name, ttl_ms, owner):
                return lock
            time.sleep(pause)
        raise StoreBusy(_HELD)

    def wait_acquire(
        self, name: str, *, timeout_ms: Duration, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> Lock:
        """Acquire a lock; while it is held, try again after jittered pauses.

        Raises `StoreBusy` if it is still held after ``timeout_ms``. Waiters are not served in order.
        """
        for pause in retry_pauses(validation.milliseconds(timeout_ms, "timeout_ms")):
            if lock := self.acquire(name, ttl_ms=ttl_ms, owner=owner):
                return lock
            time.sleep(pause)
        raise StoreBusy(_HELD)

    async def await_acquire(
        self, name: str, *, timeout_ms: Duration, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> Lock:
        """Async version of `wait_acquire`."""
        # Not an `async_twin`: pauses in the shared thread would block the holder's release.
        for pause in retry_pauses(validation.milliseconds(timeout_ms, "timeout_ms")):
            if lock := await self.aacquire(name, ttl_ms=ttl_ms, owner=owner):
                return lock
            await asyncio.sleep(pause)
        raise StoreBusy(_HELD)

    async def atake_over(
        self,
        name: str,
        *,
        ttl_ms: Duration | None = None,
        owner: str | None = None,
        timeout_ms: Duration = 10_000,
    ) -> Lock:
        """Async version of `take_over`."""
        # Not an `async_twin`: pauses in the shared thread would block the guarded write.
        for pause in retry_pauses(validation.milliseconds(timeout_ms, "timeout_ms")):
            if lock := await self._abegin(self._backend.take_over, name, ttl_ms, owner):
                return lock
            await asyncio.sleep(pause)
        raise StoreBusy(_HELD)

    def is_locked(self, name: str) -> bool:
        """Return whether the lock is held now."""
        return self._backend.is_locked(validation.identifier(name, "name"))

    def get_active_locks(self) -> list[LockInfo]:
        """Return the locks of the tenant that are held now, ordered by name."""
        return self._backend.active()

    def force_release(self, name: str) -> bool:
        """End the term of the current holder; return ``False`` if the name is not held. For operators.

        One statement, which joins the caller's transaction. It increments the token, so later guarded writes
        of the former holder are refused. While a guarded write is running, the name cannot be acquired. Safe
        to repeat.
        """
        return self._backend.force_release(validation.identifier(name, "name"))

    def _begin(
        self, begin: Callable[..., Term | None], name: str, ttl_ms: Duration | None, owner: str | None
    ) -> Lock | None:
        owner = process_owner(self._nonce) if owner is None else owner
        validation.arguments(_RULES, name=name, owner=owner)
        ttl_ms = self.default_ttl_ms if ttl_ms is None else ttl_milliseconds(ttl_ms, "ttl_ms")
        requested_at = time.monotonic()
        term = begin(name, owner=owner, ttl_ms=ttl_ms)
        if term is None:
            return None
        return Lock(self._backend, name, owner, term, ttl_ms=ttl_ms, requested_at=requested_at)

    aacquire = async_twin(acquire)
    _abegin = async_twin(_begin)
    ais_locked = async_twin(is_locked)
    aget_active_locks = async_twin(get_active_locks)
    aforce_release = async_twin(force_release)


class DatabaseLockManager(LockManagerBase):
    """Locks in a Django database, shared by every process that uses it.

    Pass the ``using`` and ``tenant`` of the stores that the locks protect: a guarded write compares its token
    with the lock of that database and tenant. Each name has one row, which is never deleted, so tokens only
    grow. Works through PgBouncer in transaction mode.

    Inside an ``atomic()`` block `acquire` first locks the row of the session with that name, without waiting.
    It returns ``None`` while another transaction writes to that session, as for a held name.
    """

    def __init__(
        self, using: str | None = None, *, tenant: str = "", default_ttl_ms: Duration | None = None
    ) -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), None)
        super().__init__(DatabaseLocks(db), tenant=db.tenant, default_ttl_ms=default_ttl_ms)


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


class NoOpLockManager(LockManagerBase):
    """A manager whose calls always succeed and lock nothing; for a single worker, and for tests.

    Arguments are checked. Tokens grow with the clock of this process, so they are larger than the tokens of
    real locks that a store knows.
    """

    def __init__(self, *, tenant: str = "", default_ttl_ms: Duration | None = None) -> None:
        super().__init__(NoOpLocks(), tenant=validation.tenant(tenant), default_ttl_ms=default_ttl_ms)
