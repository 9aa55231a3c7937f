"""Waiting for new chunks: notifications of PostgreSQL, and readers that wait."""

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

from helix_store import conf
from helix_store.core.ids import PerProcess
from helix_store.engine.async_twins import in_thread
from helix_store.engine.database import Database
from helix_store.engine.threads import keep_open, return_to_pool
from helix_store.models import Stream
from helix_store.streams.chunks import HEAD_COLUMNS, SEND_NOTIFICATIONS, StreamHead, Watch, Watches

_LINGER_SECONDS: Final = 1.0
_SHORTEST_GAP_SECONDS: Final = 0.005
"""Commits with notifications wait for a server-wide lock, so notifications are collected for this time."""
_PROBE_INTERVAL_SECONDS: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 60.0
_CONNECT_TIMEOUT_SECONDS: Final = 5
_STOP_CHECK_SECONDS: Final = 0.25
_PROBE_KEY: Final = 0
"""A key that does not belong to a stream."""

_logger = logging.getLogger(__name__)


def channel() -> str:
    """Return the channel of this table prefix. PostgreSQL separates the channels of different databases."""
    return conf.table_name("stream")


def uses_notify(alias: str) -> bool:
    """Return whether notifications wake the readers of this database."""
    return Database(alias, "").is_postgresql and conf.stream_options().notify


# --- Sending ---------------------------------------------------------------------------------------


class Notifier:
    """A thread that sends the newest notification of each stream, with its own connection."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._db = Database(alias, "")
        self._mutex = threading.Lock()
        self._pending: dict[int, int] = {}
        self._has_pending = threading.Event()
        self._is_running = False

    def notify(self, key: int, last_sequence: int) -> None:
        """Call this after the commit; it returns at once."""
        with self._mutex:
            self._pending[key] = last_sequence
            self._has_pending.set()
            if not self._is_running:
                self._is_running = True
                name = f"helix_store notifier ({self._alias})"
                threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            with keep_open():
                while batch := self._next_batch():
                    self._send(batch)
                    time.sleep(_SHORTEST_GAP_SECONDS)
        finally:
            connections.close_all()

    def _next_batch(self) -> dict[int, int]:
        """Return the notifications since the last batch; it is empty if there were none for a while."""
        self._has_pending.wait(_LINGER_SECONDS)
        with self._mutex:
            batch, self._pending = self._pending, {}
            self._has_pending.clear()
            if not batch:
                self._is_running = False
            return batch

    def _send(self, batch: dict[int, int]) -> None:
        payloads = [f"{key} {last_sequence}" for key, last_sequence in batch.items()]
        try:
            self._db.write(SEND_NOTIFICATIONS, {"channel": channel(), "payloads": payloads})
            return_to_pool(self._db.connection)
        except Exception as exc:  # noqa: BLE001  the chunks are committed; readers find them by polling
            _logger.warning(
                "Readers of streams on database %r were not notified (%s). They find the changes by polling. "
                "If this repeats, check the database's connection limit and the size of its pool.",
                self._alias,
                type(exc).__name__,
            )
            connections.close_all()


def notify(alias: str, key: int, last_sequence: int) -> None:
    """Wake the readers of a stream in every process, within milliseconds. Call this after the commit."""
    _notifiers.get()(alias).notify(key, last_sequence)


def notify_after_commit(alias: str, key: int, last_sequence: int) -> None:
    """Call `notify` after the open transaction commits, if this database uses notifications."""
    if uses_notify(alias):
        send = functools.partial(notify, key=key, last_sequence=last_sequence)
        Database(alias, "").after_commit(send)


_notifiers: Final = PerProcess(lambda: functools.cache(Notifier))
"""The notifier of each database, by its alias."""


# --- Listening -------------------------------------------------------------------------------------


class Listener:
    """A thread that listens on its own connection until `stop`, and replaces a connection that receives
    nothing.

    The connection uses ``listen_database``, if the project names one.

    ``changed`` is called with the key of a stream that has changed; ``missed`` is called if notifications may
    have been lost, so that any stream may have changed. A probe is a notification that every listener
    receives from the server. It distinguishes a quiet connection from one that is half open, or that goes
    through a pooler which ignores LISTEN.
    """

    def __init__(
        self,
        alias: str,
        *,
        changed: Callable[[int], None],
        missed: Callable[[], None],
        probe_interval: float = _PROBE_INTERVAL_SECONDS,
    ) -> None:
        self._alias = alias
        self._changed = changed
        self._missed = missed
        self._probe_interval = probe_interval
        self._probed_at = time.monotonic()
        self._stopped = threading.Event()
        self.times_connected = 0
        self._thread = threading.Thread(target=self._run, name=f"helix_store listener ({alias})", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the connection soon. Safe to repeat."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until the connection is closed, after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        try:
            while not self._stopped.is_set():
                has_received = False
                try:
                    has_received = self._listen()
                except Exception as exc:  # noqa: BLE001  any failure of the server or network; polling remains
                    _logger.warning(
                        "Listening for stream notifications on database %r failed (%s). Readers poll until "
                        "the connection is replaced. If this repeats, check that the server is reachable, or "
                        'set HELIX_STORE["STREAMS"]["notify"] to False.',
                        self._alias,
                        type(exc).__name__,
                    )
                pause = _FIRST_PAUSE_SECONDS if has_received else min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._stopped.wait(pause)
        finally:
            connections.close_all()

    def _listen(self) -> bool:
        """Listen on one connection until it is silent or stopped; return whether it received anything."""
        has_received = False
        with _own_connection(conf.stream_options().listening_alias(self._alias)) as connection:
            connection.execute(f'LISTEN "{channel()}"')
            self.times_connected += 1
            # Notifications that were sent before LISTEN are lost.
            self._missed()
            received_at = time.monotonic()
            while not self._stopped.is_set():
                self._probe_if_due()
                for notification in connection.notifies(timeout=_STOP_CHECK_SECONDS):
                    has_received = True
                    received_at = time.monotonic()
                    self._receive(notification.payload)
                if time.monotonic() - received_at > 2.5 * self._probe_interval:
                    _logger.warning(
                        "The connection that listens for stream notifications on database %r receives "
                        "nothing; it is replaced. Behind a pooler in transaction mode, name a direct alias "
                        'of the same database in HELIX_STORE["STREAMS"]["listen_database"], or set "notify" '
                        "to False.",
                        self._alias,
                    )
                    break
        return has_received

    def _probe_if_due(self) -> None:
        if time.monotonic() - self._probed_at >= self._probe_interval:
            self._probed_at = time.monotonic()
            notify(self._alias, _PROBE_KEY, 0)

    def _receive(self, payload: str) -> None:
        key = payload.partition(" ")[0]
        # Every role that may connect to the database may send notifications.
        if key.isascii() and key.isdigit() and len(key) < 20 and int(key) != _PROBE_KEY:
            self._changed(int(key))


def _own_connection(alias: str) -> Any:
    """Return a psycopg connection with the alias's settings, outside Django's connections and pool."""
    django_connection: Any = connections[alias]
    parameters = {"connect_timeout": _CONNECT_TIMEOUT_SECONDS, **django_connection.get_connection_params()}
    driver = django_connection.Database
    return driver.connect(**parameters, autocommit=True)


R = TypeVar("R")

_KEYS_PER_QUERY: Final = 500
_READING_THREADS: Final = 4


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
        self._alias = alias
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
                name = f"helix_store stream poller ({self._alias})"
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
                            self._alias,
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
        if not uses_notify(self._alias):
            if listener is not None:
                listener.stop()
            return None
        if listener is None:
            return Listener(self._alias, changed=self.wake, missed=self.wake_all)
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
        rows = Stream.objects.using(self._alias).filter(pk__in=keys).values_list(*HEAD_COLUMNS)
        return {row[0]: StreamHead.of(*row) for row in self._db.query(lambda: list(rows))}


_pollers: Final = PerProcess(lambda: functools.cache(_Poller))
"""The poller of each database, by its alias."""
