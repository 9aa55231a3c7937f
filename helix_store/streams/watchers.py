"""Readers that wait for a change, and the means by which any thread wakes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Watcher", "Watchers"]

K = TypeVar("K", bound=Hashable)
W = TypeVar("W", bound="Watcher")


class Watcher:
    """One reader in one event loop. Arm it before reading, so that it does not miss a later change."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def arm(self) -> None:
        self._event.clear()

    async def wait(self, timeout: float | None) -> bool:  # noqa: ASYNC109  it ends the wait, not the reader
        """Wait until `wake`; return ``False`` after the timeout, in seconds."""
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
            # The loop was closed before the reader, which can no longer run.
            return


class Watchers(Generic[K, W]):
    """Watchers by the key of their stream. Callable from any thread."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_key: dict[K, set[W]] = {}

    def add(self, key: K, watcher: W) -> None:
        with self._mutex:
            self._by_key.setdefault(key, set()).add(watcher)

    def remove(self, key: K, watcher: W) -> None:
        with self._mutex:
            watchers = self._by_key.get(key, set())
            watchers.discard(watcher)
            if not watchers:
                self._by_key.pop(key, None)

    def of(self, key: K) -> list[W]:
        with self._mutex:
            return list(self._by_key.get(key, ()))

    def keys(self) -> list[K]:
        with self._mutex:
            return list(self._by_key)

    def wake(self, key: K) -> None:
        for watcher in self.of(key):
            watcher.wake()

    def wake_all(self) -> None:
        for key in self.keys():
            self.wake(key)
