"""The lock managers, the locks that they return, and the thread that keeps a lock alive."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from types import TracebackType
from typing import Final

from django.db import connections

from helix_store import conf
from helix_store.core import validation
from helix_store.core.locks import LockInfo
from helix_store.core.moments import as_utc
from helix_store.core.types import Duration
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import HelixStoreError, LockLostError, StoreBusy
from helix_store.locks.database import DatabaseLocks
from helix_store.locks.memory import MemoryLocks, NoOpLocks
from helix_store.locks.rules import Term, process_owner, retry_pauses, ttl_milliseconds

LockBackend = DatabaseLocks | MemoryLocks | NoOpLocks

_RULES: Final[dict[str, validation.Rule]] = {"name": validation.identifier, "owner": validation.identifier}
_HELD: Final = "The lock was held until the timeout; try again later."

_BEATS_PER_TERM: Final = 3
_BEATS_PER_TERM_AFTER_A_FAILURE: Final = 10
_LONGEST_STOP_SECONDS: Final = 5.0
"""The longest wait in `stop`, because a refresh may wait for a row that the stopping thread has locked."""

_TRUSTED_PART: Final = 0.9
"""The last tenth of a term is a margin for clocks that differ in speed and for the holder's reaction."""

_NEVER: Final = float("-inf")

_logger = logging.getLogger(__name__)


class LockManagerBase:
    """The lock manager of the contract; subclasses provide the back end.

    Names are unique within ``tenant``. ``default_ttl_ms`` is the TTL for calls without a ``ttl_ms``, by
    default ``HELIX_STORE["DEFAULT_LOCK_TTL_MS"]``.
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

        It joins the caller's transaction: others see the term only after the commit. Inside the caller's
        transaction, the session row of that name is locked before the lock row, as in every guarded write;
        the call returns ``None`` if that row is busy. It never waits for a holder, a contender or a session.
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
        """End the term of the current holder and begin a new one, for a worker that replaces another. This is
        one statement, so no one can acquire the name in between, and later guarded writes of the former
        holder are refused. While a guarded write is running, the call retries after jittered pauses. Raises
        `StoreBusy` if a guarded write is still running after ``timeout_ms``, and `InvalidPayload`. The call
        is not idempotent: a repeat ends the term of the first call.
        """
        for pause in retry_pauses(validation.milliseconds(timeout_ms, "timeout_ms")):
            if lock := self._begin(self._backend.take_over, name, ttl_ms, owner):
                return lock
            time.sleep(pause)
        raise StoreBusy(_HELD)

    def wait_acquire(
        self, name: str, *, timeout_ms: Duration, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> Lock:
        """Acquire a lock; while it is held, retry after jittered pauses.

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
        # This is not an `async_twin`: pauses in the shared thread would block the holder's release.
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
        # This is not an `async_twin`: pauses in the shared thread would block the guarded write.
        for pause in retry_pauses(validation.milliseconds(timeout_ms, "timeout_ms")):
            if lock := await self._abegin(self._backend.take_over, name, ttl_ms, owner):
                return lock
            await asyncio.sleep(pause)
        raise StoreBusy(_HELD)

    def is_locked(self, name: str) -> bool:
        """Return whether the lock is held now."""
        return self._backend.is_locked(validation.identifier(name, "name"))

    def get_active_locks(self) -> list[LockInfo]:
        """Return the locks of the tenant that are currently held, ordered by name."""
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


class KeepAlive(AbstractContextManager["KeepAlive"]):
    """A thread that refreshes one lock; leaving it as a context manager stops it.

    The thread ends when the lock is lost. While the database cannot be reached, it keeps trying, and the
    lock's trust window runs out.
    """

    def __init__(self, refresh: Callable[[], object], ttl_ms: Callable[[], int], *, name: str) -> None:
        self._refresh = refresh
        self._ttl_ms = ttl_ms
        self._name = name
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="helix_store keep-alive", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """True while the lock is refreshed: until it is lost or `stop` is called."""
        return not self._stopped.is_set() and self._thread.is_alive()

    def stop(self) -> None:
        """Stop refreshing; the lock stays held for the rest of its term. Safe to repeat."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LONGEST_STOP_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _beat(self) -> None:
        beats = _BEATS_PER_TERM
        while not self._stopped.wait(self._ttl_ms() / 1000 / beats):
            try:
                self._refresh()
            except LockLostError:
                _logger.warning("The lock %r was lost; its keep-alive ends.", self._name)
                return
            except HelixStoreError as exc:
                _logger.warning("The lock %r was not refreshed (%s); trying again.", self._name, exc.code)
                beats = _BEATS_PER_TERM_AFTER_A_FAILURE
            else:
                beats = _BEATS_PER_TERM
            finally:
                # If each lock kept a connection open between two refreshes, they would exhaust the server.
                connections.close_all()


def trust_ends(requested_at: float, ttl_ms: int) -> float:
    """Return the end of the trust window in seconds, on the clock of ``requested_at``.

    The window starts before the request is sent. The database starts the term later than that, so the term
    also ends later, even after a slow reply.
    """
    return requested_at + _TRUSTED_PART * ttl_ms / 1000


class Lock(AbstractContextManager["Lock"], AbstractAsyncContextManager["Lock"]):
    """An acquired lock; leaving it as a context manager releases it.

    Pass ``fencing_token`` to every write that the lock protects: the token stops a former holder that does
    not know that its term is over. Threads may share a lock. Source: the lock manager of the PostgreSQL store
    document.
    """

    def __init__(
        self, backend: LockBackend, name: str, owner: str, term: Term, *, ttl_ms: int, requested_at: float
    ) -> None:
        self._backend = backend
        self.name: Final = name
        self.owner: Final = owner
        self.fencing_token: Final = term.fencing_token
        self._expires_at = term.expires_at
        self.ttl_ms = ttl_ms
        """The TTL of the last successful request, in milliseconds."""
        self._trusted_until = trust_ends(requested_at, ttl_ms)
        self._changes = 0
        self._mutex = threading.Lock()
        self._keep_alive: KeepAlive | None = None

    def __repr__(self) -> str:
        return f"<Lock {self.name!r} token {self.fencing_token} of {self.owner!r}>"

    @property
    def expires_at(self) -> datetime:
        """The end of the term on the database's clock; a worker should check `is_trusted` instead."""
        return as_utc(self._expires_at)

    def is_trusted(self) -> bool:
        """Return whether the term is certain to be active, without querying the database. It is true until
        nine tenths of the TTL have passed on this process's monotonic clock since the last successful request
        was sent. It is always false after `release` or a `LockLostError`.
        """
        return time.monotonic() < self._trusted_until

    def refresh(self, ttl_ms: Duration | None = None) -> datetime:
        """Restart the TTL, or start a different one, and return the new end of the term.

        One statement, which joins the caller's transaction. Preferably call this outside of a transaction,
        because a rollback undoes the new end but not the trust window. Raises `LockLostError` if the term was
        released, has expired or was taken over. Safe to repeat.
        """
        ttl_ms = self.ttl_ms if ttl_ms is None else ttl_milliseconds(ttl_ms, "ttl_ms")
        changes, requested_at = self._changes, time.monotonic()
        expires_at = self._backend.refresh(
            self.name, owner=self.owner, fencing_token=self.fencing_token, ttl_ms=ttl_ms
        )
        if expires_at is None:
            self._end_trust()
            raise LockLostError(name=self.name, fencing_token=self.fencing_token)
        with self._mutex:
            trusted_until = trust_ends(requested_at, ttl_ms)
            if self._changes != changes:
                # Another request was answered in the meantime. The order in which the database ran them is
                # unknown.
                trusted_until = min(trusted_until, self._trusted_until)
            self._changes += 1
            self._trusted_until = trusted_until
            self._expires_at = expires_at
            self.ttl_ms = ttl_ms
        return expires_at

    def release(self) -> bool:
        """End the term and its keep-alive; return ``False`` if the term is already over.

        One statement, which joins the caller's transaction. Safe to repeat: a former holder cannot release
        anything.
        """
        if self._keep_alive is not None:
            self._keep_alive.stop()
        self._end_trust()
        return self._backend.release(self.name, owner=self.owner, fencing_token=self.fencing_token)

    def keep_alive(self) -> KeepAlive:
        """Refresh the lock from a thread until `release` is called or the returned keep-alive is stopped.

        A second call returns the running keep-alive. The thread has a separate connection: start it after
        the commit of the transaction in which the lock was acquired.
        """
        with self._mutex:
            if self._keep_alive is None or not self._keep_alive.is_running():
                self._keep_alive = KeepAlive(self.refresh, lambda: self.ttl_ms, name=self.name)
            return self._keep_alive

    arefresh = async_twin(refresh)
    arelease = async_twin(release)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.arelease()

    def _end_trust(self) -> None:
        with self._mutex:
            self._changes += 1
            self._trusted_until = _NEVER


class DatabaseLockManager(LockManagerBase):
    """Locks in a Django database, shared by every process that uses it.

    Pass the ``using`` and ``tenant`` of the stores that the locks protect: a guarded write compares its token
    with the lock in that database and tenant. Each name has one row, which is never deleted, so tokens only
    grow. Works through PgBouncer in transaction mode.

    Inside an ``atomic()`` block, `acquire` first locks the row of the session with the same name, without
    waiting. It returns ``None`` while another transaction writes to that session, just as for a held name.
    """

    def __init__(
        self, using: str | None = None, *, tenant: str = "", default_ttl_ms: Duration | None = None
    ) -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), None)
        super().__init__(DatabaseLocks(db), tenant=db.tenant, default_ttl_ms=default_ttl_ms)


class InMemoryLockManager(LockManagerBase):
    """Locks in one process, with the same contract as locks in the database; for tests and experiments.

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
    any real locks that a store knows.
    """

    def __init__(self, *, tenant: str = "", default_ttl_ms: Duration | None = None) -> None:
        super().__init__(NoOpLocks(), tenant=validation.tenant(tenant), default_ttl_ms=default_ttl_ms)
