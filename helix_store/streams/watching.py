"""Readers of streams in the database. For all readers of a process, a few threads run the queries, and one
thread polls for changes.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from django.db import connections

from helix_store.core.processes import PerProcess
from helix_store.engine.async_twins import in_thread
from helix_store.engine.connections import keep_open, return_to_pool
from helix_store.engine.database import Database
from helix_store.models import Stream
from helix_store.streams.notifications import Listener, uses_notify
from helix_store.streams.rules import HEAD_COLUMNS, StreamHead
from helix_store.streams.watchers import Watch, Watches

R = TypeVar("R")

_KEYS_PER_QUERY: Final = 500
_READING_THREADS: Final = 4
_LINGER_SECONDS: Final = 1.0
"""The time for which the threads of streams keep their connections when there are no readers."""

_logger = logging.getLogger(__name__)


async def watch_stream(db: Database, interval: float) -> Watch:
    """Start watching a stream; ``interval`` is the time between two polls, in seconds.

    Inside a transaction of the caller, only the caller's thread sees its uncommitted chunks.
    """
    if await in_thread(lambda: db.connection.in_atomic_block):
        return _WatchInTransaction(interval)
    return Watch(_pollers.get()(db.alias), partial(_pool.get().run, db.alias), interval)


class _WatchInTransaction(Watch):
    """Reads in the caller's thread, after each interval."""

    def __init__(self, interval: float) -> None:
        self.interval = interval

    async def read(self, query: Callable[[], R], key: tuple[object, ...]) -> R:
        return await in_thread(query)

    async def changed(self, seen: StreamHead, timeout: float | None) -> bool:  # noqa: ASYNC109
        is_sooner = timeout is not None and timeout < self.interval
        await asyncio.sleep(timeout if timeout is not None and is_sooner else self.interval)
        return not is_sooner

    def close(self) -> None:
        return


# --- The threads that run queries ---------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Query:
    """A query that waits for a thread. Each reader has its own result, so it can be cancelled alone."""

    alias: str
    call: Callable[[], Any]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    results: list[Future[Any]] = field(default_factory=list)

    def run(self) -> None:
        wanted = [result for result in self.results if result.set_running_or_notify_cancel()]
        try:
            value = self.context.run(self._answer)
        except BaseException as exc:  # noqa: BLE001  the readers get it
            for result in wanted:
                result.set_exception(exc)
        else:
            for result in wanted:
                result.set_result(value)

    def _answer(self) -> Any:
        try:
            with keep_open():
                return self.call()
        finally:
            return_to_pool(connections[self.alias])


class ReaderPool:
    """A pool that runs queries on at most four threads, which close their connections and end when no reader
    has used the pool for a while. Readers that wait for a query with the same key share it until it begins.
    A running query is not shared, because it may have begun before the commit of the write that woke the
    reader.
    """

    def __init__(self, linger_seconds: float = _LINGER_SECONDS) -> None:
        self._linger_seconds = linger_seconds
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, _Query] = {}
        self._threads = 0
        self._running = 0

    async def run(self, alias: str, key: tuple[object, ...], query: Callable[[], R]) -> R:
        """Run a query on this database in the context of the task, and return its result."""
        result: Future[R] = Future()
        with self._changed:
            shared = self._waiting.setdefault((alias, *key), _Query(alias, query))
            shared.results.append(result)
            idle = self._threads - self._running
            if idle < len(self._waiting) and self._threads < _READING_THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="helix_store reader", daemon=True).start()
            self._changed.notify()
        return await asyncio.wrap_future(result)

    def _work(self) -> None:
        try:
            while query := self._next():
                query.run()
                with self._changed:
                    self._running -= 1
        finally:
            connections.close_all()

    def _next(self) -> _Query | None:
        """Wait for a query. Return ``None`` to end the thread if no query has run for a while."""
        with self._changed:
            while not self._waiting:
                is_woken = self._changed.wait(self._linger_seconds)
                if not (is_woken or self._waiting or self._running):
                    self._threads -= 1
                    return None
            self._running += 1
            return self._waiting.pop(next(iter(self._waiting)))


_pool: Final = PerProcess(ReaderPool)


# --- The thread that polls ------------------------------------------------------------------------------


class _Poller(Watches):
    """The watches on one database, the thread that polls for them, and the listener."""

    def __init__(self, alias: str) -> None:
        super().__init__()
        self._db = Database(alias, "")
        self._intervals: Counter[float] = Counter()
        self._intervals_changed = threading.Event()
        self._is_running = False

    def add(self, key: int, watch: Watch) -> None:
        super().add(key, watch)
        with self._mutex:
            self._intervals[watch.interval] += 1
            if not self._is_running:
                self._is_running = True
                name = f"helix_store stream poller ({self._db.alias})"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        self._intervals_changed.set()

    def remove(self, key: int, watch: Watch) -> None:
        super().remove(key, watch)
        with self._mutex:
            self._intervals[watch.interval] -= 1
            # Drop the intervals that no watch uses any more.
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
        """Wait for the shortest interval of a watch; return ``False`` if no one has watched for a while."""
        began_at = time.monotonic()
        while True:
            with self._mutex:
                interval = min(self._intervals, default=None)
                remaining = began_at + (_LINGER_SECONDS if interval is None else interval) - time.monotonic()
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
            return Listener(self._db.alias, changed=self.wake, missed=self.wake_all)
        return listener

    def _poll(self) -> None:
        """Read the heads of all watched streams, and wake the readers of heads that have changed."""
        keys = self.keys()
        heads: dict[int, StreamHead] = {}
        for start in range(0, len(keys), _KEYS_PER_QUERY):
            heads |= self._heads(keys[start : start + _KEYS_PER_QUERY])
        for key in keys:
            for watch in self.of(key):
                if watch.seen != heads.get(key):
                    watch.wake()

    def _heads(self, keys: list[int]) -> dict[int, StreamHead]:
        rows = Stream.objects.using(self._db.alias).filter(pk__in=keys).values_list(*HEAD_COLUMNS)
        return {row[0]: StreamHead.of(*row) for row in self._db.query(lambda: list(rows))}


_pollers: Final = PerProcess(lambda: functools.cache(_Poller))
"""The poller of each database, by its alias."""
