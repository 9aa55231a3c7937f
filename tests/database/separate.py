"""Connections that no other test has: with settings of their own, or to a server or file of their own."""

from __future__ import annotations

import os
import select
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import ConnectionHandler

from helix_store.engine.errors import raise_mapped
from tests.databases import CommittedDatabase
from tests.postgres import PostgresCluster
from tests.settings import postgres_database

__all__ = [
    "beside",
    "defer_to_commit",
    "execute",
    "fetch",
    "in_transaction",
    "separate_connection",
    "separate_postgres",
    "separate_sqlite",
    "small_disk",
    "wait_until_the_server_hangs_up",
]

T = TypeVar("T")


@contextmanager
def separate_connection(**settings: Any) -> Iterator[BaseDatabaseWrapper]:
    """A connection with these settings, known to ``transaction.atomic`` by its alias while it lasts."""
    alias = f"separate-{uuid.uuid4().hex}"
    connection = ConnectionHandler({"default": {}, alias: settings})[alias]
    connections[alias] = connection
    try:
        yield connection
    finally:
        connection.close()
        if connection.vendor == "postgresql":
            connection.close_pool()  # type: ignore[attr-defined]  # PostgreSQL alone has pools
        del connections[alias]


@contextmanager
def separate_postgres(cluster: PostgresCluster) -> Iterator[BaseDatabaseWrapper]:
    with separate_connection(**postgres_database(cluster.url)) as connection:
        yield connection


@contextmanager
def separate_sqlite(name: Path | str, **options: Any) -> Iterator[BaseDatabaseWrapper]:
    with separate_connection(
        ENGINE="django.db.backends.sqlite3", NAME=name, OPTIONS={"timeout": 0, **options}
    ) as connection:
        yield connection


def in_transaction(connection: BaseDatabaseWrapper, body: Callable[[], object]) -> None:
    """Run ``body`` in a transaction of its own, with errors explained as they are for a verb of the store."""
    committing = False
    try:
        with transaction.atomic(using=connection.alias):
            body()
            committing = True
    except Exception as exc:
        raise_mapped(connection, exc, committing=committing)
        raise


def execute(connection: BaseDatabaseWrapper, sql: str, *params: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql, params or None)


def fetch(connection: BaseDatabaseWrapper, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, params or None)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


def defer_to_commit(connection: BaseDatabaseWrapper, statement: str) -> None:
    """Make this PL/pgSQL statement a part of the COMMIT of a transaction that inserts into ``deferring``."""
    execute(connection, "CREATE TEMPORARY TABLE deferring (id integer)")
    execute(
        connection,
        "CREATE FUNCTION pg_temp.at_commit() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {statement}; RETURN NULL; END $$",
    )
    execute(
        connection,
        "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON deferring DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION pg_temp.at_commit()",
    )


def wait_until_the_server_hangs_up(connection: BaseDatabaseWrapper) -> None:
    """Wait for the end of the connection; a statement sent before it can lose the server's last words."""
    poll = select.poll()
    poll.register(connection.connection.fileno(), select.POLLRDHUP)
    assert poll.poll(30_000)


@contextmanager
def small_disk(directory: Path, *, owner: int, megabytes: int = 1) -> Iterator[Path]:
    """A small file system in place of this directory; skips the test where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,uid={owner},mode=700", "tmpfs", str(directory)],  # noqa: S607
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not mount a file system: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)  # noqa: S607


def beside(database: CommittedDatabase, call: Callable[[], T]) -> Future[T]:
    """Start a call on another connection, and wait until it waits for a lock of this one."""
    pool = ThreadPoolExecutor(1)

    def on_a_connection_of_its_own() -> T:
        try:
            return call()
        finally:
            connections.close_all()

    outcome = pool.submit(on_a_connection_of_its_own)
    pool.shutdown(wait=False)
    own = fetch(database.connection, "SELECT pg_backend_pid()")[0][0]
    deadline = time.monotonic() + 30
    with database.second_connection() as watcher:
        while not fetch(watcher, "SELECT 1 FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))", own):
            assert not outcome.done(), "it does not wait"
            assert time.monotonic() < deadline, "it does not begin"
    return outcome
