"""The public face of a lock manager: it checks arguments and hands out locks."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Final

from helix_store import conf
from helix_store.core import validation
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import StoreBusy
from helix_store.locks.backend import LockVerbs
from helix_store.locks.lock import Lock
from helix_store.locks.rules import (
    LockInfo,
    process_owner,
    retry_pauses,
    ttl_milliseconds,
)

__all__ = ["LockManagerBase"]

_HELD: Final = "Somebody else held the lock for all of this time; try again later."


class LockManagerBase:
    """The lock manager of the contract; a subclass brings the back end.

    Names are unique within ``tenant``. A term lasts ``default_ttl_ms`` unless a call says otherwise, by
    default ``HELIX_STORE["DEFAULT_LOCK_TTL_MS"]``.
    """

    def __init__(self, backend: LockVerbs, *, tenant: str, default_ttl_ms: int | None) -> None:
        self._backend = backend
        self._tenant = tenant
        self._default_ttl_ms = (
            None if default_ttl_ms is None else ttl_milliseconds(default_ttl_ms, "default_ttl_ms")
        )
        self._nonce = uuid.uuid4().hex

    @property
    def tenant(self) -> str:
        return self._tenant

    @property
    def default_ttl_ms(self) -> int:
        if self._default_ttl_ms is not None:
            return self._default_ttl_ms
        return ttl_milliseconds(conf.default_lock_ttl_ms(), "DEFAULT_LOCK_TTL_MS")

    def acquire(self, name: str, *, ttl_ms: int | None = None, owner: str | None = None) -> Lock | None:
        """Take a lock for a term, or return ``None`` at once when it is held, also by the same owner.

        One statement; it joins the caller's transaction, and then others see the term only after its commit.
        Never waits for another holder or contender. Raises `InvalidPayload`; nothing is stored then.
        """
        name = validation.identifier(name, "name")
        ttl_ms = self.default_ttl_ms if ttl_ms is None else ttl_milliseconds(ttl_ms)
        owner = process_owner(self._nonce) if owner is None else validation.identifier(owner, "owner")
        requested_at = time.monotonic()
        term = self._backend.acquire(name, owner=owner, ttl_ms=ttl_ms)
        if term is None:
            return None
        return Lock(self._backend, name, owner, term, ttl_ms=ttl_ms, requested_at=requested_at)

    def wait_acquire(
        self, name: str, *, timeout_ms: int, ttl_ms: int | None = None, owner: str | None = None
    ) -> Lock:
        """Take a lock, trying again after jittered pauses while it is held.

        Raises `StoreBusy` when it was held for all of ``timeout_ms``. Waiters are not served in order.
        """
        for pause in retry_pauses(validation.whole_number(timeout_ms, "timeout_ms")):
            if lock := self.acquire(name, ttl_ms=ttl_ms, owner=owner):
                return lock
            time.sleep(pause)
        return _granted(self.acquire(name, ttl_ms=ttl_ms, owner=owner))

    async def await_acquire(
        self, name: str, *, timeout_ms: int, ttl_ms: int | None = None, owner: str | None = None
    ) -> Lock:
        """Async version of `wait_acquire`."""
        # No twin: its pauses would block the thread in which the holder has to release.
        for pause in retry_pauses(validation.whole_number(timeout_ms, "timeout_ms")):
            if lock := await self.aacquire(name, ttl_ms=ttl_ms, owner=owner):
                return lock
            await asyncio.sleep(pause)
        return _granted(await self.aacquire(name, ttl_ms=ttl_ms, owner=owner))

    def is_locked(self, name: str) -> bool:
        """Whether somebody holds the lock now."""
        return self._backend.is_locked(validation.identifier(name, "name"))

    def get_active_locks(self) -> list[LockInfo]:
        """The locks of the tenant that are held now, by name."""
        return self._backend.active()

    def force_release(self, name: str) -> bool:
        """Take a lock away from whoever holds it; ``False`` when nobody does. For operators.

        One statement; it joins the caller's transaction. The name moves on to a token that nobody has, so
        that guarded writes which the former holder starts from now on are refused; one that is under way
        still keeps the next holder waiting. Safe to repeat.
        """
        return self._backend.force_release(validation.identifier(name, "name"))

    aacquire = async_twin(acquire)
    ais_locked = async_twin(is_locked)
    aget_active_locks = async_twin(get_active_locks)
    aforce_release = async_twin(force_release)


def _granted(lock: Lock | None) -> Lock:
    if lock is None:
        raise StoreBusy(_HELD)
    return lock
