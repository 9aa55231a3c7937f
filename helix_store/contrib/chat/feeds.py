"""The newest chunks of the threads that this process follows, once for all responses of a thread."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import Any, Final, NamedTuple, TypeVar

from django.db import close_old_connections

from helix_store import Store
from helix_store.core.payloads import decode
from helix_store.streams.manager import ResumableReader

__all__ = ["Feed", "Seen", "in_reading_thread", "open_feed"]

R = TypeVar("R")

_LONGEST: Final = 256
"""How many chunks a feed keeps. A response that is slower reads its own pages from the database."""
_PAGE: Final = 200
_SECONDS_BETWEEN_TRIES: Final = 0.05
_PAUSE_SECONDS_PER_FOLLOWER: Final = 0.0004
"""An event costs about a tenth of a millisecond for each response, and the process has other work to do."""
_LONGEST_PAUSE_SECONDS: Final = 0.12


class Seen(NamedTuple):
    sequence: int
    chunk: dict[str, Any]


class Feed:
    """One reader of a stream, and the chunks that it has read last."""

    def __init__(self, key: tuple[str, str, str], store: Store, position: int) -> None:
        self.key = key
        self.loop = asyncio.get_running_loop()
        self.followers = 0
        self._store = store
        self._floor = position
        """The buffer has every chunk after this one, up to the newest that was read."""
        self._buffer: deque[Seen] = deque()
        self._arrived = asyncio.Event()
        self._error: BaseException | None = None
        self._task = asyncio.create_task(self._read(position), name="helix_store chat feed")

    @property
    def is_alive(self) -> bool:
        return self._error is None and self.loop is asyncio.get_running_loop()

    async def _read(self, position: int) -> None:
        session_id, streams = self.key[2], self._store.streams
        try:
            reader = await streams.create_resumable_reader(session_id, from_sequence=position)
            while reader is None:
                # The first turn creates the stream.
                await asyncio.sleep(_SECONDS_BETWEEN_TRIES)
                reader = await streams.create_resumable_reader(session_id, from_sequence=position)
            async with aclosing(reader.texts()) as texts:
                async for stored in texts:
                    if stored is None:
                        continue
                    self._buffer.append(Seen(stored.sequence, decode(stored.text)))
                    if len(self._buffer) > _LONGEST:
                        self._floor = self._buffer.popleft().sequence
                    self._arrived.set()
                    if _is_all(reader, stored.sequence):
                        await asyncio.sleep(_pause())
        except Exception as exc:  # noqa: BLE001  each response raises it
            self._error = exc
        else:
            self._error = ConnectionError("The stream of the thread has ended.")
        finally:
            self._arrived.set()

    async def after(self, position: int, seconds: float) -> Sequence[Seen]:
        """Return the chunks after a position; none if none arrives in time. Raises the errors of readers."""
        if position < self._floor:
            page = await in_reading_thread(
                lambda: self._store.streams.read_after(self.key[2], position, limit=_PAGE)
            )
            return [Seen(each.sequence, each.chunk) for each in page]
        found = self._newer(position)
        if not found and self._error is None:
            self._arrived.clear()
            await _in_time(self._arrived.wait(), seconds)
            found = self._newer(position)
        if not found and self._error is not None:
            raise self._error
        return found

    def _newer(self, position: int) -> list[Seen]:
        if not self._buffer or self._buffer[-1].sequence <= position:
            return []
        return [seen for seen in self._buffer if seen.sequence > position]

    async def close(self) -> None:
        """Leave the feed. The last one to leave stops its reader."""
        self.followers -= 1
        if self.followers == 0:
            if _feeds.get(self.key) is self:
                del _feeds[self.key]
            self._task.cancel()
            await asyncio.wait([self._task])


def _is_all(reader: ResumableReader, sequence: int) -> bool:
    """Return whether this was the newest chunk when the reader's page was read."""
    head = getattr(reader, "_head", None)
    return head is not None and sequence >= head.last_sequence


def _pause() -> float:
    """Return how long a feed lets chunks come together, which depends on the responses of this process."""
    followers = sum(feed.followers for feed in _feeds.values())
    return min(_LONGEST_PAUSE_SECONDS, followers * _PAUSE_SECONDS_PER_FOLLOWER)


_feeds: Final[dict[tuple[str, str, str], Feed]] = {}


def open_feed(store: Store, session_id: str, position: int) -> Feed:
    """Return the feed of a thread in this event loop. Call `close` at the end."""
    key = (store.alias, store.tenant, session_id)
    feed = _feeds.get(key)
    if feed is None or not feed.is_alive:
        feed = _feeds[key] = Feed(key, store, position)
    feed.followers += 1
    return feed


async def _in_time(waiting: Awaitable[object], seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(waiting, seconds)


_pools: Final[dict[int, ThreadPoolExecutor]] = {}


async def in_reading_thread(call: Callable[[], R]) -> R:
    """Make a call in one of the two threads in which the responses of this process read threads.

    A response lasts longer than the thread that Django has for a request, and must not keep it.
    """
    process = os.getpid()
    if process not in _pools:
        _pools.clear()
        _pools[process] = ThreadPoolExecutor(2, thread_name_prefix="helix_store chat reader")

    def made() -> R:
        try:
            return call()
        finally:
            close_old_connections()

    return await asyncio.get_running_loop().run_in_executor(_pools[process], made)
