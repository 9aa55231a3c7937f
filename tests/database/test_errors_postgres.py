"""What each error of PostgreSQL becomes, every one of them sent by a server."""

from __future__ import annotations

import threading
import traceback

import psycopg
import psycopg_pool
import pytest
from django.db import DataError, Error, IntegrityError, NotSupportedError, ProgrammingError, transaction
from django.db.transaction import TransactionManagementError

from helix_store.engine.errors import (
    is_retryable_transaction,
    is_unique_violation,
    mapped_errors,
    violated_constraint,
)
from helix_store.exceptions import (
    IntegrityFault,
    OutcomeUnknown,
    StoreBusy,
    StoreTimeout,
    StoreUnavailable,
)
from helix_store.models import Lock
from tests.cells import for_each
from tests.database.separate import (
    defer_to_commit,
    execute,
    fetch,
    in_transaction,
    separate_connection,
    wait_until_the_server_hangs_up,
)
from tests.databases import CommittedDatabase
from tests.processes import run_in_threads

CANARY = "canary-in-the-payload"

# Long enough to read the answer before it: libpq drops the server's last words when both come together.
IDLE_LIMIT = "500ms"


def _kill_backend(database: CommittedDatabase) -> None:
    """End the server's process of this connection and wait until it is gone."""
    pid = database.connection.connection.info.backend_pid
    with database.second_connection() as other:
        assert fetch(other, "SELECT pg_terminate_backend(%s, 10000)", pid) == [(True,)]


def _add_lock(database: CommittedDatabase, name: str = "lock") -> None:
    Lock.objects.using(database.alias).create(tenant=database.tenant, name=name)


def _names(database: CommittedDatabase) -> list[str]:
    return list(
        Lock.objects.using(database.alias).filter(tenant=database.tenant).values_list("name", flat=True)
    )


# --- The connection breaks -------------------------------------------------------------------------


def test_a_backend_killed_between_statements_makes_the_store_unavailable_for_one_call(
    postgres_db: CommittedDatabase,
) -> None:
    connection = postgres_db.connection
    execute(connection, "SELECT 1")
    _kill_backend(postgres_db)
    with pytest.raises(StoreUnavailable) as raised, mapped_errors(connection):
        execute(connection, "SELECT 1")
    assert raised.value.to_dict() == {
        "code": "store_unavailable",
        "message": StoreUnavailable.default_message(),
        "retryable": True,
        "applied": "no",
        "database_code": "57P01",
    }
    assert not is_retryable_transaction(raised.value)
    assert fetch(connection, "SELECT 1") == [(1,)]


def test_a_closed_connection_has_no_code_and_makes_the_store_unavailable(
    postgres_db: CommittedDatabase,
) -> None:
    connection = postgres_db.connection
    connection.ensure_connection()
    connection.connection.close()
    with pytest.raises(StoreUnavailable) as raised, mapped_errors(connection):
        execute(connection, "SELECT 1")
    assert raised.value.attributes == {"database_code": None}
    assert fetch(connection, "SELECT 1") == [(1,)]


def test_a_backend_killed_in_the_body_applies_nothing(postgres_db: CommittedDatabase) -> None:
    def body() -> None:
        _add_lock(postgres_db)
        _kill_backend(postgres_db)
        _add_lock(postgres_db, "another")

    with pytest.raises(StoreUnavailable) as raised:
        in_transaction(postgres_db.connection, body)
    assert raised.value.applied == "no"
    assert _names(postgres_db) == []


def test_a_backend_killed_at_commit_leaves_the_outcome_unknown(postgres_db: CommittedDatabase) -> None:
    def body() -> None:
        _add_lock(postgres_db)
        _kill_backend(postgres_db)

    with pytest.raises(OutcomeUnknown) as raised:
        in_transaction(postgres_db.connection, body)
    assert raised.value.to_dict() == {
        "code": "outcome_unknown",
        "message": OutcomeUnknown.default_message(),
        "retryable": False,
        "applied": "unknown",
        "operation_id": None,
    }
    assert _names(postgres_db) == []


def test_a_transaction_ended_because_it_was_idle_was_not_applied_even_when_commit_tells(
    postgres_db: CommittedDatabase,
) -> None:
    connection = postgres_db.connection

    def body() -> None:
        _add_lock(postgres_db)
        execute(connection, f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_LIMIT}'")
        wait_until_the_server_hangs_up(connection)

    with pytest.raises(StoreUnavailable) as raised:
        in_transaction(connection, body)
    assert raised.value.attributes == {"database_code": "25P03"}
    assert (raised.value.retryable, raised.value.applied) == (True, "no")
    assert _names(postgres_db) == []


def test_a_session_ended_because_it_was_idle_makes_the_store_unavailable_for_one_call(
    postgres_db: CommittedDatabase,
) -> None:
    connection = postgres_db.connection
    execute(connection, f"SET idle_session_timeout = '{IDLE_LIMIT}'")
    wait_until_the_server_hangs_up(connection)
    with pytest.raises(StoreUnavailable) as raised, mapped_errors(connection, committing=True):
        _add_lock(postgres_db)
    assert raised.value.attributes == {"database_code": "57P05"}
    _add_lock(postgres_db)


@for_each(
    ("error", "expected"),
    [
        (psycopg.OperationalError, OutcomeUnknown),
        (psycopg.InterfaceError, OutcomeUnknown),
        (psycopg.InternalError, OutcomeUnknown),
        (psycopg_pool.PoolTimeout, OutcomeUnknown),
        (psycopg.DataError, IntegrityFault),
        (psycopg.ProgrammingError, ProgrammingError),
        (psycopg.NotSupportedError, NotSupportedError),
    ],
)
def test_what_psycopg_says_of_itself_has_no_code_and_is_told_by_its_class(
    postgres_db: CommittedDatabase, error: type[psycopg.Error], expected: type[Exception]
) -> None:
    connection = postgres_db.connection
    with (
        pytest.raises(expected) as raised,
        mapped_errors(connection, committing=True),
        connection.wrap_database_errors,
    ):
        raise error(CANARY)
    assert type(raised.value) is expected
    assert isinstance(raised.value, Error) or CANARY not in str(raised.value)


# --- The server does not accept writes -------------------------------------------------------------


def test_a_read_only_server_makes_the_store_unavailable_and_the_connection_is_dropped(
    postgres_db: CommittedDatabase,
) -> None:
    connection = postgres_db.connection
    execute(connection, "SET default_transaction_read_only = on")
    with pytest.raises(StoreUnavailable) as raised:
        in_transaction(connection, lambda: _add_lock(postgres_db))
    assert raised.value.attributes == {"database_code": "25006"}
    assert (raised.value.retryable, raised.value.applied) == (True, "no")
    in_transaction(connection, lambda: _add_lock(postgres_db))
    assert _names(postgres_db) == ["lock"]


def test_a_pool_does_not_hand_out_the_connection_to_a_read_only_server_again(
    postgres_db: CommittedDatabase,
) -> None:
    settings = postgres_db.connection.settings_dict
    pool = {"pool": {"min_size": 1, "max_size": 1}}
    with separate_connection(**{**settings, "OPTIONS": {**settings["OPTIONS"], **pool}}) as connection:
        execute(connection, "SET default_transaction_read_only = on")
        with pytest.raises(StoreUnavailable), mapped_errors(connection):
            execute(connection, "CREATE TABLE never (id integer)")
        assert fetch(connection, "SHOW default_transaction_read_only") == [("off",)]


def test_a_read_only_transaction_of_the_caller_keeps_its_connection(postgres_db: CommittedDatabase) -> None:
    connection = postgres_db.connection
    with transaction.atomic(using=postgres_db.alias):
        execute(connection, "SET TRANSACTION READ ONLY")
        pid = connection.connection.info.backend_pid
        with pytest.raises(StoreUnavailable):
            in_transaction(connection, lambda: _add_lock(postgres_db))
        assert fetch(connection, "SELECT pg_backend_pid()") == [(pid,)]


# --- Somebody else is in the way -------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", " NOWAIT"])
def test_a_row_that_stays_locked_makes_the_store_busy(postgres_db: CommittedDatabase, suffix: str) -> None:
    connection = postgres_db.connection
    _add_lock(postgres_db)
    lock_row = f"SELECT 1 FROM {Lock._meta.db_table} WHERE tenant = %s FOR UPDATE"

    def body() -> None:
        execute(connection, "SET LOCAL lock_timeout = '10ms'")
        execute(connection, lock_row + suffix, postgres_db.tenant)

    with postgres_db.second_connection() as other:
        other.set_autocommit(False)
        execute(other, lock_row, postgres_db.tenant)
        with pytest.raises(StoreBusy) as raised:
            in_transaction(connection, body)
        other.rollback()
    assert raised.value.attributes == {"database_code": "55P03"}
    assert (raised.value.retryable, raised.value.applied) == (True, "no")
    assert is_retryable_transaction(raised.value)
    assert is_retryable_transaction(raised.value.__cause__ or raised.value)


@pytest.mark.thorough
def test_one_of_two_transactions_in_a_deadlock_finds_the_store_busy(postgres_db: CommittedDatabase) -> None:
    for name in ("a", "b"):
        _add_lock(postgres_db, name)
    both_have_one = threading.Barrier(2)

    def lock(first: str, second: str) -> None:
        rows = Lock.objects.using(postgres_db.alias).select_for_update().filter(tenant=postgres_db.tenant)

        def body() -> None:
            rows.get(name=first)
            both_have_one.wait(30)
            rows.get(name=second)

        in_transaction(postgres_db.connection, body)

    outcomes = run_in_threads(lock, [("a", "b"), ("b", "a")])
    (error,) = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert isinstance(error, StoreBusy)
    assert error.attributes == {"database_code": "40P01"}
    assert is_retryable_transaction(error)


def test_a_serialization_failure_at_commit_is_an_answer_and_so_the_store_was_busy(
    postgres_db: CommittedDatabase,
) -> None:
    connection = postgres_db.connection
    count = f"SELECT count(*) FROM {Lock._meta.db_table} WHERE tenant = %s"

    def body() -> None:
        execute(connection, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        assert fetch(connection, count, postgres_db.tenant) == [(0,)]
        with postgres_db.second_connection() as other:
            execute(other, "BEGIN ISOLATION LEVEL SERIALIZABLE")
            assert fetch(other, count, postgres_db.tenant) == [(0,)]
            add = f"INSERT INTO {Lock._meta.db_table} (tenant, name, token) VALUES (%s, 'other', 0)"
            execute(other, add, postgres_db.tenant)
            _add_lock(postgres_db, "mine")
            execute(other, "COMMIT")

    with pytest.raises(StoreBusy) as raised:
        in_transaction(connection, body)
    assert raised.value.attributes == {"database_code": "40001"}
    assert raised.value.applied == "no"
    assert is_retryable_transaction(raised.value)
    assert _names(postgres_db) == ["other"]


# --- It takes too long -----------------------------------------------------------------------------


def test_a_statement_over_its_time_is_a_timeout_and_is_not_retried(postgres_db: CommittedDatabase) -> None:
    connection = postgres_db.connection

    def body() -> None:
        execute(connection, "SET LOCAL statement_timeout = '10ms'")
        execute(connection, "SELECT pg_sleep(60)")

    with pytest.raises(StoreTimeout) as raised:
        in_transaction(connection, body)
    assert raised.value.attributes == {"database_code": "57014"}
    assert (raised.value.retryable, raised.value.applied) == (False, "no")
    assert not is_retryable_transaction(raised.value)


def test_a_transaction_over_its_time_is_a_timeout_and_its_connection_is_dropped(
    postgres_db: CommittedDatabase,
) -> None:
    connection = postgres_db.connection
    connection.ensure_connection()
    if connection.connection.info.server_version < 170000:
        pytest.skip("transaction_timeout came with PostgreSQL 17")
    execute(connection, "SET transaction_timeout = '10ms'")
    with pytest.raises(StoreTimeout) as raised, mapped_errors(connection):
        execute(connection, "SELECT pg_sleep(60)")
    assert raised.value.attributes == {"database_code": "25P04"}
    assert fetch(connection, "SELECT 1") == [(1,)]


def test_a_commit_that_was_cancelled_leaves_the_outcome_unknown(postgres_db: CommittedDatabase) -> None:
    connection = postgres_db.connection
    defer_to_commit(connection, "PERFORM pg_cancel_backend(pg_backend_pid()), pg_sleep(60)")
    with pytest.raises(OutcomeUnknown):
        in_transaction(connection, lambda: execute(connection, "INSERT INTO deferring VALUES (1)"))


# --- The transaction was broken before --------------------------------------------------------------


def test_a_transaction_that_an_earlier_error_aborted_is_a_fault_of_the_caller(
    postgres_db: CommittedDatabase,
) -> None:
    connection = postgres_db.connection
    with transaction.atomic(using=postgres_db.alias):
        with pytest.raises(DataError):
            execute(connection, "SELECT 1 / 0")
        with pytest.raises(TransactionManagementError) as raised, mapped_errors(connection):
            execute(connection, "SELECT 1")
    assert "atomic()" in str(raised.value)
    assert not is_retryable_transaction(raised.value)


# --- A value or a constraint -----------------------------------------------------------------------


@for_each(
    ("code", "sql", "value"),
    [
        ("22P05", "SELECT %s::jsonb", f'"{CANARY}\\u0000"'),
        ("22P02", "SELECT %s::jsonb", f'"{CANARY}\\ud800"'),
        ("22P02", "SELECT %s::integer", CANARY),
        ("22003", "SELECT %s::smallint", 40_000),
        ("22021", "SELECT convert_from(%s, 'UTF8')", f"{CANARY}\0".encode()),
        ("54000", "SELECT chr(%s)", 0),
        ("54001", "SELECT %s::jsonb", "[" * 100_000 + f'"{CANARY}"'),
        (None, "SELECT %s", f"{CANARY}\0"),
    ],
)
def test_a_value_that_got_past_the_gate_is_an_integrity_fault_without_the_value(
    postgres_db: CommittedDatabase, code: str | None, sql: str, value: object
) -> None:
    with pytest.raises(IntegrityFault) as raised, mapped_errors(postgres_db.connection):
        execute(postgres_db.connection, sql, value)
    assert raised.value.attributes == {"database_code": code}
    assert (raised.value.retryable, raised.value.applied) == (False, "no")
    assert CANARY not in "".join(traceback.format_exception(raised.value))


def test_a_unique_row_refused_at_commit_passes_unchanged(postgres_db: CommittedDatabase) -> None:
    connection = postgres_db.connection
    execute(
        connection,
        "CREATE TEMPORARY TABLE late (id integer CONSTRAINT late_uniq UNIQUE DEFERRABLE INITIALLY DEFERRED)",
    )
    with pytest.raises(IntegrityError) as raised:
        in_transaction(connection, lambda: execute(connection, "INSERT INTO late VALUES (1), (1)"))
    assert is_unique_violation(raised.value)
    assert violated_constraint(raised.value) == "late_uniq"
