"""Statements by Python's own sqlite3 come to the same as by Django's cursor, which keeps what is its own."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, IntegrityError, OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext, override_settings

from helix_store.core.types import SessionState, StepInfo
from helix_store.engine.database import Scope
from helix_store.engine.direct import is_direct, run_directly
from helix_store.engine.statement import (
    fetched_rows,
    insert_row,
    update_row,
)
from helix_store.models import Lock, Session
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase

pytestmark = pytest.mark.filterwarnings("error")

STATE = SessionState(session_id="s", agent_type="t", tags=["a"], custom_state={"saved": True})
INSERTION = "INSERT INTO helix_store_lock (tenant, name, token) VALUES (%s, %s, 1)"


@pytest.fixture
def connection(sqlite_db: CommittedDatabase) -> BaseDatabaseWrapper:
    sqlite_db.connection.ensure_connection()
    return sqlite_db.connection


@pytest.fixture
def store(sqlite_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(sqlite_db.alias, tenant=sqlite_db.tenant)
    store.create_session("s", agent_type="t")
    return store


def step(store: DatabaseStateStore) -> None:
    store.save_state_and_promote_staging("s", STATE, [{"role": "user"}], StepInfo("step", 1))


def test_a_plain_connection_is_worked_on_directly(connection: BaseDatabaseWrapper) -> None:
    assert is_direct(connection)


def test_nothing_is_direct_where_django_has_something_to_do(connection: BaseDatabaseWrapper) -> None:
    with connection.execute_wrapper(lambda execute, *args: execute(*args)):
        assert not is_direct(connection)
    with CaptureQueriesContext(connection):
        assert not is_direct(connection)
    with override_settings(HELIX_STORE={"FAST_PATHS": False}):
        assert not is_direct(connection)
    assert is_direct(connection)


def test_nothing_is_direct_on_postgresql_or_without_a_connection(
    postgres_db: CommittedDatabase, sqlite_db: CommittedDatabase
) -> None:
    postgres_db.connection.ensure_connection()
    assert not is_direct(postgres_db.connection)
    with sqlite_db.second_connection() as unconnected:
        assert not is_direct(unconnected)
        assert fetched_rows(unconnected, "SELECT %s", ["connects"]) == [("connects",)]
        assert is_direct(unconnected)


def test_a_wrapper_sees_every_statement_of_a_step(
    store: DatabaseStateStore, connection: BaseDatabaseWrapper
) -> None:
    seen: list[str] = []

    def note(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        seen.append(sql.split(maxsplit=1)[0])
        return execute(sql, *args)

    with connection.execute_wrapper(note):
        step(store)
    assert seen == ["BEGIN", "SELECT", "DELETE", "INSERT", "UPDATE", "UPDATE"]


@pytest.mark.parametrize(
    ("sql", "parameters", "row"),
    [
        ("SELECT %s, %s", ["a", None], ("a", None)),
        ("SELECT %(b)s, %(a)s, %(b)s", {"a": 1, "b": 2.5, "unused": ""}, (2.5, 1, 2.5)),
        ("SELECT '%%', '%%s', '%%(a)s', %s", ["%s"], ("%", "%s", "%(a)s", "%s")),
        ("SELECT 7 %% %s", [4], (3,)),
        ("SELECT strftime('%%Y', %(at)s)", {"at": "2026-11-21"}, ("2026",)),
    ],
)
def test_placeholders_are_those_of_django(
    connection: BaseDatabaseWrapper, sql: str, parameters: Any, row: tuple[Any, ...]
) -> None:
    assert run_directly(connection, sql, parameters) == [row]
    with connection.cursor() as cursor:
        assert cursor.execute(sql, parameters).fetchall() == [row]


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2026, 11, 21, 23, 59, 59, 123456, UTC),
        datetime(2026, 11, 21, 0, 0, 0, 0, UTC),
        datetime(2026, 11, 21, 1, 2, 3, 4, timezone(timedelta(hours=5, minutes=30))),
    ],
)
def test_moments_are_stored_as_by_the_orm(
    store: DatabaseStateStore, sqlite_db: CommittedDatabase, moment: datetime
) -> None:
    sessions = Session.objects.using(sqlite_db.alias).filter(tenant=sqlite_db.tenant)
    (key,) = sessions.values_list("pk", flat=True)
    read = "SELECT CAST(updated_at AS text) FROM helix_store_session WHERE id = %s"
    sessions.update(updated_at=moment)
    by_the_orm = run_directly(sqlite_db.connection, read, [key])
    sessions.update(updated_at=datetime(2000, 1, 1, tzinfo=UTC))
    update_row(Scope(sqlite_db.alias, sqlite_db.tenant, None), Session, key, {"updated_at": moment})
    assert run_directly(sqlite_db.connection, read, [key]) == by_the_orm
    assert sessions.get().updated_at == moment


def test_errors_are_those_of_django(connection: BaseDatabaseWrapper, sqlite_db: CommittedDatabase) -> None:
    run_directly(connection, INSERTION, [sqlite_db.tenant, "once"])
    with pytest.raises(IntegrityError) as raised:
        run_directly(connection, INSERTION, [sqlite_db.tenant, "once"])
    assert isinstance(raised.value.__cause__, sqlite3.IntegrityError)
    with pytest.raises(OperationalError):
        run_directly(connection, "SELECT nothing FROM nowhere", [])


def test_a_statement_joins_the_transaction_that_django_began(
    connection: BaseDatabaseWrapper, sqlite_db: CommittedDatabase
) -> None:
    scope = Scope(sqlite_db.alias, sqlite_db.tenant, None)
    locks = Lock.objects.using(sqlite_db.alias).filter(tenant=sqlite_db.tenant)
    with transaction.atomic(using=sqlite_db.alias):
        insert_row(scope, Lock, {"tenant": sqlite_db.tenant, "name": "gone", "token": 1})
        assert locks.count() == 1
        transaction.set_rollback(True, using=sqlite_db.alias)
    assert not locks.exists()


def test_a_broken_transaction_takes_no_statement(
    connection: BaseDatabaseWrapper, sqlite_db: CommittedDatabase
) -> None:
    with transaction.atomic(using=sqlite_db.alias):
        with pytest.raises(DatabaseError), transaction.atomic(using=sqlite_db.alias, savepoint=False):
            run_directly(connection, "SELECT nothing FROM nowhere", [])
        with pytest.raises(TransactionManagementError):
            run_directly(connection, "SELECT 1", [])


def test_another_thread_may_not_use_the_connection(connection: BaseDatabaseWrapper) -> None:
    refused: list[type[BaseException]] = []

    def use() -> None:
        try:
            run_directly(connection, "SELECT 1", [])
        except DatabaseError as exc:
            refused.append(type(exc))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert refused == [DatabaseError]


async def test_an_event_loop_may_not_be_blocked(sqlite_db: CommittedDatabase) -> None:
    with pytest.raises(SynchronousOnlyOperation):
        run_directly(sqlite_db.connection, "SELECT 1", [])


def test_a_step_writes_the_columns_that_change(
    store: DatabaseStateStore, connection: BaseDatabaseWrapper
) -> None:
    step(store)
    with CaptureQueriesContext(connection) as captured:
        step(store)
    (update,) = [query["sql"] for query in captured.captured_queries if query["sql"].startswith("UPDATE")]
    written = set(re.findall(r'"(\w+)" = ', update))
    assert written == {"version", "updated_at", "message_count", "current_id", "base_key"}
    state = store.load_state("s")
    assert state is not None
    assert (state.tags, state.step_count, state.message_count) == (["a"], 0, 2)
