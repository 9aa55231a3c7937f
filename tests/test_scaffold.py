"""The ground that the other tests stand on: both databases, committed access, workers, and the wheel."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from multiprocessing.synchronize import Event
from pathlib import Path

import psutil
import psycopg
import pytest
from asgiref.sync import SyncToAsync, sync_to_async
from django.apps import apps
from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.models import Lock
from tests.databases import CommittedDatabase, close_connections, delete_all_rows
from tests.postgres import PostgresCluster
from tests.processes import PROCESSES, WorkerDied, WorkerProcess, run_in_processes, run_in_threads

ROOT = Path(__file__).parent.parent


def _scalar(alias: str, sql: str) -> object:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]


def _database_and_process(alias: str) -> tuple[str, int]:
    _scalar(alias, "SELECT 1")
    return str(connections[alias].settings_dict["NAME"]), os.getpid()


def _open_connection(alias: str) -> BaseDatabaseWrapper:
    connections[alias].ensure_connection()
    return connections[alias]


def _fail_with(text: str) -> None:
    raise ValueError(text)


def _kill_yourself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for(event: Event) -> None:
    event.wait()


def test_every_table_of_the_app_exists_in_each_database(committed_db: CommittedDatabase) -> None:
    tables = set(committed_db.connection.introspection.table_names())
    models = list(apps.get_app_config("helix_store").get_models())
    assert models
    assert {model._meta.db_table for model in models} <= tables


def test_what_a_test_writes_is_committed_and_seen_by_a_second_connection(
    committed_db: CommittedDatabase,
) -> None:
    table = committed_db.tenant.replace("-", "_")
    with committed_db.connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE {table} (id integer)")
        cursor.execute(f"INSERT INTO {table} VALUES (7)")
    with committed_db.second_connection() as other, other.cursor() as cursor:
        cursor.execute(f"SELECT id FROM {table}")
        assert cursor.fetchall() == [(7,)]
        cursor.execute(f"DROP TABLE {table}")


async def test_async_code_reaches_the_database_from_its_own_thread(committed_db: CommittedDatabase) -> None:
    assert await sync_to_async(_scalar)(committed_db.alias, "SELECT 7") == 7


def test_connections_of_async_tests_are_closed_too(committed_db: CommittedDatabase) -> None:
    connection = SyncToAsync.single_thread_executor.submit(_open_connection, committed_db.alias).result()
    assert connection.connection is not None
    close_connections()
    assert connection.connection is None


def test_deleting_all_rows_leaves_every_table_empty(committed_db: CommittedDatabase) -> None:
    Lock.objects.using(committed_db.alias).create(tenant=committed_db.tenant, name="left over")
    delete_all_rows(committed_db.alias)
    models = list(apps.get_app_config("helix_store").get_models())
    assert Lock in models
    assert not any(model._base_manager.using(committed_db.alias).exists() for model in models)


def test_sqlite_writes_ahead_syncs_fully_and_takes_the_write_lock_first(sqlite_db: CommittedDatabase) -> None:
    assert _scalar(sqlite_db.alias, "PRAGMA journal_mode") == "wal"
    assert _scalar(sqlite_db.alias, "PRAGMA synchronous") == 2
    assert sqlite_db.connection.settings_dict["OPTIONS"]["transaction_mode"] == "IMMEDIATE"


def test_postgres_waits_for_the_disk_only_in_tests_that_crash_it(postgres_db: CommittedDatabase) -> None:
    assert settings.POSTGRES_URL or _scalar(postgres_db.alias, "SHOW fsync") == "off"
    assert _scalar(postgres_db.alias, "SHOW synchronous_commit") == "on"
    assert _scalar(postgres_db.alias, "SHOW server_encoding") == "UTF8"


@pytest.mark.thorough
def test_workers_in_processes_are_on_the_test_database(committed_db: CommittedDatabase) -> None:
    outcomes = run_in_processes(_database_and_process, [(committed_db.alias,)] * 3)
    names, processes = zip(*(outcome.unwrap() for outcome in outcomes), strict=True)
    assert set(names) == {str(committed_db.connection.settings_dict["NAME"])}
    assert len(set(processes) | {os.getpid()}) == 4


def test_workers_in_threads_are_on_the_test_database(committed_db: CommittedDatabase) -> None:
    outcomes = run_in_threads(_database_and_process, [(committed_db.alias,)] * 3)
    expected = str(committed_db.connection.settings_dict["NAME"])
    assert [outcome.unwrap() for outcome in outcomes] == [(expected, os.getpid())] * 3


def test_the_error_of_a_worker_comes_back(django_db_setup: None) -> None:
    for run in (run_in_processes, run_in_threads):
        (outcome,) = run(_fail_with, [("no such thing",)])
        with pytest.raises(ValueError, match="no such thing"):
            outcome.unwrap()


def test_a_worker_that_dies_is_told_from_one_that_answers(django_db_setup: None) -> None:
    (outcome,) = run_in_processes(_kill_yourself, [()])
    with pytest.raises(WorkerDied, match="-9"):
        outcome.unwrap()


def test_a_worker_that_hangs_is_killed_at_the_timeout(django_db_setup: None) -> None:
    worker = WorkerProcess(_wait_for, PROCESSES.Event())
    with pytest.raises(TimeoutError):
        worker.outcome(timeout=0.1)
    assert not worker.is_alive


@pytest.fixture
def cluster(postgres_db: CommittedDatabase) -> PostgresCluster:
    """A cluster that is only started when this run includes PostgreSQL at all."""
    return PostgresCluster()


@pytest.mark.thorough
def test_a_killed_cluster_keeps_what_was_committed(cluster: PostgresCluster) -> None:
    with cluster:
        with psycopg.connect(cluster.url) as connection:
            assert connection.execute("SHOW fsync").fetchall() == [("on",)]
            connection.execute("CREATE TABLE kept AS SELECT 7 AS id")
        cluster.kill()
        assert not cluster.is_running
        cluster.start()
        cluster.restart(immediate=True)
        with psycopg.connect(cluster.tcp_url) as connection:
            assert connection.execute("SELECT id FROM kept").fetchall() == [(7,)]
        directory = cluster.directory
    assert not directory.exists()


@pytest.mark.thorough
def test_a_cluster_goes_when_the_process_that_started_it_is_killed(cluster: PostgresCluster) -> None:
    program = (
        "from tests.postgres import PostgresCluster\n"
        "import os, signal\n"
        "cluster = PostgresCluster().start()\n"
        "print(cluster._postmaster().pid, cluster.directory, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    postmaster, directory = ended.stdout.split()
    assert ended.returncode == -signal.SIGKILL
    # The shell that cleans up has the directory among its arguments, and ends when it is done.
    cleaners = [
        each for each in psutil.process_iter(["cmdline"]) if directory in (each.info["cmdline"] or [])
    ]
    psutil.wait_procs(cleaners, timeout=30)
    assert not Path(directory).exists()
    # A process that has ended stays a zombie until the first process of the container collects it.
    assert not psutil.pid_exists(int(postmaster)) or psutil.Process(int(postmaster)).status() == "zombie"


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    )
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert "helix_store/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "helix_store",
        wheel.name.split("-py3")[0] + ".dist-info",
    }
    package_data = {
        str(path.relative_to(ROOT))
        for folder in ("templates", "static")
        for path in ROOT.joinpath("helix_store", folder).rglob("*")
        if path.is_file()
    }
    assert package_data <= set(names)
    required = [line for line in metadata.splitlines() if re.match(r"Requires-Dist: [^;]*$", line)]
    assert required == ["Requires-Dist: django>=5.2.17"]
