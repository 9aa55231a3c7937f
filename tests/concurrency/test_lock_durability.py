"""Tokens grow over whatever befalls a holder or the server: SIGKILL, a crash, a dump that is restored."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db.backends.base.base import BaseDatabaseWrapper
from pytest_django import DjangoDbBlocker

from helix_store.exceptions import FencedOutError, HelixStoreError
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.database.separate import execute, separate_connection, separate_postgres, separate_sqlite
from tests.databases import ALIASES, CommittedDatabase
from tests.postgres import PostgresCluster
from tests.processes import PROCESSES, WorkerProcess
from tests.settings import postgres_database

pytestmark = pytest.mark.usefixtures("machine")

NAMES = ("a", "b", "c", "d")
MESSAGE = {"role": "user", "content": "hello"}


def hold_for_ever(alias: str, tenant: str, holds: Any) -> None:
    lock = DatabaseLockManager(alias, tenant=tenant).acquire("session", ttl_ms=300)
    assert lock is not None
    with lock.keep_alive():
        holds.set()
        threading.Event().wait()


def test_the_lock_of_a_killed_holder_is_free_after_its_term_and_goes_on_with_a_greater_token(
    committed_db: CommittedDatabase,
) -> None:
    holds = PROCESSES.Event()
    worker = WorkerProcess(hold_for_ever, committed_db.alias, committed_db.tenant, holds)
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    assert holds.wait(30)
    assert locks.acquire("session") is None
    worker.kill()
    assert locks.wait_acquire("session", timeout_ms=30_000).fencing_token == 2


@pytest.fixture(scope="module")
def cluster(django_db_blocker: DjangoDbBlocker) -> Iterator[PostgresCluster]:
    """A server of our own, to be killed, with the tables in it."""
    if "postgres" not in ALIASES:
        pytest.skip("HELIX_TEST_DATABASES leaves PostgreSQL out of this run")
    with PostgresCluster() as cluster:
        with django_db_blocker.unblock(), separate_postgres(cluster) as connection:
            call_command("migrate", "helix_store", database=connection.alias, verbosity=0)
        yield cluster


@pytest.fixture
def on_cluster(cluster: PostgresCluster, django_db_blocker: DjangoDbBlocker) -> Iterator[BaseDatabaseWrapper]:
    with django_db_blocker.unblock(), separate_postgres(cluster) as connection:
        execute(connection, "DELETE FROM helix_store_lock")
        yield connection


def work_until_the_server_dies(url: str, started: threading.Semaphore) -> dict[str, int]:
    """Acquire and release; the newest token of each name that the server has acknowledged."""
    acknowledged: dict[str, int] = {}
    with separate_connection(**postgres_database(url)) as connection:
        locks = DatabaseLockManager(connection.alias)
        try:
            while True:
                for name in NAMES:
                    lock = locks.acquire(name, ttl_ms=500)
                    if lock is not None:
                        acknowledged[name] = lock.fencing_token
                        started.release()
                        lock.release()
        except HelixStoreError:
            return acknowledged


def test_no_token_is_given_out_twice_over_crashes_of_the_server(
    cluster: PostgresCluster, on_cluster: BaseDatabaseWrapper
) -> None:
    workers, acquisitions = 4, 200
    locks = DatabaseLockManager(on_cluster.alias)
    newest = dict.fromkeys(NAMES, 0)
    for _ in range(3):
        started = threading.Semaphore(0)
        with ThreadPoolExecutor(workers) as pool:
            working = [pool.submit(work_until_the_server_dies, cluster.url, started) for _ in range(workers)]
            for _ in range(acquisitions):
                assert started.acquire(timeout=60)
            cluster.kill()
            acknowledged = [each.result() for each in working]
        on_cluster.close()
        cluster.start()
        for name in NAMES:
            greatest = max(tokens.get(name, 0) for tokens in acknowledged)
            assert greatest > newest[name]
            with locks.wait_acquire(name, timeout_ms=30_000) as lock:
                newest[name] = lock.fencing_token
            assert newest[name] > greatest


def run(cluster: PostgresCluster, program: str, *arguments: str) -> None:
    subprocess.run([cluster.binaries / program, *arguments], check=True, capture_output=True, timeout=60)


def test_tokens_go_on_in_a_restored_dump(
    cluster: PostgresCluster, on_cluster: BaseDatabaseWrapper, tmp_path: Path
) -> None:
    locks = DatabaseLockManager(on_cluster.alias)
    store = DatabaseStateStore(on_cluster.alias)
    store.create_session("session", agent_type="agent")
    for _ in range(7):
        former = locks.wait_acquire("session", timeout_ms=0)
        former.release()
    dump = str(tmp_path / "dump")
    run(cluster, "pg_dump", "--format=custom", "--file", dump, cluster.tcp_url)
    execute(on_cluster, "CREATE DATABASE restored")
    restored_url = cluster.tcp_url.removesuffix("/postgres") + "/restored"
    run(cluster, "pg_restore", "--dbname", restored_url, dump)
    with separate_connection(**postgres_database(restored_url)) as connection:
        successor = DatabaseLockManager(connection.alias).acquire("session")
        assert successor is not None
        assert successor.fencing_token == former.fencing_token + 1 == 8
        with pytest.raises(FencedOutError):
            DatabaseStateStore(connection.alias).append_messages(
                "session", [MESSAGE], fencing_token=former.fencing_token
            )


def test_tokens_go_on_in_a_restored_copy_of_sqlite(sqlite_db: CommittedDatabase, tmp_path: Path) -> None:
    locks = DatabaseLockManager(sqlite_db.alias, tenant=sqlite_db.tenant)
    for _ in range(7):
        locks.wait_acquire("session", timeout_ms=0).release()
    copy = tmp_path / "copy.sqlite3"
    with sqlite_db.connection.cursor() as cursor:
        cursor.execute("VACUUM INTO %s", [os.fspath(copy)])
    with separate_sqlite(copy) as connection:
        successor = DatabaseLockManager(connection.alias, tenant=sqlite_db.tenant).acquire("session")
        assert successor is not None
        assert successor.fencing_token == 8
