"""LISTEN and NOTIFY of PostgreSQL, as a mere wake-up: whatever gets lost here, polling finds.

A notification is the surrogate key of a stream and its last sequence: nothing that a person wrote, nothing
that could grow, and nothing that tells tenants apart.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.core.processes import PerProcess

__all__ = ["Listener", "Notifier", "announce", "announce_after_commit", "channel"]

_LINGER_SECONDS: Final = 1.0
_SHORTEST_GAP_SECONDS: Final = 0.005
"""Commits of notifications take turns on one lock of the whole server, so they are gathered for this long."""
_HEARTBEAT_SECONDS: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 60.0
_CONNECT_TIMEOUT_SECONDS: Final = 5
_STOP_CHECK_SECONDS: Final = 0.25
_SIGN_OF_LIFE: Final = 0
"""A key that no stream has."""

_logger = logging.getLogger(__name__)


def channel() -> str:
    """One per table prefix; PostgreSQL keeps databases apart by itself."""
    return conf.table_name("stream")


# --- Sending ---------------------------------------------------------------------------------------


class Notifier:
    """Sends what was announced from a thread with a connection of its own, the newest of each stream only."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._mutex = threading.Lock()
        self._pending: dict[int, int] = {}
        self._has_pending = threading.Event()
        self._is_running = False

    def announce(self, key: int, last_sequence: int) -> None:
        """Call after the commit; returns at once."""
        with self._mutex:
            self._pending[key] = last_sequence
            self._has_pending.set()
            if not self._is_running:
                self._is_running = True
                threading.Thread(
                    target=self._run, name=f"helix_store notifier of {self._alias}", daemon=True
                ).start()

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._send(batch)
                time.sleep(_SHORTEST_GAP_SECONDS)
        finally:
            connections.close_all()

    def _next_batch(self) -> dict[int, int]:
        """What was announced since the last one; nothing once it has been quiet for a while."""
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
            with connections[self._alias].cursor() as cursor:
                # Nothing is lost that polling would not find, so nobody waits for the disk.
                cursor.execute(
                    "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, payload) "
                    "FROM unnest(%s::text[]) AS payload",
                    [channel(), payloads],
                )
        except Exception as exc:  # noqa: BLE001  a wake-up must never harm the write that it is about
            _logger.warning("Readers of %r were not notified: %s", self._alias, type(exc).__name__)
            connections.close_all()


def announce(alias: str, key: int, last_sequence: int) -> None:
    """Wake the readers of a stream in every process, soon. Call after the commit."""
    _notifiers.get().of(alias).announce(key, last_sequence)


def announce_after_commit(connection: BaseDatabaseWrapper, key: int, last_sequence: int) -> None:
    """`announce` once the transaction that is open is committed, where there is NOTIFY and it is wanted."""
    if connection.vendor == "postgresql" and conf.stream_options().notify:
        tell = functools.partial(announce, connection.alias, key, last_sequence)
        transaction.on_commit(tell, using=connection.alias, robust=True)


class _Notifiers:
    """The notifier of each database."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_alias: dict[str, Notifier] = {}

    def of(self, alias: str) -> Notifier:
        with self._mutex:
            return self._by_alias.setdefault(alias, Notifier(alias))


_notifiers: Final = PerProcess(_Notifiers)


# --- Listening -------------------------------------------------------------------------------------


class Listener:
    """Listens on a connection of its own until `stop`, and connects again whenever it hears nothing.

    ``woken`` gets the key of a stream that has changed; ``missed`` is called when any may have. The sign of
    life goes the whole way through the server, so that a connection that is half open, or one of a pooler
    that swallows LISTEN, is told from a quiet one.
    """

    def __init__(
        self,
        alias: str,
        *,
        woken: Callable[[int], None],
        missed: Callable[[], None],
        heartbeat: float = _HEARTBEAT_SECONDS,
    ) -> None:
        self._alias = alias
        self._woken = woken
        self._missed = missed
        self._heartbeat = heartbeat
        self._asked_at = time.monotonic()
        self._stopped = threading.Event()
        self.times_connected = 0
        self._thread = threading.Thread(
            target=self._run, name=f"helix_store listener of {alias}", daemon=True
        )
        self._thread.start()

    def ask_for_a_sign_of_life(self) -> None:
        """Have a notification sent to all listeners, this one among them, when one is due."""
        if time.monotonic() - self._asked_at >= self._heartbeat:
            self._asked_at = time.monotonic()
            announce(self._alias, _SIGN_OF_LIFE, 0)

    def stop(self) -> None:
        """Listen no more; the connection is closed soon. Safe to repeat."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until it is closed, after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        try:
            while not self._stopped.is_set():
                has_heard = False
                try:
                    has_heard = self._listen()
                except Exception as exc:  # noqa: BLE001  the server may be away in many ways; polling remains
                    _logger.warning("Listening to %r failed: %s", self._alias, type(exc).__name__)
                pause = _FIRST_PAUSE_SECONDS if has_heard else min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._stopped.wait(pause)
        finally:
            connections.close_all()

    def _listen(self) -> bool:
        """Listen on one connection until it falls silent or `stop`; whether anything was heard on it."""
        has_heard = False
        with _own_connection(self._alias) as connection:
            connection.execute(f'LISTEN "{channel()}"')
            self.times_connected += 1
            # Whatever was sent while nobody listened is not sent again.
            self._missed()
            heard_at = time.monotonic()
            while not self._stopped.is_set():
                for notification in connection.notifies(timeout=_STOP_CHECK_SECONDS):
                    has_heard = True
                    heard_at = time.monotonic()
                    self._hear(notification.payload)
                if time.monotonic() - heard_at > 2.5 * self._heartbeat:
                    _logger.warning("Listening to %r fell silent; connecting again.", self._alias)
                    break
        return has_heard

    def _hear(self, payload: str) -> None:
        key = payload.partition(" ")[0]
        # Anyone who may connect to the database may notify.
        if key.isascii() and key.isdigit() and len(key) < 20 and int(key) != _SIGN_OF_LIFE:
            self._woken(int(key))


def _own_connection(alias: str) -> Any:
    """A psycopg connection from the alias's settings, beside Django's and outside of its pool."""
    django_connection: Any = connections[alias]
    parameters = {"connect_timeout": _CONNECT_TIMEOUT_SECONDS, **django_connection.get_connection_params()}
    driver = django_connection.Database
    return driver.connect(**parameters, autocommit=True)
