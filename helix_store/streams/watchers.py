"""Readers that wait for a change, and the means by which any thread wakes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from helix_store.streams.rules import StreamHead

R = TypeVar("R")


class Watcher:
    """One reader in one event loop. Arm it before reading, so that it does not miss a later change.

    ``interval`` is the time between two polls, in seconds; ``seen`` is the head that the reader has seen.
    """

    def __init__(self, interval: float = 0.0) -> None:
        self.interval = interval
        self.seen: StreamHead | None = None
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


class Watchers:
    """Watchers by the key of their stream. Callable from any thread."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_key: dict[int, set[Watcher]] = {}

    def add(self, key: int, watcher: Watcher) -> None:
        with self._mutex:
            self._by_key.setdefault(key, set()).add(watcher)

    def remove(self, key: int, watcher: Watcher) -> None:
        with self._mutex:
            watchers = self._by_key.get(key, set())
            watchers.discard(watcher)
            if not watchers:
                self._by_key.pop(key, None)

    def of(self, key: int) -> list[Watcher]:
        with self._mutex:
            return list(self._by_key.get(key, ()))

    def keys(self) -> list[int]:
        with self._mutex:
            return list(self._by_key)

    def wake(self, key: int) -> None:
        for watcher in self.of(key):
            watcher.wake()

    def wake_all(self) -> None:
        for key in self.keys():
            self.wake(key)


class Watch:
    """A handle with which one reader reads a stream and waits for changes. The reader must close it.

    ``run`` runs the query of a key.
    """

    def __init__(
        self,
        watchers: Watchers,
        watcher: Watcher,
        run: Callable[[tuple[object, ...], Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._watchers = watchers
        self._watcher = watcher
        self._run = run
        self._key: int | None = None

    async def read(self, query: Callable[[], R], key: tuple[object, ...]) -> R:
        """Run a query. Readers that wait for a query with the same key may share its result."""
        self._watcher.arm()
        result: R = await self._run(key, query)
        return result

    async def changed(self, seen: StreamHead, timeout: float | None) -> bool:  # noqa: ASYNC109
        """Wait until the stream may differ from ``seen``; return ``False`` after the timeout, in seconds."""
        self._watcher.seen = seen
        if self._key is None:
            self._key = seen.identity[0]
            self._watchers.add(self._key, self._watcher)
            # No change has woken the reader so far, so it reads once more.
            return True
        return await self._watcher.wait(timeout)

    def close(self) -> None:
        if self._key is not None:
            self._watchers.remove(self._key, self._watcher)
            self._key = None
