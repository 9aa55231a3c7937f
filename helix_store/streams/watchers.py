"""Readers that wait for a change, and the mechanism by which any thread wakes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from helix_store.streams.rules import StreamHead

R = TypeVar("R")


class Watch:
    """A handle with which one reader in one event loop reads a stream and waits for changes. The reader must
    close it.

    ``run`` executes the query of a key. ``interval`` is the time between two polls, in seconds; ``seen`` is
    the head that the reader has seen.
    """

    def __init__(
        self,
        watches: Watches,
        run: Callable[[tuple[object, ...], Callable[[], Any]], Awaitable[Any]],
        interval: float = 0.0,
    ) -> None:
        self.interval = interval
        self.seen: StreamHead | None = None
        self._watches = watches
        self._run = run
        self._key: int | None = None
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    async def read(self, query: Callable[[], R], key: tuple[object, ...]) -> R:
        """Run a query. Readers that wait for a query with the same key may share its result."""
        # It is cleared before the query, so that the reader does not miss a later change.
        self._event.clear()
        result: R = await self._run(key, query)
        return result

    async def changed(self, seen: StreamHead, timeout: float | None) -> bool:  # noqa: ASYNC109  it ends the wait, not the reader
        """Wait until the stream may differ from ``seen``; return ``False`` after the timeout, in seconds."""
        self.seen = seen
        if self._key is None:
            self._key = seen.identity[0]
            self._watches.add(self._key, self)
            # No change has woken the reader so far, so it reads once more.
            return True
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """It can be called from any thread."""
        if self._event.is_set():
            return
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            # The loop was closed before the reader, which can no longer run.
            return

    def close(self) -> None:
        if self._key is not None:
            self._watches.remove(self._key, self)
            self._key = None


class Watches:
    """The watches of readers by the key of their stream. It can be used from any thread."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_key: dict[int, set[Watch]] = {}

    def add(self, key: int, watch: Watch) -> None:
        with self._mutex:
            self._by_key.setdefault(key, set()).add(watch)

    def remove(self, key: int, watch: Watch) -> None:
        with self._mutex:
            watches = self._by_key.get(key, set())
            watches.discard(watch)
            if not watches:
                self._by_key.pop(key, None)

    def of(self, key: int) -> list[Watch]:
        with self._mutex:
            return list(self._by_key.get(key, ()))

    def keys(self) -> list[int]:
        with self._mutex:
            return list(self._by_key)

    def wake(self, key: int) -> None:
        for watch in self.of(key):
            watch.wake()

    def wake_all(self) -> None:
        for key in self.keys():
            self.wake(key)
