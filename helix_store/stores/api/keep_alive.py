"""Refreshing a lock in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from django.db import connections

from helix_store.exceptions import HelixStoreError, LockLostError

__all__ = ["KeepAlive"]

_BEATS_PER_TERM: Final = 3
_BEATS_PER_TERM_AFTER_A_FAILURE: Final = 10
_LONGEST_STOP_SECONDS: Final = 5.0
"""A refresh may wait for a row that its own stopper holds; then the thread is left to itself."""

_logger = logging.getLogger(__name__)


class KeepAlive:
    """A running thread that refreshes one lock; leaving it as a context manager stops it.

    It ends by itself when the lock is lost. A database that cannot be reached is tried again until then; the
    lock's `is_trusted` runs out meanwhile, as it should.
    """

    def __init__(self, refresh: Callable[[], object], ttl_ms: Callable[[], int], *, name: str) -> None:
        self._refresh = refresh
        self._ttl_ms = ttl_ms
        self._name = name
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="helix_store keep-alive", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """Whether the lock is still being refreshed: false once it was lost or this was stopped."""
        return not self._stopped.is_set() and self._thread.is_alive()

    def stop(self) -> None:
        """Refresh no more; the lock stays held for the rest of its term. Safe to repeat."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LONGEST_STOP_SECONDS)

    def __enter__(self) -> Self:
        return self

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
                # One connection per lock, idle between two beats, would drain the server's.
                connections.close_all()
