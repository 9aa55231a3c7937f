"""What becomes of the errors of a PostgreSQL server that crashes, is full or has corrupt files."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.engine.errors import is_retryable_transaction, mapped_errors
from helix_store.exceptions import (
    IntegrityFault,
    OutcomeUnknown,
    StoreFull,
    StoreUnavailable,
)
from tests.database.separate import (
    execute,
    fetch,
    in_transaction,
    separate_postgres,
    small_disk,
    wait_until_the_server_hangs_up,
)
from tests.databases import ALIASES
from tests.postgres import PostgresCluster

pytestmark = pytest.mark.usefixtures("postgres_db")

MAX_CONNECTIONS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    """A small server that is only started when this run includes PostgreSQL at all."""
    if "postgres" not in ALIASES:
        pytest.skip("HELIX_TEST_DATABASES leaves postgres out of this run")
    options = {
        "max_connections": str(MAX_CONNECTIONS),
        "superuser_reserved_connections": "0",
        "max_locks_per_transaction": "10",
        "autovacuum": "off",
    }
    with PostgresCluster(options=options) as cluster:
        yield cluster


@pytest.fixture
def connection(cluster: PostgresCluster, postgres_db: object) -> Iterator[BaseDatabaseWrapper]:
    if not cluster.is_running:
        cluster.start()
    with separate_postgres(cluster) as connection:
        execute(connection, "DROP TABLE IF EXISTS kept")
        execute(connection, "CREATE TABLE kept (value text)")
        yield connection


def test_a_server_killed_at_commit_leaves_the_outcome_unknown(
    cluster: PostgresCluster, connection: BaseDatabaseWrapper
) -> None:
    def body() -> None:
        execute(connection, "INSERT INTO kept VALUES ('lost')")
        cluster.kill()

    with pytest.raises(OutcomeUnknown) as raised:
        in_transaction(connection, body)
    assert raised.value.applied == "unknown"


def test_a_server_killed_in_the_body_makes_the_store_unavailable_until_it_is_back(
    cluster: PostgresCluster, connection: BaseDatabaseWrapper
) -> None:
    def body() -> None:
        cluster.kill()
        execute(connection, "INSERT INTO kept VALUES ('lost')")

    with pytest.raises(StoreUnavailable) as in_the_body:
        in_transaction(connection, body)
    with pytest.raises(StoreUnavailable) as at_connecting:
        in_transaction(connection, body)
    assert in_the_body.value.attributes == at_connecting.value.attributes == {"database_code": None}
    cluster.start()
    assert fetch(connection, "SELECT * FROM kept") == []


@pytest.mark.parametrize("at_commit", [False, True])
def test_the_crash_of_another_backend_ends_ours(
    cluster: PostgresCluster, connection: BaseDatabaseWrapper, at_commit: bool
) -> None:
    with separate_postgres(cluster) as other:
        other.ensure_connection()
        crashing = other.connection.info.backend_pid

        def body() -> None:
            execute(connection, "INSERT INTO kept VALUES ('lost')")
            os.kill(crashing, signal.SIGKILL)
            wait_until_the_server_hangs_up(connection)
            if not at_commit:
                execute(connection, "SELECT 1")

        with pytest.raises(OutcomeUnknown if at_commit else StoreUnavailable):
            in_transaction(connection, body)
    # The server is recovering by itself; nobody can tell for how long.
    cluster.restart(immediate=True)


def test_too_many_connections_make_the_store_unavailable_until_one_is_free(
    cluster: PostgresCluster, connection: BaseDatabaseWrapper
) -> None:
    def connect_once_more(opened: ExitStack) -> None:
        another = opened.enter_context(separate_postgres(cluster))
        with mapped_errors(another):
            another.ensure_connection()

    def connect_too_often(opened: ExitStack) -> None:
        for _ in range(MAX_CONNECTIONS):
            connect_once_more(opened)

    with ExitStack() as opened, pytest.raises(StoreUnavailable) as raised:
        connect_too_often(opened)
    assert (raised.value.retryable, raised.value.applied) == (True, "no")
    assert fetch(connection, "SELECT 1") == [(1,)]


def test_a_server_without_room_for_more_locks_is_full(connection: BaseDatabaseWrapper) -> None:
    lock_much = "SELECT count(pg_advisory_xact_lock(number)) FROM generate_series(1, 1000000) AS number"
    with pytest.raises(StoreFull) as raised:
        in_transaction(connection, lambda: execute(connection, lock_much))
    assert raised.value.attributes == {"database_code": "53200"}
    assert not is_retryable_transaction(raised.value)


def test_a_full_disk_says_so_keeps_reading_and_writes_again_when_there_is_room(
    cluster: PostgresCluster, connection: BaseDatabaseWrapper
) -> None:
    with _table_on_a_small_disk(cluster, connection) as ballast:
        execute(connection, "INSERT INTO filling VALUES ('before')")

        def write_little_and_much() -> None:
            execute(connection, "INSERT INTO filling VALUES ('with it')")
            execute(connection, "INSERT INTO filling VALUES (repeat('x', 2000000))")

        with pytest.raises(StoreFull) as raised:
            in_transaction(connection, write_little_and_much)
        assert raised.value.attributes == {"database_code": "53100"}
        assert (raised.value.retryable, raised.value.applied) == (False, "no")
        assert fetch(connection, "SELECT value FROM filling") == [("before",)]
        ballast.unlink()
        in_transaction(
            connection, lambda: execute(connection, "INSERT INTO filling VALUES (repeat('x', 100000))")
        )
        assert fetch(connection, "SELECT count(*) FROM filling") == [(2,)]


@contextmanager
def _table_on_a_small_disk(cluster: PostgresCluster, connection: BaseDatabaseWrapper) -> Iterator[Path]:
    """A table whose disk of one megabyte is half filled by a file, which is yielded."""
    directory = cluster.directory / "small-disk"
    directory.mkdir()
    with small_disk(directory, owner=cluster.data_directory.stat().st_uid):
        ballast = directory / "ballast"
        ballast.write_bytes(b"x" * 500_000)
        execute(connection, f"CREATE TABLESPACE small LOCATION '{directory}'")
        try:
            execute(connection, "CREATE TABLE filling (value text STORAGE EXTERNAL) TABLESPACE small")
            yield ballast
        finally:
            # The server does not start again without a disk that it knows.
            execute(connection, "DROP TABLE filling")
            execute(connection, "DROP TABLESPACE small")


def test_a_full_disk_of_the_log_found_at_commit_leaves_the_outcome_unknown(tmp_path: Path) -> None:
    # Buffers for a whole segment and a sleeping writer: the second segment is first asked for by the COMMIT.
    options = {"wal_buffers": "16MB", "wal_writer_delay": "10s", "autovacuum": "off"}
    with PostgresCluster(options=options) as cluster:
        cluster.kill()
        log = cluster.data_directory / "pg_wal"
        subprocess.run(["cp", "--archive", f"{log}/.", str(tmp_path)], check=True)  # noqa: S607
        with (
            small_disk(log, owner=log.stat().st_uid, megabytes=20),
            separate_postgres(cluster) as connection,
        ):
            subprocess.run(["cp", "--archive", f"{tmp_path}/.", str(log)], check=True)  # noqa: S607
            cluster.start()
            execute(connection, "CREATE TABLE kept (value text STORAGE EXTERNAL)")
            connection.set_autocommit(False)
            execute(connection, "INSERT INTO kept SELECT repeat('x', 100000) FROM generate_series(1, 120)")
            # Without atomic(): on its way out it connects again, and that error would hide this one.
            with pytest.raises(OutcomeUnknown) as raised, mapped_errors(connection, committing=True):
                connection.commit()
            assert connection.connection is None
    django_error = raised.value.__cause__
    assert django_error is not None
    assert getattr(django_error.__cause__, "sqlstate", None) == "53100"


def test_a_damaged_page_is_an_integrity_fault(
    cluster: PostgresCluster, connection: BaseDatabaseWrapper
) -> None:
    execute(connection, "INSERT INTO kept VALUES ('damaged')")
    ((path,),) = fetch(connection, "SELECT pg_relation_filepath('kept')")
    connection.close()
    # What the server has in its memory it does not read again.
    cluster.restart()
    with (cluster.data_directory / path).open("r+b") as damaged:
        damaged.write(b"\xff" * 8192)
    with pytest.raises(IntegrityFault) as raised, mapped_errors(connection):
        fetch(connection, "SELECT * FROM kept")
    assert raised.value.attributes == {"database_code": "XX001"}
    assert "corrupt" in str(raised.value)
