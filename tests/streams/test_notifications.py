"""NOTIFY as a mere wake-up: it comes after the commit, says nothing, and may get lost."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from helix_store.models import Stream
from helix_store.stores import DatabaseStreamManager
from helix_store.streams.watching import Listener, Notifier, channel, notify
from tests.databases import CommittedDatabase
from tests.streams.background import wait_for_background_threads

_PATIENCE_SECONDS = 30.0


@contextmanager
def _listening(database: CommittedDatabase) -> Iterator[psycopg.Connection[Any]]:
    parameters: dict[str, Any] = database.connection.get_connection_params()
    with psycopg.connect(**parameters, autocommit=True) as connection:
        connection.execute(f'LISTEN "{channel()}"')
        yield connection


def _payloads(connection: psycopg.Connection[Any], key: int, *, timeout: float, stop_after: int) -> list[str]:
    heard: list[str] = []
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and len(heard) < stop_after:
        # Other tests' streams share the channel.
        heard += [
            notification.payload
            for notification in connection.notifies(timeout=0.05)
            if notification.payload.startswith(f"{key} ")
        ]
    return heard


def _new_stream(database: CommittedDatabase, stream_id: str = "stream") -> tuple[DatabaseStreamManager, int]:
    streams = DatabaseStreamManager(database.alias, tenant=database.tenant)
    async_to_sync(streams.create_writer)(stream_id, "run", "agent")
    stream = Stream.objects.using(database.alias).get(tenant=database.tenant, stream_id=stream_id)
    return streams, stream.pk


def test_a_notification_is_a_key_and_a_sequence_whatever_the_stream_is_called(
    postgres_db: CommittedDatabase,
) -> None:
    streams, key = _new_stream(postgres_db, "\U0001f600" * 191)
    with _listening(postgres_db) as connection:
        assert streams.write_sync("\U0001f600" * 191, [{"type": "t", "text": "x" * 100_000}] * 3) == 3
        assert _payloads(connection, key, timeout=_PATIENCE_SECONDS, stop_after=1) == [f"{key} 3"]


def test_nobody_is_notified_of_what_is_not_committed(postgres_db: CommittedDatabase) -> None:
    streams, key = _new_stream(postgres_db)
    with _listening(postgres_db) as connection:
        with transaction.atomic(using=postgres_db.alias):
            streams.write_sync("stream", [{"type": "t"}])
            assert _payloads(connection, key, timeout=0.3, stop_after=1) == []
        assert _payloads(connection, key, timeout=_PATIENCE_SECONDS, stop_after=1) == [f"{key} 1"]
        with transaction.atomic(using=postgres_db.alias):
            streams.write_sync("stream", [{"type": "t"}])
            transaction.set_rollback(True, using=postgres_db.alias)
        assert _payloads(connection, key, timeout=0.3, stop_after=1) == []


def test_notifications_are_no_part_of_the_write(postgres_db: CommittedDatabase) -> None:
    streams, _ = _new_stream(postgres_db)
    with CaptureQueriesContext(postgres_db.connection) as captured:
        streams.write_sync("stream", [{"type": "t"}])
        async_to_sync(streams.end_stream)("stream")
    assert not [query["sql"] for query in captured if "notify" in query["sql"].lower()]


def test_many_writes_are_gathered(postgres_db: CommittedDatabase) -> None:
    streams, key = _new_stream(postgres_db)
    with _listening(postgres_db) as connection:
        started_at = time.monotonic()
        for _ in range(300):
            streams.write_sync("stream", [{"type": "t"}])
        heard: list[str] = []
        while f"{key} 300" not in heard:
            heard += _payloads(connection, key, timeout=_PATIENCE_SECONDS, stop_after=1)
    # One batch in 5 ms, however fast the machine writes.
    assert len(heard) <= (time.monotonic() - started_at) / 0.005 + 1


def test_the_setting_turns_notifications_off(postgres_db: CommittedDatabase) -> None:
    streams, key = _new_stream(postgres_db)
    with _listening(postgres_db) as connection:
        with override_settings(HELIX_STORE={"STREAMS": {"notify": False}}):
            streams.write_sync("stream", [{"type": "t"}])
        assert _payloads(connection, key, timeout=0.3, stop_after=1) == []


def _listening_connections(database: CommittedDatabase) -> int:
    with database.second_connection() as connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE query LIKE 'LISTEN%%' AND datname = current_database()"
        )
        return int(cursor.fetchone()[0])


@pytest.mark.thorough
def test_a_notification_wakes_a_reader_that_hardly_ever_polls(postgres_db: CommittedDatabase) -> None:
    streams, _ = _new_stream(postgres_db)
    lazy = DatabaseStreamManager(postgres_db.alias, tenant=postgres_db.tenant, poll_interval=3_600)
    count_listeners = sync_to_async(_listening_connections)

    async def read() -> None:
        # The listener of an earlier test must not help.
        while await count_listeners(postgres_db):  # noqa: ASYNC110  the server shows no other sign
            await asyncio.sleep(0.05)
        reader = await lazy.create_resumable_reader("stream")
        assert reader is not None
        reading = asyncio.create_task(anext(reader))
        while not await count_listeners(postgres_db):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await streams.create_writer("stream", "run", "agent")
        await sync_to_async(streams.write_sync)("stream", [{"type": "t"}])
        assert (await reading).sequence == 1
        await reader.aclose()
        # The long interval does not keep the listener after its last reader.
        while await count_listeners(postgres_db):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def in_time() -> None:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await read()

    async_to_sync(in_time)()


# The listener


class Heard:
    """What a listener has told."""

    def __init__(self) -> None:
        self.woken: list[int] = []
        self.missed = 0

    def miss(self) -> None:
        self.missed += 1

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, (self.woken, self.missed)
            time.sleep(0.01)


@contextmanager
def _listener(alias: str, heard: Heard) -> Iterator[Listener]:
    listener = Listener(alias, changed=heard.woken.append, missed=heard.miss, probe_interval=0.3)
    try:
        heard.until(lambda: heard.missed)
        yield listener
    finally:
        listener.stop()
        listener.join()


@pytest.mark.thorough
def test_a_listener_whose_connection_was_ended_listens_again(postgres_db: CommittedDatabase) -> None:
    heard = Heard()
    with _listener(postgres_db.alias, heard) as listener:
        with postgres_db.connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE query LIKE 'LISTEN%%' AND datname = current_database()"
            )
            assert cursor.fetchone()[0] >= 1
        heard.until(lambda: listener.times_connected == 2)
        # Whatever was sent meanwhile is lost, so everybody has to look.
        heard.until(lambda: heard.missed == 2)
        notify(postgres_db.alias, 7_000_000_001, 5)
        heard.until(lambda: 7_000_000_001 in heard.woken)


def test_a_listener_takes_nothing_but_keys(postgres_db: CommittedDatabase) -> None:
    heard = Heard()
    with _listener(postgres_db.alias, heard):
        with postgres_db.connection.cursor() as cursor:
            for payload in ("", "x", "-1 2", "1" * 5_000, "\u0663 1", "0 0", "7000000002 1"):
                cursor.execute("SELECT pg_notify(%s, %s)", [channel(), payload])
        heard.until(lambda: 7_000_000_002 in heard.woken)
    assert all(0 < key < 10**19 for key in heard.woken)


@pytest.mark.thorough
def test_probes_keep_a_quiet_connection(postgres_db: CommittedDatabase) -> None:
    with _listener(postgres_db.alias, Heard()) as listener:
        # Longer than the silence after which a connection is replaced.
        time.sleep(2)
        assert listener.times_connected == 1


@pytest.mark.thorough
def test_a_half_open_connection_is_given_up(postgres_db: CommittedDatabase) -> None:
    heard = Heard()
    with _freezing_proxy(postgres_db) as (alias, frozen), _listener(alias, heard) as listener:
        notify(postgres_db.alias, 7_000_000_003, 1)
        heard.until(lambda: 7_000_000_003 in heard.woken)
        frozen.set()
        # No end of the connection is ever seen; only the silence tells.
        heard.until(lambda: listener.times_connected >= 2)
        notify(postgres_db.alias, 7_000_000_004, 1)
        heard.until(lambda: 7_000_000_004 in heard.woken)


@contextmanager
def _freezing_proxy(database: CommittedDatabase) -> Iterator[tuple[str, threading.Event]]:
    """An alias whose first connection passes nothing on any more once the event is set."""
    parameters: dict[str, Any] = database.connection.get_connection_params()
    host, port = str(parameters["host"]), int(parameters.get("port") or 5432)
    frozen, stopped = threading.Event(), threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    sockets: list[socket.socket] = [listening]

    def upstream() -> socket.socket:
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"{host}/.s.PGSQL.{port}")
        return connection

    def carry(source: socket.socket, target: socket.socket, *, freezes: bool) -> None:
        try:
            while data := source.recv(65_536):
                if freezes and frozen.is_set():
                    stopped.wait()
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def accept() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            server = upstream()
            freezes = len(sockets) == 1
            sockets.extend((client, server))
            for ends in ((client, server), (server, client)):
                threading.Thread(target=carry, args=ends, kwargs={"freezes": freezes}, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    settings = {**database.connection.settings_dict}
    address = {"HOST": "127.0.0.1", "PORT": listening.getsockname()[1]}
    options = {name: value for name, value in settings["OPTIONS"].items() if name not in ("host", "port")}
    connections.settings["proxied"] = {**settings, **address, "OPTIONS": {**options, "sslmode": "disable"}}
    try:
        yield "proxied", frozen
    finally:
        stopped.set()
        wait_for_background_threads("proxied")
        del connections.settings["proxied"]
        for each in sockets:
            each.close()


def test_a_notifier_of_a_database_that_is_gone_says_so_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    alias = "a-database-that-is-gone"
    Notifier(alias).notify(1, 1)
    wait_for_background_threads(alias)
    # A notifier of an earlier test may speak too.
    (message,) = [each for each in caplog.messages if alias in each]
    assert f"database '{alias}' were not notified (InvalidQuery)" in message
