"""A lock manager that locks nothing."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta
from typing import Final

from django.utils import timezone

from helix_store.core import validation
from helix_store.core.locks import LockInfo, Term
from helix_store.stores.api.locks import LockManagerBase

__all__ = ["NoOpLockManager"]


class NoOpLockManager(LockManagerBase):
    """Every call succeeds and nothing is protected: for one worker alone, and for tests of something else.

    Arguments are checked all the same. Tokens grow with the clock of this process, so that they pass in a
    store whose sessions were locked for real before.
    """

    def __init__(self, *, tenant: str = "", default_ttl_ms: int | None = None) -> None:
        super().__init__(_NoOpLocks(), tenant=validation.tenant(tenant), default_ttl_ms=default_ttl_ms)


class _NoOpLocks:
    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term:
        return Term(_TOKENS.next(), _end_of_term(ttl_ms))

    def refresh(self, name: str, *, owner: str, fencing_token: int, ttl_ms: int) -> datetime:
        return _end_of_term(ttl_ms)

    def release(self, name: str, *, owner: str, fencing_token: int) -> bool:
        return True

    def force_release(self, name: str) -> bool:
        return True

    def is_locked(self, name: str) -> bool:
        return False

    def active(self) -> list[LockInfo]:
        return []


class _Tokens:
    """Microseconds since 1970, and one more than the last where the clock has not moved on."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._last = 0

    def next(self) -> int:
        with self._mutex:
            self._last = max(self._last + 1, time.time_ns() // 1000)
            return self._last


_TOKENS: Final = _Tokens()


def _end_of_term(ttl_ms: int) -> datetime:
    return timezone.now() + timedelta(milliseconds=ttl_ms)
