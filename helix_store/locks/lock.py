"""An acquired lock, and the thread that keeps it alive."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from types import TracebackType
from typing import Final

from django.db import connections

from helix_store.core.types import Duration
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import HelixStoreError, LockLostError
from helix_store.locks.database import DatabaseLocks
from helix_store.locks.memory import MemoryLocks, NoOpLocks
from helix_store.locks.rules import Term, ttl_milliseconds

__all__ = ["KeepAlive", "Lock", "LockBackend", "trust_ends"]

LockBackend = DatabaseLocks | MemoryLocks | NoOpLocks

_BEATS_PER_TERM: Final = 3
_BEATS_PER_TERM_AFTER_A_FAILURE: Final = 10
_LONGEST_STOP_SECONDS: Final = 5.0
"""The longest wait in `stop`: a refresh may wait for a row that the stopping thread has locked."""

_TRUSTED_PART: Final = 0.9
"""The last tenth of a term is a margin for clocks of different speeds and for the holder's reaction."""

_logger = logging.getLogger(__name__)


class KeepAlive(AbstractContextManager["KeepAlive"]):
    """A thread that refreshes one lock; leaving it as a context manager stops it.

    The thread ends when the lock is lost. While the database cannot be reached, it tries again, and the
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
                # An idle connection per lock, open between two refreshes, would exhaust the server.
                connections.close_all()


_NEVER: Final = float("-inf")


def trust_ends(requested_at: float, ttl_ms: int) -> float:
    """Return the end of the trust window in seconds, on the clock of ``requested_at``.

    The window starts before the request is sent. The database starts the term later, so the term also ends
    later, even after a slow reply.
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
        self.expires_at = term.expires_at
        """The end of the term on the database's clock; a worker should check `is_trusted` instead."""
        self.ttl_ms = ttl_ms
        """The TTL of the last successful request, in milliseconds."""
        self._trusted_until = trust_ends(requested_at, ttl_ms)
        self._changes = 0
        self._mutex = threading.Lock()
        self._keep_alive: KeepAlive | None = None

    def __repr__(self) -> str:
        return f"<Lock {self.name!r} token {self.fencing_token} of {self.owner!r}>"

    def is_trusted(self) -> bool:
        """Return whether the term is certain to be active, without querying the database. It is true until
        nine tenths of the TTL have passed on this process's monotonic clock since the last successful request
        was sent. It is always false after `release` or a `LockLostError`.
        """
        return time.monotonic() < self._trusted_until

    def refresh(self, ttl_ms: Duration | None = None) -> datetime:
        """Restart the TTL, or begin another one, and return the new end of the term.

        One statement, which joins the caller's transaction. Preferably refresh outside of a transaction,
        because a rollback undoes the new end but not the trust. Raises `LockLostError` if the term was
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
            self.expires_at = expires_at
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
        """Refresh the lock from a thread until `release` or until the returned keep-alive is stopped.

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
