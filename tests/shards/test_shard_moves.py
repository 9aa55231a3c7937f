"""The recipe for a whole shard: logical replication copies it, and a pooler's pause changes the server."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connections
from pytest_django import DjangoDbBlocker

from helix_store.catalogue import registered_tables
from helix_store.exceptions import HelixStoreError
from helix_store.stores import DatabaseStateStore
from tests.databases import ALIASES, close_connections
from tests.pooler import PGBOUNCER, Address
from tests.postgres import NOT_DURABLE, PostgresCluster
from tests.processes import PROCESSES, WorkerProcess
from tests.settings import postgres_database

OLD, NEW, POOLED = "old", "new", "pooled"
WORKERS: Final = 4
_PATIENCE_SECONDS: Final = 120.0

pytestmark = [
    pytest.mark.skipif("postgres" not in ALIASES, reason="HELIX_TEST_DATABASES leaves postgres out"),
    pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed"),
]


class Pooler:
    """PgBouncer in transaction mode, in front of a server that can be changed."""

    def __init__(self, directory: Path, server: PostgresCluster) -> None:
        self._file, self._users = directory / "pgbouncer.ini", directory / "users.txt"
        self._users.write_text('"postgres" ""\n')
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.configure(server)

    def configure(self, server: PostgresCluster) -> None:
        self._file.write_text(
            f"[databases]\npostgres = host={server.directory} port={server.port} user=postgres pool_size=4\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {self._users}\nadmin_users = postgres\n"
            "pool_mode = transaction\n"
        )

    @contextmanager
    def running(self) -> Iterator[Pooler]:
        account = pwd.getpwnam("nobody")
        owner: dict[str, Any] = {}
        if os.geteuid() == 0:
            owner = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            for path in (self._file.parent, self._file, self._users):
                os.chown(path, account.pw_uid, account.pw_gid)
        process = subprocess.Popen([str(PGBOUNCER), "--quiet", str(self._file)], **owner)
        try:
            until(lambda: _listens(self.port))
            yield self
        finally:
            process.kill()
            process.wait()

    def command(self, text: str) -> None:
        """A command of the console; it returns when the command is done."""
        address = f"host=127.0.0.1 port={self.port} user=postgres dbname=pgbouncer"
        with psycopg.connect(address, autocommit=True) as console:
            result = console.pgconn.exec_(text.encode())
            assert result.status == psycopg.pq.ExecStatus.COMMAND_OK, result.error_message


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: Callable[[], object]) -> None:
    pause, deadline = threading.Event(), time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        pause.wait(0.01)


def query(alias: str, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, parameters or None)
        return [] if cursor.description is None else cursor.fetchall()


def tables() -> list[str]:
    models = [*apps.get_app_config("helix_store").get_models(), *(each.model for each in registered_tables())]
    return [model._meta.db_table for model in models if model._meta.managed]


@pytest.fixture
def servers(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Pooler]:
    """Two migrated servers, and a pooler in front of the old one."""
    directory = Path(tempfile.mkdtemp(prefix="helix-pgbouncer-"))
    with ExitStack() as stack, django_db_blocker.unblock():
        stack.callback(shutil.rmtree, directory)
        old = stack.enter_context(PostgresCluster(options={**NOT_DURABLE, "wal_level": "logical"}))
        new = stack.enter_context(PostgresCluster(options=NOT_DURABLE))
        pooler = Pooler(directory, old)
        address = {"HOST": "127.0.0.1", "PORT": str(pooler.port), "NAME": "postgres", "USER": "postgres"}
        defaults = connections[ALIASES["postgres"]].settings_dict
        for alias, given in {
            OLD: postgres_database(old.url),
            NEW: postgres_database(new.url),
            POOLED: {**address, "PASSWORD": "", "DISABLE_SERVER_SIDE_CURSORS": True},
        }.items():
            connections.settings[alias] = {**defaults, **given}
            stack.callback(_forget, alias)
        stack.callback(close_connections)
        for alias in (OLD, NEW):
            call_command("migrate", database=alias, verbosity=0)
        pooler.new_server = new  # type: ignore[attr-defined]  # where the test moves to
        yield stack.enter_context(pooler.running())


def _forget(alias: str) -> None:
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]


def write(number: int, stop: Event) -> dict[str, Any]:
    """Steps through the pooler until ``stop``: what was acknowledged, and what else was heard."""
    store = DatabaseStateStore(POOLED)
    session = store.session(f"session-{number}")
    acknowledged: list[str] = []
    heard: Counter[str] = Counter()
    longest = 0.0
    while not stop.is_set():
        item, began = f"{number}-{len(acknowledged)}", time.monotonic()
        try:
            with session.step() as step:
                step.say({"role": "assistant", "content": item})
        except HelixStoreError as exc:
            heard[f"{type(exc).__name__}: {exc.applied}"] += 1
            continue
        acknowledged.append(item)
        longest = max(longest, time.monotonic() - began)
    return {"acknowledged": acknowledged, "heard": heard, "longest": longest}


def stored(alias: str) -> list[str]:
    store = DatabaseStateStore(alias)
    return [
        str(message["content"])
        for number in range(WORKERS)
        for message in store.session(f"session-{number}").messages()
    ]


def test_a_shard_moves_by_logical_replication_and_a_pause(servers: Pooler) -> None:
    for number in range(WORKERS):
        DatabaseStateStore(OLD).create_session(f"session-{number}", agent_type="agent")
    stop = PROCESSES.Event()
    workers = [WorkerProcess(write, number, stop) for number in range(WORKERS)]
    try:
        until(lambda: len(stored(OLD)) >= 20)
        pause = move(servers)
        moved_at = len(stored(NEW))
        until(lambda: len(stored(NEW)) >= moved_at + 20)
    finally:
        stop.set()
    results = [worker.outcome().unwrap() for worker in workers]
    acknowledged = Counter(item for each in results for item in each["acknowledged"])
    found = Counter(stored(NEW))
    heard: Counter[str] = sum((each["heard"] for each in results), Counter())
    lost, extra = (acknowledged - found).total(), (found - acknowledged).total()
    longest = max(each["longest"] for each in results)
    print(  # noqa: T201  pytest shows it with -s
        f"acknowledged {acknowledged.total()}, lost {lost}, extra {extra}, errors {dict(heard)}, "
        f"paused {pause:.2f} s, longest step {longest:.2f} s"
    )
    assert (lost, extra, heard) == (0, 0, Counter())
    assert set(stored(OLD)) < set(found)


def move(pooler: Pooler) -> float:
    """The recipe. Returns the seconds of the pause."""
    new: PostgresCluster = pooler.new_server  # type: ignore[attr-defined]
    old = Address.of(connections[OLD])
    query(OLD, f"CREATE PUBLICATION shard FOR TABLE {', '.join(tables())}")
    query(
        NEW,
        f"CREATE SUBSCRIPTION shard CONNECTION 'host={old.host} port={old.port} user=postgres"
        " dbname=postgres' PUBLICATION shard",
    )
    until(lambda: query(NEW, "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel") == [(True,)])
    began = time.monotonic()
    pooler.command("PAUSE postgres")
    ((end,),) = query(OLD, "SELECT pg_current_wal_lsn()::text")
    caught_up = "SELECT bool_and(replay_lsn >= %s::pg_lsn) FROM pg_stat_replication"
    until(lambda: query(OLD, caught_up, end) == [(True,)])
    # Replication leaves sequences alone.
    for name, last in query(OLD, "SELECT sequencename, last_value FROM pg_sequences"):
        if last is not None and name.removesuffix("_id_seq") in tables():
            query(NEW, "SELECT setval(%s::regclass, %s)", name, last)
    pooler.configure(new)
    pooler.command("RELOAD")
    pooler.command("RESUME postgres")
    paused = time.monotonic() - began
    query(NEW, "DROP SUBSCRIPTION shard")
    return paused
