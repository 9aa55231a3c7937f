"""Which calls wait on PostgreSQL: no call for a lock, a write for a takeover, no holder for itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import pytest
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.exceptions import FencedOutError, StoreBusy
from helix_store.models import Lock as LockRow
from helix_store.models import Session
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, Lock
from tests.database.separate import execute, fetch, separate_connection
from tests.database.waiting import in_background, until_it_waits
from tests.databases import CommittedDatabase

MESSAGE = {"role": "user", "content": "hello"}

T = TypeVar("T")


@pytest.fixture
def impatient(postgres_db: CommittedDatabase) -> CommittedDatabase:
    """The database through a connection on which waiting is an error."""
    execute(postgres_db.connection, "SET statement_timeout = '5s'")
    return postgres_db


@pytest.fixture
def other(postgres_db: CommittedDatabase) -> Iterator[BaseDatabaseWrapper]:
    """The connection of another worker."""
    with separate_connection(**postgres_db.connection.settings_dict) as connection:
        execute(connection, "SET statement_timeout = '20s'")
        yield connection


@pytest.fixture
def locks(impatient: CommittedDatabase) -> DatabaseLockManager:
    return DatabaseLockManager(impatient.alias, tenant=impatient.tenant, default_ttl_ms=60_000)


@pytest.fixture
def others_locks(other: BaseDatabaseWrapper, postgres_db: CommittedDatabase) -> DatabaseLockManager:
    return DatabaseLockManager(other.alias, tenant=postgres_db.tenant, default_ttl_ms=60_000)


@pytest.fixture
def store(impatient: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(impatient.alias, tenant=impatient.tenant)
    store.create_session("session", agent_type="agent")
    return store


@pytest.fixture
def others_store(
    store: DatabaseStateStore, other: BaseDatabaseWrapper, postgres_db: CommittedDatabase
) -> DatabaseStateStore:
    return DatabaseStateStore(other.alias, tenant=postgres_db.tenant)


def acquired(locks: DatabaseLockManager, name: str = "session") -> Lock:
    lock = locks.acquire(name)
    assert lock is not None
    return lock


def expire(database: CommittedDatabase) -> None:
    rows = LockRow.objects.using(database.alias).filter(tenant=database.tenant)
    rows.update(expires_at=datetime.now(UTC) - timedelta(hours=1))


# No call waits for a lock


def test_a_name_that_is_being_created_is_refused_at_once(
    other: BaseDatabaseWrapper, locks: DatabaseLockManager, others_locks: DatabaseLockManager
) -> None:
    with transaction.atomic(using=other.alias):
        assert acquired(others_locks).fencing_token == 1
        assert locks.acquire("session") is None
        assert locks.acquire("another") is not None
    assert locks.acquire("session") is None


def test_a_row_that_is_being_taken_is_refused_at_once(
    other: BaseDatabaseWrapper, locks: DatabaseLockManager, others_locks: DatabaseLockManager
) -> None:
    acquired(locks).release()
    with transaction.atomic(using=other.alias):
        assert acquired(others_locks).fencing_token == 2
        assert locks.acquire("session") is None
        transaction.set_rollback(True, using=other.alias)
    assert acquired(locks).fencing_token == 2


def test_a_row_that_another_transaction_has_locked_is_refused_at_once(
    impatient: CommittedDatabase, other: BaseDatabaseWrapper, locks: DatabaseLockManager
) -> None:
    acquired(locks).release()
    for strength in ("UPDATE", "NO KEY UPDATE", "SHARE", "KEY SHARE"):
        with transaction.atomic(using=other.alias):
            table = LockRow._meta.db_table
            fetch(other, f"SELECT 1 FROM {table} WHERE tenant = %s FOR {strength}", impatient.tenant)
            assert locks.acquire("session") is None
    assert acquired(locks).fencing_token == 2


# The advisory lock


def advisory_locks(connection: BaseDatabaseWrapper) -> int:
    ((count,),) = fetch(
        connection,
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
    )
    return int(count)


def test_the_advisory_lock_ends_with_the_transaction(
    impatient: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    acquired(locks, "free").release()
    assert advisory_locks(impatient.connection) == 0
    with transaction.atomic(using=impatient.alias):
        acquired(locks, "free")
        assert advisory_locks(impatient.connection) == 1
        acquired(locks, "new")
        assert advisory_locks(impatient.connection) == 2
    assert advisory_locks(impatient.connection) == 0


def test_a_refusal_keeps_no_advisory_lock_for_the_rest_of_the_callers_transaction(
    impatient: CommittedDatabase, locks: DatabaseLockManager, others_locks: DatabaseLockManager
) -> None:
    held = acquired(others_locks)
    with transaction.atomic(using=impatient.alias):
        assert locks.acquire("session") is None
        assert advisory_locks(impatient.connection) == 0
        held.release()
        assert acquired(others_locks).fencing_token == 2


def test_the_same_name_in_another_schema_is_another_lock(
    impatient: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    """Projects with a schema for each tenant share no advisory lock."""
    schema = impatient.tenant
    execute(impatient.connection, f'CREATE SCHEMA "{schema}"')
    for table in (LockRow._meta.db_table, Session._meta.db_table):
        execute(impatient.connection, f'CREATE TABLE "{schema}".{table} (LIKE public.{table} INCLUDING ALL)')
    settings = impatient.connection.settings_dict
    options = {**settings["OPTIONS"], "options": f'-c search_path="{schema}"'}
    with separate_connection(**{**settings, "OPTIONS": options}) as connection:
        theirs = DatabaseLockManager(connection.alias, tenant=impatient.tenant)
        with transaction.atomic(using=connection.alias):
            acquired(theirs)
            acquired(locks)
    execute(impatient.connection, f'DROP SCHEMA "{schema}" CASCADE')


# A takeover cannot slip between the fence and the commit


def test_a_guarded_write_keeps_the_lock_from_being_taken_over_until_it_commits(
    impatient: CommittedDatabase,
    other: BaseDatabaseWrapper,
    locks: DatabaseLockManager,
    others_locks: DatabaseLockManager,
    others_store: DatabaseStateStore,
) -> None:
    former = acquired(others_locks)
    expire(impatient)
    with transaction.atomic(using=other.alias):
        others_store.append_messages("session", [MESSAGE], fencing_token=former.fencing_token)
        assert locks.acquire("session") is None
    assert acquired(locks).fencing_token == 2
    assert others_store.get_message_count("session") == 1


def test_a_guarded_write_waits_for_a_takeover_and_is_fenced_out_by_it(
    impatient: CommittedDatabase,
    other: BaseDatabaseWrapper,
    locks: DatabaseLockManager,
    others_locks: DatabaseLockManager,
    others_store: DatabaseStateStore,
) -> None:
    former = acquired(others_locks)
    expire(impatient)
    with transaction.atomic(using=impatient.alias):
        successor = acquired(locks)
        write = in_background(
            other,
            lambda: others_store.append_messages("session", [MESSAGE], fencing_token=former.fencing_token),
        )
        until_it_waits(impatient, other)
    error = write()
    assert isinstance(error, FencedOutError)
    assert (error.token, error.current_token) == (former.fencing_token, successor.fencing_token)
    assert others_store.get_message_count("session") == 0


def test_a_guarded_write_survives_a_takeover_that_is_rolled_back(
    impatient: CommittedDatabase,
    other: BaseDatabaseWrapper,
    locks: DatabaseLockManager,
    others_locks: DatabaseLockManager,
    others_store: DatabaseStateStore,
) -> None:
    former = acquired(others_locks)
    expire(impatient)
    with transaction.atomic(using=impatient.alias):
        acquired(locks)
        write = in_background(
            other,
            lambda: others_store.append_messages("session", [MESSAGE], fencing_token=former.fencing_token),
        )
        until_it_waits(impatient, other)
        transaction.set_rollback(True, using=impatient.alias)
    assert write() == 1


def test_an_operator_does_not_wait_for_a_stuck_write_but_the_next_holder_does(
    impatient: CommittedDatabase,
    other: BaseDatabaseWrapper,
    locks: DatabaseLockManager,
    others_locks: DatabaseLockManager,
    others_store: DatabaseStateStore,
) -> None:
    held = acquired(others_locks)

    def write() -> int:
        return others_store.append_messages("session", [MESSAGE], fencing_token=held.fencing_token)

    with transaction.atomic(using=other.alias):
        write()
        assert locks.force_release("session")
        assert locks.acquire("session") is None
        with pytest.raises(FencedOutError):
            write()
    assert acquired(locks).fencing_token > held.fencing_token
    assert others_store.get_message_count("session") == 1


# The lock order inside a block: session row, then lock row


def test_a_takeover_and_a_write_in_one_block_do_not_deadlock_with_the_former_holder(
    impatient: CommittedDatabase,
    other: BaseDatabaseWrapper,
    locks: DatabaseLockManager,
    others_locks: DatabaseLockManager,
    store: DatabaseStateStore,
    others_store: DatabaseStateStore,
) -> None:
    former = acquired(others_locks)
    expire(impatient)

    def write_of_the_former_holder() -> int:
        # In a block of the caller, so that the store does not hide a deadlock by another attempt.
        with transaction.atomic(using=other.alias):
            return others_store.append_messages("session", [MESSAGE], fencing_token=former.fencing_token)

    with transaction.atomic(using=impatient.alias):
        successor = acquired(locks)
        write = in_background(other, write_of_the_former_holder)
        until_it_waits(impatient, other)
        store.append_messages("session", [MESSAGE], fencing_token=successor.fencing_token)
    assert isinstance(write(), FencedOutError)
    assert store.get_message_count("session") == 1


def test_a_block_that_takes_a_new_name_locks_its_session(
    impatient: CommittedDatabase,
    other: BaseDatabaseWrapper,
    locks: DatabaseLockManager,
    store: DatabaseStateStore,
    others_store: DatabaseStateStore,
) -> None:
    with transaction.atomic(using=impatient.alias):
        lock = acquired(locks)
        write = in_background(other, lambda: others_store.append_messages("session", [MESSAGE]))
        until_it_waits(impatient, other)
        store.append_messages("session", [MESSAGE], fencing_token=lock.fencing_token)
    assert write() == 2


def test_a_block_is_refused_at_once_while_the_session_is_written_to(
    impatient: CommittedDatabase,
    other: BaseDatabaseWrapper,
    locks: DatabaseLockManager,
    others_store: DatabaseStateStore,
) -> None:
    for token in (1, 2):
        with transaction.atomic(using=other.alias):
            others_store.append_messages("session", [MESSAGE])
            with transaction.atomic(using=impatient.alias):
                assert locks.acquire("session") is None
                assert advisory_locks(impatient.connection) == 0
        with transaction.atomic(using=impatient.alias):
            lock = acquired(locks)
        assert lock.fencing_token == token
        assert lock.release()


def test_outside_of_a_block_a_busy_session_keeps_no_worker_from_its_lock(
    other: BaseDatabaseWrapper, locks: DatabaseLockManager, others_store: DatabaseStateStore
) -> None:
    with transaction.atomic(using=other.alias):
        others_store.append_messages("session", [MESSAGE])
        acquired(locks).release()
        assert acquired(locks).fencing_token == 2


def test_without_autocommit_an_acquisition_is_part_of_the_callers_transaction(
    impatient: CommittedDatabase,
    other: BaseDatabaseWrapper,
    locks: DatabaseLockManager,
    others_store: DatabaseStateStore,
) -> None:
    transaction.set_autocommit(False, using=impatient.alias)
    try:
        with transaction.atomic(using=other.alias):
            others_store.append_messages("session", [MESSAGE])
            assert locks.acquire("session") is None
        assert locks.acquire("session") is not None
        transaction.commit(using=impatient.alias)
    finally:
        transaction.set_autocommit(True, using=impatient.alias)


def test_a_block_that_has_written_to_the_session_may_take_its_lock(
    impatient: CommittedDatabase, locks: DatabaseLockManager, store: DatabaseStateStore
) -> None:
    with transaction.atomic(using=impatient.alias):
        store.append_messages("session", [MESSAGE])
        assert acquired(locks).fencing_token == 1
        assert acquired(locks, "a name without a session").fencing_token == 1


def test_a_refusal_of_a_held_name_does_not_lock_its_session(
    impatient: CommittedDatabase,
    locks: DatabaseLockManager,
    others_locks: DatabaseLockManager,
    others_store: DatabaseStateStore,
) -> None:
    held = acquired(others_locks)
    with transaction.atomic(using=impatient.alias):
        assert locks.acquire("session") is None
        others_store.append_messages("session", [MESSAGE], fencing_token=held.fencing_token)
    assert others_store.get_message_count("session") == 1


def test_a_block_finds_the_session_of_its_tenant_alone(
    impatient: CommittedDatabase,
    other: BaseDatabaseWrapper,
    others_store: DatabaseStateStore,
) -> None:
    elsewhere = DatabaseLockManager(impatient.alias, tenant=f"{impatient.tenant} of another")
    with transaction.atomic(using=other.alias):
        others_store.append_messages("session", [MESSAGE])
        with transaction.atomic(using=impatient.alias):
            assert acquired(elsewhere).fencing_token == 1
            transaction.set_rollback(True, using=impatient.alias)


# A holder does not wait for itself


def test_a_holder_refreshes_and_releases_while_its_own_guarded_write_is_open(
    other: BaseDatabaseWrapper,
    locks: DatabaseLockManager,
    others_store: DatabaseStateStore,
) -> None:
    lock = acquired(locks)
    with transaction.atomic(using=other.alias):
        others_store.append_messages("session", [MESSAGE], fencing_token=lock.fencing_token)
        lock.refresh()
        assert lock.release()
        assert locks.acquire("session") is None
    assert acquired(locks).fencing_token == 2


@pytest.mark.usefixtures("machine")
def test_a_keep_alive_stops_inside_a_transaction_that_holds_the_row(
    impatient: CommittedDatabase, locks: DatabaseLockManager, store: DatabaseStateStore
) -> None:
    lock = locks.acquire("session", ttl_ms=1_500)
    assert lock is not None
    first_end = lock.expires_at
    with transaction.atomic(using=impatient.alias):
        store.append_messages("session", [MESSAGE], fencing_token=lock.fencing_token)
        with lock.keep_alive():
            deadline = time.monotonic() + 30
            while lock.expires_at == first_end:
                assert time.monotonic() < deadline
    assert lock.release()


def test_a_slow_refresh_does_not_prolong_trust(
    impatient: CommittedDatabase, other: BaseDatabaseWrapper, others_locks: DatabaseLockManager
) -> None:
    lock = others_locks.acquire("session", ttl_ms=500)
    assert lock is not None
    with transaction.atomic(using=impatient.alias):
        table = LockRow._meta.db_table
        fetch(impatient.connection, f"SELECT 1 FROM {table} WHERE tenant = %s FOR UPDATE", impatient.tenant)
        requested_at = time.monotonic()
        refresh = in_background(other, lock.refresh)
        until_it_waits(impatient, other)
        while lock.is_trusted() or time.monotonic() - requested_at < 0.5:
            assert time.monotonic() - requested_at < 30
    assert isinstance(refresh(), datetime)
    assert not lock.is_trusted()


# The rest of the server


@pytest.mark.thorough
def test_a_keep_alive_has_no_connection_between_two_beats(
    impatient: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    def connected() -> int:
        rows = fetch(
            impatient.connection,
            "SELECT 1 FROM pg_stat_activity "
            "WHERE datname = current_database() AND backend_type = 'client backend'",
        )
        return len(rows)

    before = connected()
    kept = [locks.acquire(f"name-{number}", ttl_ms=3_000) for number in range(5)]
    ends = [lock.expires_at for lock in kept if lock is not None]
    assert len(ends) == len(kept)
    for lock in kept:
        assert lock is not None
        lock.keep_alive()
    deadline = time.monotonic() + 30
    while connected() > before or any(
        lock is not None and lock.expires_at == end for lock, end in zip(kept, ends, strict=True)
    ):
        assert time.monotonic() < deadline
    for lock in kept:
        assert lock is not None
        assert lock.release()


def test_a_function_on_the_search_path_does_not_become_the_clock(
    impatient: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    schema = impatient.tenant
    execute(impatient.connection, f'CREATE SCHEMA "{schema}"')
    execute(
        impatient.connection,
        f'CREATE FUNCTION "{schema}".clock_timestamp() RETURNS timestamptz LANGUAGE sql '
        "AS $$ SELECT '1999-01-01'::timestamptz $$",
    )
    execute(impatient.connection, f'SET search_path = "{schema}", pg_catalog, public')
    assert fetch(impatient.connection, "SELECT extract(year FROM clock_timestamp())") == [(1999,)]
    lock = acquired(locks)
    assert lock.expires_at.year == datetime.now(UTC).year
    assert locks.is_locked("session")
    execute(impatient.connection, "SET search_path = DEFAULT")
    execute(impatient.connection, f'DROP SCHEMA "{schema}" CASCADE')


def test_an_acquisition_on_a_lost_connection_is_made_on_another_one(
    impatient: CommittedDatabase, other: BaseDatabaseWrapper, others_locks: DatabaseLockManager
) -> None:
    others_locks.is_locked("session")
    fetch(impatient.connection, "SELECT pg_terminate_backend(%s, 5000)", other.connection.info.backend_pid)
    assert acquired(others_locks).fencing_token == 1


def test_a_holders_refresh_gives_up_when_the_database_tells_it_to(
    impatient: CommittedDatabase, other: BaseDatabaseWrapper, locks: DatabaseLockManager
) -> None:
    lock = acquired(locks)
    execute(impatient.connection, "SET lock_timeout = '50ms'")
    with transaction.atomic(using=other.alias):
        table = LockRow._meta.db_table
        fetch(other, f"SELECT 1 FROM {table} WHERE tenant = %s FOR UPDATE", impatient.tenant)
        with pytest.raises(StoreBusy):
            lock.refresh()
    assert lock.is_trusted()
    lock.refresh()


def test_a_call_that_fails_leaves_the_callers_transaction_usable(
    impatient: CommittedDatabase,
    other: BaseDatabaseWrapper,
    locks: DatabaseLockManager,
    store: DatabaseStateStore,
) -> None:
    lock = acquired(locks)
    execute(impatient.connection, "SET lock_timeout = '50ms'")
    with transaction.atomic(using=impatient.alias):
        with transaction.atomic(using=other.alias):
            table = LockRow._meta.db_table
            fetch(other, f"SELECT 1 FROM {table} WHERE tenant = %s FOR UPDATE", impatient.tenant)
            with pytest.raises(StoreBusy):
                lock.refresh()
        store.append_messages("session", [MESSAGE], fencing_token=lock.fencing_token)
    assert store.get_message_count("session") == 1


@contextmanager
def without_truncation(database: CommittedDatabase) -> Iterator[None]:
    """While autovacuum cuts off the empty end of a table, every statement on it waits."""
    table = connections[database.alias].ops.quote_name(LockRow._meta.db_table)
    execute(database.connection, f"ALTER TABLE {table} SET (vacuum_truncate = off)")
    try:
        yield
    finally:
        execute(database.connection, f"ALTER TABLE {table} RESET (vacuum_truncate)")


@pytest.mark.thorough
def test_waiters_are_many_and_the_server_sees_no_queue(
    impatient: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    held = acquired(locks)
    stop = threading.Event()

    def ask() -> int:
        refused = 0
        try:
            while not stop.is_set():
                assert locks.acquire("session") is None
                refused += 1
        finally:
            connections.close_all()
        return refused

    with without_truncation(impatient), ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask) for _ in range(8)]
        try:
            for _ in range(200):
                waiting = fetch(
                    impatient.connection,
                    "SELECT locktype, mode, relation::regclass, query FROM pg_locks "
                    "JOIN pg_stat_activity USING (pid) WHERE NOT granted AND datname = current_database()",
                )
                assert waiting == []
        finally:
            stop.set()
        assert all(each.result() > 0 for each in asking)
    assert held.release()
