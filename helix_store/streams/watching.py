"""Waiting for changes in the database: one thread polls for all readers of a process."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

from django.db import connections

from helix_store.core.processes import PerProcess
from helix_store.core.types import StreamStatus
from helix_store.engine.async_twins import in_thread
from helix_store.engine.connections import keep_open, return_to_pool
from helix_store.engine.database import Database
from helix_store.models import Stream
from helix_store.streams.backend import StreamWatch
from helix_store.streams.notifications import Listener, uses_notify
from helix_store.streams.reader_pool import LINGER_SECONDS, reader_pool
from helix_store.streams.rules import StreamHead
from helix_store.streams.watchers import Watcher, Watchers

__all__ = ["watch_stream"]

R = TypeVar("R")

_KEYS_PER_QUERY: Final = 500

_logger = logging.getLogger(__name__)


async def watch_stream(db: Database, interval: float) -> StreamWatch:
    """Start watching a stream; ``interval`` is the time between two polls, in seconds.

    Inside the caller's transaction, only the caller's thread sees its uncommitted chunks.
    """
    if await in_thread(lambda: db.connection.in_atomic_block):
        return _WatchInTransaction(interval)
    return _Watch(db.alias, interval)


class _WatchInTransaction:
    """Reads in the caller's thread, after each interval."""

    def __init__(self, interval: float) -> None:
        self._interval = interval

    async def read(self, query: Callable[[], R], key: tuple[object, ...]) -> R:
        return await in_thread(query)

    async def changed(self, seen: StreamHead, timeout: float | None) -> bool:  # noqa: ASYNC109
        is_sooner = timeout is not None and timeout < self._interval
        await asyncio.sleep(timeout if timeout is not None and is_sooner else self._interval)
        return not is_sooner

    def close(self) -> None:
        return


class _Watch:
    def __init__(self, alias: str, interval: float) -> None:
        self._alias = alias
        self._poller = _pollers.get()(alias)
        self._watcher = _PolledWatcher(interval)
        self._key: int | None = None

    async def read(self, query: Callable[[], R], key: tuple[object, ...]) -> R:
        self._watcher.arm()
        return await reader_pool().run(self._alias, key, query)

    async def changed(self, seen: StreamHead, timeout: float | None) -> bool:  # noqa: ASYNC109
        self._watcher.seen = seen
        if self._key is None:
            self._key = seen.identity[0]
            self._poller.add(self._key, self._watcher)
            # No change has woken the reader so far, so it reads once more instead of waiting for the next
            # poll.
            return True
        return await self._watcher.wait(timeout)

    def close(self) -> None:
        if self._key is not None:
            self._poller.remove(self._key, self._watcher)
            self._key = None


class _PolledWatcher(Watcher):
    """A watcher with its interval and the head that its reader has seen."""

    def __init__(self, interval: float) -> None:
        super().__init__()
        self.interval = interval
        self.seen: StreamHead | None = None


class _Poller:
    """The watchers of one database, the thread that polls for them, and the listener."""

    def __init__(self, alias: str) -> None:
        self._db = Database(alias, "")
        self._mutex = threading.Lock()
        self._watchers: Watchers[int, _PolledWatcher] = Watchers()
        self._intervals: Counter[float] = Counter()
        self._intervals_changed = threading.Event()
        self._is_running = False

    def add(self, key: int, watcher: _PolledWatcher) -> None:
        self._watchers.add(key, watcher)
        with self._mutex:
            self._intervals[watcher.interval] += 1
            if not self._is_running:
                self._is_running = True
                name = f"helix_store stream poller ({self._db.alias})"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        self._intervals_changed.set()

    def remove(self, key: int, watcher: _PolledWatcher) -> None:
        self._watchers.remove(key, watcher)
        with self._mutex:
            self._intervals[watcher.interval] -= 1
            # Drop the intervals that no watcher uses.
            self._intervals = +self._intervals
        self._intervals_changed.set()

    def _run(self) -> None:
        listener: Listener | None = None
        try:
            with keep_open():
                # The listener starts before the first interval, which may be long.
                while True:
                    try:
                        listener = self._started_or_stopped(listener)
                        self._poll()
                        return_to_pool(self._db.connection)
                    except Exception as exc:  # noqa: BLE001  if this thread ended, no reader would wake
                        _logger.warning(
                            "Streams on database %r could not be polled (%s); the next poll uses a new "
                            "connection. If this repeats, check that the database is reachable.",
                            self._db.alias,
                            type(exc).__name__,
                        )
                        connections.close_all()
                    if not self._wait_for_interval():
                        return
        finally:
            if listener is not None:
                listener.stop()
            connections.close_all()

    def _wait_for_interval(self) -> bool:
        """Wait for the shortest interval of a watcher; return ``False`` if no one has watched for a while."""
        began_at = time.monotonic()
        while True:
            with self._mutex:
                interval = min(self._intervals, default=None)
                remaining = began_at + (LINGER_SECONDS if interval is None else interval) - time.monotonic()
                if remaining <= 0:
                    self._is_running = interval is not None
                    return self._is_running
            self._intervals_changed.wait(remaining)
            self._intervals_changed.clear()

    def _started_or_stopped(self, listener: Listener | None) -> Listener | None:
        """Return the listener that the current settings require."""
        if not uses_notify(self._db.alias):
            if listener is not None:
                listener.stop()
            return None
        if listener is None:
            return Listener(self._db.alias, changed=self._watchers.wake, missed=self._watchers.wake_all)
        return listener

    def _poll(self) -> None:
        """Read the heads of all watched streams, and wake the watchers of heads that have changed."""
        keys = self._watchers.keys()
        heads: dict[int, StreamHead] = {}
        for start in range(0, len(keys), _KEYS_PER_QUERY):
            heads |= _heads(self._db, keys[start : start + _KEYS_PER_QUERY])
        for key in keys:
            for watcher in self._watchers.of(key):
                if watcher.seen != heads.get(key):
                    watcher.wake()


def _heads(db: Database, keys: list[int]) -> dict[int, StreamHead]:
    streams = Stream.objects.using(db.alias).filter(pk__in=keys)
    rows = streams.values_list("pk", "generation", "status", "last_sequence", "floor")
    return {
        key: StreamHead((key, generation), StreamStatus(status), last_sequence, floor)
        for key, generation, status, last_sequence, floor in db.query(lambda: list(rows))
    }


_pollers: Final = PerProcess(lambda: functools.cache(_Poller))
"""The poller of each database, by its alias."""
