"""PostgreSQL's LISTEN and NOTIFY. They only wake readers: polling finds every change that they miss. A
notification contains the surrogate key of a stream and its last sequence. It has no user text, does not grow,
and does not identify a tenant.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from django.db import connections

from helix_store import conf
from helix_store.core.processes import PerProcess
from helix_store.engine.connections import keep_open, return_to_pool
from helix_store.engine.database import Database
from helix_store.streams import sql

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
                name = f"helix_store notifier ({self._db.alias})"
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
            self._db.write(sql.SEND_NOTIFICATIONS, {"channel": channel(), "payloads": payloads})
            return_to_pool(self._db.connection)
        except Exception as exc:  # noqa: BLE001  the chunks are committed; readers find them by polling
            _logger.warning(
                "Readers of streams on database %r were not notified (%s). They find the changes by polling. "
                "If this repeats, check the database's connection limit and the size of its pool.",
                self._db.alias,
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
