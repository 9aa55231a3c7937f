"""What each error of SQLite becomes, every one of them provoked for real."""

from __future__ import annotations

import os
import resource
import sqlite3
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, ProgrammingError
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.engine.errors import is_retryable_transaction, mapped_errors
from helix_store.exceptions import (
    IntegrityFault,
    OutcomeUnknown,
    StoreBusy,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    TenantMoved,
)
from helix_store.stores import DatabaseStateStore
from tests.database.separate import execute, fetch, in_transaction, separate_sqlite, small_disk
from tests.databases import CommittedDatabase
from tests.processes import run_in_processes

pytestmark = pytest.mark.usefixtures("sqlite_db")

PAGE = 4096


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database file with one table, in WAL mode."""
    path = tmp_path / "database"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE kept (value)")
    connection.close()
    return path


@pytest.fixture
def connection(file: Path) -> Iterator[BaseDatabaseWrapper]:
    with separate_sqlite(file) as connection:
        yield connection


def test_a_writer_that_holds_the_lock_makes_the_store_busy(
    file: Path, connection: BaseDatabaseWrapper
) -> None:
    with separate_sqlite(file) as other:
        execute(other, "BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy) as raised, mapped_errors(connection, committing=True):
            execute(connection, "INSERT INTO kept VALUES (1)")
        execute(other, "ROLLBACK")
    assert is_retryable_transaction(raised.value)
    assert raised.value.to_dict() == {
        "code": "store_busy",
        "message": StoreBusy.default_message(),
        "retryable": True,
        "applied": "no",
        "database_code": "SQLITE_BUSY",
    }
    execute(connection, "INSERT INTO kept VALUES (1)")


def test_a_transaction_that_cannot_start_makes_the_store_busy(file: Path) -> None:
    with (
        separate_sqlite(file) as other,
        separate_sqlite(file, transaction_mode="IMMEDIATE") as connection,
    ):
        execute(other, "BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy):
            in_transaction(connection, lambda: pytest.fail("The transaction started."))


def test_a_call_waits_for_the_lock_once(
    sqlite_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DatabaseStateStore(sqlite_db.alias, tenant=sqlite_db.tenant)
    store.create_session("session", agent_type="agent")
    begun: list[str] = []

    def record(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
        if sql.startswith("BEGIN"):
            begun.append(sql)
        return execute(sql, *arguments)

    connection = sqlite_db.connection
    connection.close()
    options = {**connection.settings_dict["OPTIONS"], "timeout": 0.1}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    with sqlite_db.second_connection() as other, connection.execute_wrapper(record):
        execute(other, "BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy):
            store.append_messages("session", [{"role": "user"}])
        execute(other, "ROLLBACK")
    assert begun == ["BEGIN IMMEDIATE"]


def test_a_snapshot_that_is_out_of_date_makes_the_store_busy(
    file: Path, connection: BaseDatabaseWrapper
) -> None:
    def read_and_write_when_another_has_written() -> None:
        fetch(connection, "SELECT * FROM kept")
        execute(other, "INSERT INTO kept VALUES (1)")
        execute(connection, "INSERT INTO kept VALUES (2)")

    with separate_sqlite(file) as other, pytest.raises(StoreBusy) as raised:
        in_transaction(connection, read_and_write_when_another_has_written)
    assert raised.value.attributes == {"database_code": "SQLITE_BUSY_SNAPSHOT"}
    assert is_retryable_transaction(raised.value)


@pytest.mark.thorough
def test_a_writer_that_is_stopped_in_the_index_of_the_wal_makes_the_store_busy(file: Path) -> None:
    with separate_sqlite(file) as writer, separate_sqlite(file) as reader:
        execute(writer, "BEGIN IMMEDIATE")
        swap_a_byte_of_the_index(file)
        # SQLite tries a hundred times, for ten seconds.
        with pytest.raises(StoreBusy) as raised, mapped_errors(reader):
            fetch(reader, "SELECT * FROM kept")
        assert raised.value.attributes == {"database_code": "SQLITE_PROTOCOL"}
        assert (raised.value.retryable, raised.value.applied) == (True, "no")
        swap_a_byte_of_the_index(file)
        execute(writer, "ROLLBACK")
        assert fetch(reader, "SELECT * FROM kept") == []


def swap_a_byte_of_the_index(file: Path) -> None:
    """Make the two copies of its header differ, as while a writer changes them, or make them agree."""
    with file.with_name(f"{file.name}-shm").open("r+b") as index:
        index.seek(8)
        (byte,) = index.read(1)
        index.seek(8)
        index.write(bytes([byte ^ 1]))


def test_a_table_that_is_being_read_makes_the_store_busy_but_a_retry_is_of_no_use(
    connection: BaseDatabaseWrapper,
) -> None:
    execute(connection, "INSERT INTO kept VALUES (1), (2)")
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM kept")
        with pytest.raises(StoreBusy) as raised, mapped_errors(connection):
            execute(connection, "DROP TABLE kept")
    assert raised.value.attributes == {"database_code": "SQLITE_LOCKED"}
    assert not is_retryable_transaction(raised.value)


def test_a_full_database_says_so_keeps_reading_and_writes_again_when_there_is_room(
    connection: BaseDatabaseWrapper,
) -> None:
    execute(connection, "INSERT INTO kept VALUES ('before')")
    execute(connection, "PRAGMA max_page_count = 1")

    def write_little_and_much() -> None:
        execute(connection, "INSERT INTO kept VALUES ('with it')")
        execute(connection, "INSERT INTO kept VALUES (zeroblob(100000))")

    with pytest.raises(StoreFull) as raised:
        in_transaction(connection, write_little_and_much)
    assert (raised.value.retryable, raised.value.applied) == (False, "no")
    assert fetch(connection, "SELECT value FROM kept") == [("before",)]
    execute(connection, "PRAGMA max_page_count = 1000")
    execute(connection, "INSERT INTO kept VALUES (zeroblob(100000))")


@pytest.mark.parametrize("journal_mode", ["DELETE", "WAL"])
def test_a_full_disk_found_at_commit_applies_nothing_and_keeps_reading(
    tmp_path: Path, journal_mode: str
) -> None:
    with (
        small_disk(tmp_path, owner=os.geteuid()) as directory,
        separate_sqlite(directory / "database") as connection,
    ):
        execute(connection, f"PRAGMA journal_mode = {journal_mode}")
        execute(connection, "CREATE TABLE kept (value)")
        execute(connection, "INSERT INTO kept VALUES ('before')")
        with pytest.raises(StoreFull) as raised:
            in_transaction(connection, lambda: _write_pages(connection, 300))
        assert raised.value.attributes == {"database_code": "SQLITE_FULL"}
        assert raised.value.applied == "no"
        assert fetch(connection, "SELECT value FROM kept") == [("before",)]
        in_transaction(connection, lambda: _write_pages(connection, 1))


def test_a_file_opened_for_reading_only_makes_the_store_unavailable(file: Path) -> None:
    with separate_sqlite(f"file:{file}?mode=ro", uri=True) as connection:
        with pytest.raises(StoreUnavailable) as raised, mapped_errors(connection, committing=True):
            execute(connection, "INSERT INTO kept VALUES (1)")
        assert raised.value.attributes == {"database_code": "SQLITE_READONLY"}
        assert (raised.value.retryable, raised.value.applied) == (True, "no")
        assert connection.connection is None
        assert fetch(connection, "SELECT * FROM kept") == []


def test_a_file_that_was_moved_away_under_the_connection_makes_the_store_unavailable(
    file: Path, tmp_path: Path
) -> None:
    with separate_sqlite(file) as connection:
        execute(connection, "PRAGMA journal_mode = DELETE")
        file.rename(tmp_path / "elsewhere")
        with pytest.raises(StoreUnavailable) as raised, mapped_errors(connection):
            execute(connection, "INSERT INTO kept VALUES (1)")
    assert raised.value.attributes == {"database_code": "SQLITE_READONLY_DBMOVED"}


def test_a_file_that_cannot_be_opened_makes_the_store_unavailable(tmp_path: Path) -> None:
    with (
        separate_sqlite(tmp_path / "no such directory" / "file") as connection,
        pytest.raises(StoreUnavailable) as raised,
        mapped_errors(connection),
    ):
        execute(connection, "SELECT 1")
    assert raised.value.attributes == {"database_code": "SQLITE_CANTOPEN"}


def _write_until_the_limit(path: Path, size: int, *, in_body: bool) -> None:
    """Write more than a file of this process may hold, so that write() itself fails."""
    with separate_sqlite(path) as connection:
        execute(connection, f"PRAGMA cache_size = {1 if in_body else 10_000}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        in_transaction(connection, lambda: _write_pages(connection, 100))


def _write_pages(connection: BaseDatabaseWrapper, number: int) -> None:
    for _ in range(number):
        execute(connection, "INSERT INTO kept VALUES (zeroblob(4000))")


def _write_too_much_in_the_body(path: Path) -> None:
    _write_until_the_limit(path, 16 * PAGE, in_body=True)


def _write_too_much_at_commit(path: Path) -> None:
    _write_until_the_limit(path, 16 * PAGE, in_body=False)


def test_a_failing_write_in_the_body_makes_the_store_unavailable(file: Path) -> None:
    (outcome,) = run_in_processes(_write_too_much_in_the_body, [(file,)])
    assert isinstance(outcome.error, StoreUnavailable)
    assert outcome.error.attributes == {"database_code": "SQLITE_IOERR_WRITE"}
    assert outcome.error.applied == "no"


def test_a_failing_write_at_commit_leaves_the_outcome_unknown(file: Path) -> None:
    (outcome,) = run_in_processes(_write_too_much_at_commit, [(file,)])
    assert isinstance(outcome.error, OutcomeUnknown)
    assert outcome.error.applied == "unknown"


def test_a_file_of_something_else_is_an_integrity_fault(tmp_path: Path) -> None:
    path = tmp_path / "letter"
    path.write_text("Dear database, " * 100)
    with (
        separate_sqlite(path) as connection,
        pytest.raises(IntegrityFault) as raised,
        mapped_errors(connection),
    ):
        fetch(connection, "SELECT * FROM kept")
    assert raised.value.attributes == {"database_code": "SQLITE_NOTADB"}
    assert "corrupt" in str(raised.value)


def test_a_damaged_page_is_an_integrity_fault(file: Path) -> None:
    with file.open("r+b") as damaged:
        damaged.seek(PAGE)
        damaged.write(b"\xff" * PAGE)
    with (
        separate_sqlite(file) as connection,
        pytest.raises(IntegrityFault) as raised,
        mapped_errors(connection),
    ):
        fetch(connection, "SELECT * FROM kept")
    assert raised.value.attributes == {"database_code": "SQLITE_CORRUPT"}
    assert "corrupt" in str(raised.value)


def test_stored_text_that_is_not_utf_8_is_an_integrity_fault_without_the_text(
    connection: BaseDatabaseWrapper,
) -> None:
    execute(connection, "INSERT INTO kept VALUES (CAST(x'63616e617279ff' AS TEXT))")
    with pytest.raises(IntegrityFault) as raised, mapped_errors(connection):
        fetch(connection, "SELECT value FROM kept")
    assert raised.value.attributes == {"database_code": None}
    assert str(raised.value) == IntegrityFault.default_message()
    assert "canary" not in "".join(traceback.format_exception(raised.value))


def test_a_connection_that_was_closed_behind_djangos_back_is_a_fault_of_the_caller(
    connection: BaseDatabaseWrapper,
) -> None:
    connection.ensure_connection()
    connection.connection.close()
    with pytest.raises(ProgrammingError), mapped_errors(connection):
        execute(connection, "SELECT 1")


def test_a_value_longer_than_sqlite_takes_is_an_integrity_fault(connection: BaseDatabaseWrapper) -> None:
    connection.ensure_connection()
    connection.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)
    with pytest.raises(IntegrityFault) as raised, mapped_errors(connection):
        execute(connection, "INSERT INTO kept VALUES (zeroblob(2000))")
    assert raised.value.attributes == {"database_code": "SQLITE_TOOBIG"}
    assert "corrupt" not in str(raised.value)


def test_an_interrupted_statement_is_a_timeout_and_not_retried(connection: BaseDatabaseWrapper) -> None:
    connection.ensure_connection()
    connection.connection.set_progress_handler(lambda: 1, 1)
    with pytest.raises(StoreTimeout) as raised, mapped_errors(connection):
        execute(connection, "INSERT INTO kept VALUES (1)")
    assert not raised.value.retryable
    assert not is_retryable_transaction(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("TM001 said by the fence", TenantMoved), ("said by a project's own trigger", IntegrityError)],
)
def test_only_the_trigger_of_the_fence_says_that_the_tenant_is_moved(
    connection: BaseDatabaseWrapper, text: str, expected: type[Exception]
) -> None:
    refusal = "SELECT RAISE(ABORT, '{}')".format(text.replace("'", "''"))
    execute(connection, f"CREATE TRIGGER refusing BEFORE INSERT ON kept BEGIN {refusal}; END")
    with pytest.raises(expected) as raised:
        in_transaction(connection, lambda: execute(connection, "INSERT INTO kept VALUES (1)"))
    assert type(raised.value) is expected
    assert fetch(connection, "SELECT count(*) FROM kept") == [(0,)]
