"""Waiting for changes of streams, and the few threads in which readers read."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from django.db import connections

from helix_store import conf
from helix_store.core.processes import PerProcess
from helix_store.core.streams import StreamHead
from helix_store.core.types import StreamStatus
from helix_store.engine.async_twins import in_thread
from helix_store.engine.database import Database
from helix_store.models import Stream
from helix_store.streams.backend import StreamWatch
from helix_store.streams.notifications import Listener
from helix_store.streams.watchers import Watcher, Watchers

__all__ = ["LINGER_SECONDS", "ReadingThreads", "reading_threads", "watch_stream"]

R = TypeVar("R")

_MOST_THREADS: Final = 4
LINGER_SECONDS: Final = 1.0
"""How long a thread keeps its connection when nobody asks for anything."""


@dataclass(slots=True)
class _Reading:
    """One query, and everybody who waits for its answer."""

    key: Hashable
    body: Callable[[], Any]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    answers: list[Future[Any]] = field(default_factory=list)


class ReadingThreads:
    """Runs queries of readers. Those that wait under one key share the one that has not begun yet."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: queue.SimpleQueue[_Reading] = queue.SimpleQueue()
        self._waiting: dict[Hashable, _Reading] = {}
        self._threads = 0
        self._idle = 0

    async def run(self, key: Hashable, body: Callable[[], R]) -> R:
        answer: Future[R] = Future()
        with self._mutex:
            reading = self._waiting.get(key)
            if reading is None:
                # Only one that has not begun is shared: what wakes a reader was committed before it asks.
                reading = self._waiting[key] = _Reading(key, body)
                self._queue.put(reading)
                if len(self._waiting) > self._idle and self._threads < _MOST_THREADS:
                    self._threads += 1
                    threading.Thread(target=self._work, name="helix_store reading", daemon=True).start()
            reading.answers.append(answer)
        return await asyncio.wrap_future(answer)

    def _work(self) -> None:
        try:
            while (reading := self._next()) is not None:
                self._answer(reading)
        finally:
            connections.close_all()

    def _next(self) -> _Reading | None:
        with self._mutex:
            self._idle += 1
        try:
            reading = self._queue.get(timeout=LINGER_SECONDS)
        except queue.Empty:
            reading = None
        with self._mutex:
            self._idle -= 1
            if reading is None and self._waiting:
                # It was put there between the two.
                reading = self._queue.get()
            if reading is None:
                self._threads -= 1
            else:
                del self._waiting[reading.key]
        return reading

    def _answer(self, reading: _Reading) -> None:
        try:
            value = reading.context.run(reading.body)
        except BaseException as exc:  # noqa: BLE001  it belongs to those who wait
            connections.close_all()
            for answer in reading.answers:
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(exc)
        else:
            for answer in reading.answers:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(value)


_of_process: Final = PerProcess(ReadingThreads)


def reading_threads() -> ReadingThreads:
    """Those of this process."""
    return _of_process.get()


_KEYS_PER_QUERY: Final = 500

_logger = logging.getLogger(__name__)


async def watch_stream(db: Database, interval: float) -> StreamWatch:
    """A place to wait in. Inside the caller's transaction only its own thread sees what it wrote."""
    if await in_thread(lambda: db.connection.in_atomic_block):
        return _WatchInTransaction(interval)
    return _Watch(db.alias, interval)


class _WatchInTransaction:
    """Reads where the caller writes, and looks again after each interval."""

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
        self._watcher = _SeeingWatcher(interval)
        self._key: int | None = None

    async def read(self, query: Callable[[], R], key: tuple[object, ...]) -> R:
        self._watcher.arm()
        return await reading_threads().run((self._alias, *key), query)

    async def changed(self, seen: StreamHead, timeout: float | None) -> bool:  # noqa: ASYNC109
        self._watcher.seen = seen
        if self._key is None:
            self._key = seen.incarnation[0]
            _hubs.get().of(self._alias).add(self._key, self._watcher)
            # Nobody woke it before, so what changed since its last read would wait for the next interval.
            return True
        return await self._watcher.woken(timeout)

    def close(self) -> None:
        if self._key is not None:
            _hubs.get().of(self._alias).remove(self._key, self._watcher)
            self._key = None


class _SeeingWatcher(Watcher):
    def __init__(self, interval: float) -> None:
        super().__init__()
        self.interval = interval
        self.seen: StreamHead | None = None


class _Hub:
    """The watchers of one database, the thread that polls for them, and the listener."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._mutex = threading.Lock()
        self._watchers: Watchers[int] = Watchers()
        self._changed = threading.Event()
        self._intervals: dict[float, int] = {}
        self._is_running = False

    def add(self, key: int, watcher: _SeeingWatcher) -> None:
        self._watchers.add(key, watcher)
        with self._mutex:
            self._intervals[watcher.interval] = self._intervals.get(watcher.interval, 0) + 1
            is_new_shortest = min(self._intervals) == watcher.interval and (
                self._intervals[watcher.interval] == 1
            )
            if not self._is_running:
                self._is_running = True
                threading.Thread(
                    target=self._run, name=f"helix_store streams of {self._alias}", daemon=True
                ).start()
        if is_new_shortest:
            self._changed.set()

    def remove(self, key: int, watcher: _SeeingWatcher) -> None:
        self._watchers.remove(key, watcher)
        with self._mutex:
            self._intervals[watcher.interval] -= 1
            if not self._intervals[watcher.interval]:
                del self._intervals[watcher.interval]

    def _run(self) -> None:
        listener: Listener | None = None
        try:
            while self._goes_on():
                try:
                    listener = self._listening(listener)
                    self._look()
                except Exception as exc:  # noqa: BLE001  without this thread every reader would wait for ever
                    # The next look comes after the next interval, on a new connection.
                    name = type(exc).__name__
                    _logger.warning("Streams of %r could not be looked at: %s", self._alias, name)
                    connections.close_all()
        finally:
            if listener is not None:
                listener.stop()
            connections.close_all()

    def _goes_on(self) -> bool:
        """Wait for one interval; ``False`` once nobody has been watching for a while."""
        idle_until = time.monotonic() + LINGER_SECONDS
        while True:
            with self._mutex:
                interval = min(self._intervals, default=None)
            if self._changed.wait(LINGER_SECONDS if interval is None else interval):
                self._changed.clear()
                continue
            if interval is not None:
                return True
            with self._mutex:
                if not self._intervals and time.monotonic() >= idle_until:
                    self._is_running = False
                    return False

    def _listening(self, listener: Listener | None) -> Listener | None:
        wanted = connections[self._alias].vendor == "postgresql" and conf.stream_options().notify
        if wanted and listener is None:
            return Listener(self._alias, woken=self._watchers.wake, missed=self._wake_all)
        if not wanted and listener is not None:
            listener.stop()
            return None
        if listener is not None:
            listener.ask_for_a_sign_of_life()
        return listener

    def _look(self) -> None:
        """Ask for the heads of all watched streams, and wake whoever has seen another one."""
        keys = self._watchers.watched()
        heads: dict[int, StreamHead] = {}
        for start in range(0, len(keys), _KEYS_PER_QUERY):
            heads |= _heads(self._alias, keys[start : start + _KEYS_PER_QUERY])
        for key in keys:
            for watcher in self._watchers.of(key):
                if not isinstance(watcher, _SeeingWatcher) or watcher.seen != heads.get(key):
                    watcher.wake()

    def _wake_all(self) -> None:
        for key in self._watchers.watched():
            self._watchers.wake(key)


def _heads(alias: str, keys: list[int]) -> dict[int, StreamHead]:
    rows = (
        Stream.objects.using(alias)
        .filter(pk__in=keys)
        .values_list("pk", "generation", "status", "last_sequence", "floor")
    )
    return {
        key: StreamHead((key, generation), StreamStatus(status), last_sequence, floor)
        for key, generation, status, last_sequence, floor in rows
    }


class _Hubs:
    """The hub of each database."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_alias: dict[str, _Hub] = {}

    def of(self, alias: str) -> _Hub:
        with self._mutex:
            return self._by_alias.setdefault(alias, _Hub(alias))


_hubs: Final = PerProcess(_Hubs)
