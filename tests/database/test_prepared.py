"""Prepared statements: what happens when the server has lost them, and to the caller's transaction."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable

import pytest
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import SimpleTestCase
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoDbBlocker

from helix_store.core.types import (
    SessionState,
    StepCommit,
    StepInfo,
)
from helix_store.engine.database import Database
from helix_store.engine.statement import Statement
from helix_store.exceptions import IntegrityFault, StoreBusy
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.database.separate import execute, fetch
from tests.databases import CommittedDatabase

STATE = SessionState(session_id="s", agent_type="t", custom_state={"saved": True})


@pytest.fixture
def store(postgres_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)
    store.create_session("s", agent_type="t")
    step(store, 0)
    assert store.load_state("s") is not None
    return store


def step(store: DatabaseStateStore, number: int) -> StepCommit:
    return store.save_state_and_promote_staging("s", STATE, [], StepInfo(f"step-{number}", number))


def version(store: DatabaseStateStore) -> int:
    state = store.load_state("s")
    assert state is not None
    return state.version


class NoQueries(SimpleTestCase):
    """A test of a project that may not use any database."""


def test_a_test_that_may_not_use_a_database_sends_no_statement(
    store: DatabaseStateStore, django_db_blocker: DjangoDbBlocker
) -> None:
    calls: list[Callable[[], object]] = [lambda: store.load_state("s"), lambda: step(store, 1)]
    for call in calls:
        NoQueries.setUpClass()
        try:
            with pytest.raises(AssertionError, match="are not allowed"):
                call()
        finally:
            NoQueries.doClassCleanups()
        with django_db_blocker.block(), pytest.raises(RuntimeError, match="Database access not allowed"):
            call()
    assert version(store) == 2


@pytest.mark.parametrize("inside", [True, False], ids=["inside atomic", "alone"])
def test_statements_that_the_server_has_lost_are_sent_whole(
    store: DatabaseStateStore, postgres_db: CommittedDatabase, inside: bool
) -> None:
    execute(postgres_db.connection, "DEALLOCATE ALL")
    if inside:
        with transaction.atomic(using=postgres_db.alias):
            assert version(store) == 2
            step(store, 1)
    else:
        assert version(store) == 2
        step(store, 1)
    assert version(store) == 3
    assert fetch(postgres_db.connection, "SELECT count(*) FROM pg_prepared_statements") == [(0,)]


def test_a_lost_write_alone_is_sent_whole(store: DatabaseStateStore, postgres_db: CommittedDatabase) -> None:
    execute(postgres_db.connection, "DEALLOCATE ALL")
    step(store, 1)
    assert version(store) == 3


BYTES = {
    "none": b"",
    "a zero": b"\0",
    "what text would quote": b"\"\\{},NULL'\n",
    "every byte": bytes(range(256)),
    "many": b"\xff" * 100_000,
}


@for_each("value", BYTES.values(), ids=BYTES, shared=True)
def test_bytes_are_sent_as_they_are_and_shown_in_the_query_log(
    postgres_db: CommittedDatabase, value: bytes
) -> None:
    statement = Statement(
        "SELECT %(alone)s::bytea, %(list)s::bytea[], %(empty)s::bytea[], %(texts)s::text[], %(none)s::bytea"
    )
    listed = [value, *BYTES.values()]
    parameters = {"alone": value, "list": listed, "empty": [], "texts": ["a"], "none": None}
    database = Database(postgres_db.alias, "")
    with CaptureQueriesContext(connections[postgres_db.alias]) as captured:
        found = [database.read(statement, parameters)]
        with transaction.atomic(using=postgres_db.alias):
            found.append(database.read(statement, parameters))
    assert found == [[(value, listed, [], ["a"], None)]] * 2
    assert f"'\\x{value.hex()}'" in captured[0]["sql"]


def test_a_closed_connection_is_not_kept(store: DatabaseStateStore, postgres_db: CommittedDatabase) -> None:
    closed = weakref.ref(postgres_db.connection.connection)
    assert closed() is not None
    postgres_db.connection.close()
    assert closed() is None


def test_nothing_is_prepared_behind_a_pooler(
    store: DatabaseStateStore, other: BaseDatabaseWrapper, postgres_db: CommittedDatabase
) -> None:
    other.settings_dict["DISABLE_SERVER_SIDE_CURSORS"] = True
    others_store = DatabaseStateStore(other.alias, tenant=postgres_db.tenant)
    step(others_store, 1)
    assert version(others_store) == 3
    assert fetch(other, "SELECT count(*) FROM pg_prepared_statements") == [(0,)]


def test_a_statement_that_the_database_gives_up_leaves_the_callers_transaction_usable(
    store: DatabaseStateStore, other: BaseDatabaseWrapper, postgres_db: CommittedDatabase
) -> None:
    others_store = DatabaseStateStore(other.alias, tenant=postgres_db.tenant)
    execute(other, "SET lock_timeout = '50ms'")
    with transaction.atomic(using=postgres_db.alias):
        store.update_status("s", "active")
        with transaction.atomic(using=other.alias):
            others_store.create_session("mine", agent_type="t")
            with pytest.raises(StoreBusy):
                step(others_store, 1)
            others_store.append_messages("mine", [{"role": "user", "content": "kept"}])
    assert others_store.get_messages("mine").total == 1
    assert version(store) == 3


def test_a_transaction_that_was_aborted_before_says_so(
    store: DatabaseStateStore, postgres_db: CommittedDatabase
) -> None:
    with transaction.atomic(using=postgres_db.alias):
        driver = postgres_db.connection.connection
        with pytest.raises(Exception, match="division by zero"):
            driver.execute("SELECT 1 / 0")
        with pytest.raises(transaction.TransactionManagementError):
            step(store, 1)
        transaction.set_rollback(True, using=postgres_db.alias)
    assert version(store) == 2


def test_a_transaction_begins_as_the_driver_would_begin_it(
    store: DatabaseStateStore, postgres_db: CommittedDatabase
) -> None:
    driver = postgres_db.connection.connection
    before = driver.isolation_level
    driver.isolation_level = 3  # psycopg's repeatable read
    try:
        with transaction.atomic(using=postgres_db.alias):
            step(store, 1)
            shown = fetch(postgres_db.connection, "SHOW transaction_isolation")
    finally:
        driver.isolation_level = before
    assert shown == [("repeatable read",)]
    assert version(store) == 3


def test_a_rolled_back_block_takes_its_steps_along(
    store: DatabaseStateStore, postgres_db: CommittedDatabase
) -> None:
    with transaction.atomic(using=postgres_db.alias):
        step(store, 1)
        assert version(store) == 3
        transaction.set_rollback(True, using=postgres_db.alias)
    assert version(store) == 2


def test_a_step_finds_its_staged_changes_by_an_index_where_few_are_staged(
    store: DatabaseStateStore, postgres_db: CommittedDatabase
) -> None:
    # A table that has been in use, and whose dead rows are gone.
    connection = postgres_db.connection
    long = {"tool_call_id": "call", "merge_changes": {"long": "x" * 1_000}}
    for number in range(200):
        store.stage_changes("s", "earlier", {**long, "tool_call_id": f"call-{number}"})
    assert store.discard_staging("s", "earlier") == 200
    execute(connection, "VACUUM ANALYZE helix_store_staged_change")

    for number in range(1, 20):
        store.stage_changes("s", f"step-{number}", long)
        step(store, number)
    kept = fetch(
        connection,
        "SELECT name, statement FROM pg_prepared_statements "
        "WHERE statement LIKE '%deleted_staging AS%' AND generic_plans > 0",
    )
    assert kept
    for name, statement in kept:
        nulls = ", ".join("NULL" for _ in set(re.findall(r"\$\d+", str(statement))))
        plan = fetch(connection, f"EXPLAIN EXECUTE {name}({nulls})")
        assert not [line for (line,) in plan if "staged_change_pkey" in str(line)], "the keys of all steps"
        reads = [line for (line,) in plan if "Scan" in str(line) and "helix_store_staged_change" in str(line)]
        assert len(reads) == 2
        assert not [line for line in reads if "Seq Scan" in str(line)], "\n".join(
            str(line) for (line,) in plan
        )


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/St_Johns"])
def test_moments_are_read_in_any_time_zone(
    store: DatabaseStateStore, postgres_db: CommittedDatabase, zone: str
) -> None:
    expected = Session.objects.using(postgres_db.alias).get(tenant=postgres_db.tenant)
    execute(postgres_db.connection, f"SET timezone = '{zone}'")
    try:
        state = store.load_state("s")
    finally:
        execute(postgres_db.connection, "SET timezone = 'UTC'")
    assert state is not None
    assert state.created_at == expected.created_at
    assert state.updated_at == expected.updated_at
    assert state.updated_at is not None
    assert state.updated_at.utcoffset() is not None


def test_a_moment_in_another_format_is_no_state(
    store: DatabaseStateStore, postgres_db: CommittedDatabase
) -> None:
    execute(postgres_db.connection, "SET datestyle = 'German'")
    try:
        with pytest.raises(IntegrityFault):
            store.load_state("s")
    finally:
        execute(postgres_db.connection, "SET datestyle = 'ISO'")
    assert version(store) == 2
