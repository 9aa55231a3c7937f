"""Readers that wait, and those who wake them from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Watcher", "Watchers"]

K = TypeVar("K", bound=Hashable)


class Watcher:
    """One reader of one event loop. Arm it before reading: what comes later is then never missed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def arm(self) -> None:
        self._event.clear()

    async def woken(self, timeout: float | None) -> bool:  # noqa: ASYNC109  it ends the wait, not the reader
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """Callable from any thread."""
        if self._event.is_set():
            return
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            # The loop was closed under the reader: nobody is left to be woken.
            return


class Watchers(Generic[K]):
    """Watchers by what they watch."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_key: dict[K, set[Watcher]] = {}

    def add(self, key: K, watcher: Watcher) -> None:
        with self._mutex:
            self._by_key.setdefault(key, set()).add(watcher)

    def remove(self, key: K, watcher: Watcher) -> None:
        with self._mutex:
            watchers = self._by_key.get(key, set())
            watchers.discard(watcher)
            if not watchers:
                self._by_key.pop(key, None)

    def of(self, key: K) -> list[Watcher]:
        with self._mutex:
            return list(self._by_key.get(key, ()))

    def watched(self) -> list[K]:
        with self._mutex:
            return list(self._by_key)

    def wake(self, key: K) -> None:
        for watcher in self.of(key):
            watcher.wake()
