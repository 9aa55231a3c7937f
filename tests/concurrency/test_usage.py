"""Recording usage beside steps, deletions and other recording, on committed data."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from django.db import connections, transaction

from helix_store.exceptions import SessionNotFound
from helix_store.models import UsageEntry
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.usage.base import (
    custom,
    rolled_up,
    tokens,
)
from tests.databases import CommittedDatabase
from tests.processes import run_in_processes, run_in_threads

pytestmark = pytest.mark.usefixtures("machine")

T = TypeVar("T")

WRITERS = 8
PATIENCE_SECONDS = 30


def stores(database: CommittedDatabase) -> tuple[DatabaseStateStore, DatabaseUsageStore]:
    return (
        DatabaseStateStore(database.alias, tenant=database.tenant),
        DatabaseUsageStore(database.alias, tenant=database.tenant),
    )


def record_fifty(alias: str, tenant: str, writer: int) -> int:
    usage = DatabaseUsageStore(alias, tenant=tenant)
    for number in range(25):
        usage.record_entry(custom(f"session-{writer % 2}", id=f"{writer} {number}"))
        usage.record_entries(
            [custom(f"session-{side}", id=f"shared {writer // 2} {number} {side}") for side in (0, 1)]
        )
    return usage.query_usage(limit=1).total or 0


def record_until_it_is_gone(alias: str, tenant: str, writer: int) -> list[str]:
    usage = DatabaseUsageStore(alias, tenant=tenant)
    names = ("child", "parent") if writer % 2 else ("parent", "child")
    for number in range(10_000):
        try:
            if writer % 4 < 2:
                usage.record_entry(tokens(names[number % 2]))
            else:
                usage.record_entries(tokens(name) for name in names)
        except SessionNotFound as error:
            return [str(error.session_id)]
    return []


def delete_once_something_is_spent(alias: str, tenant: str, keep_usage: bool) -> list[str]:
    sessions = DatabaseStateStore(alias, tenant=tenant)
    usage = DatabaseUsageStore(alias, tenant=tenant)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(usage.get_entries("parent", limit=20)) < 20:
        assert time.monotonic() < deadline
    assert sessions.delete_session("parent", keep_usage=keep_usage) == 2
    return []


def race(alias: str, tenant: str, role: int, keep_usage: bool) -> list[str]:
    if role == 0:
        return delete_once_something_is_spent(alias, tenant, keep_usage)
    return record_until_it_is_gone(alias, tenant, role)


@pytest.mark.parametrize("run", [run_in_processes, run_in_threads], ids=["processes", "threads"])
def test_what_many_record_at_once_adds_up(committed_db: CommittedDatabase, run: Any) -> None:
    sessions, usage = stores(committed_db)
    for number in range(2):
        sessions.create_session(f"session-{number}", agent_type="agent")
    arguments = [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    for outcome in run(record_fifty, arguments):
        outcome.unwrap()
    # Each entry of a writer's own once, and those that two writers share once for both.
    for number in range(2):
        assert rolled_up(usage, f"session-{number}").entry_count == 25 * WRITERS // 2 * 2


@pytest.mark.parametrize("keep_usage", [False, True], ids=["with its usage", "keeping its usage"])
@pytest.mark.parametrize("run", [run_in_processes, run_in_threads], ids=["processes", "threads"])
def test_a_session_deleted_while_it_spends_leaves_nothing_behind(
    committed_db: CommittedDatabase, run: Any, keep_usage: bool
) -> None:
    sessions, usage = stores(committed_db)
    sessions.create_session("parent", agent_type="agent")
    sessions.create_session("child", agent_type="agent", parent_session_id="parent")
    sessions.create_session("bystander", agent_type="agent")
    arguments = [(committed_db.alias, committed_db.tenant, role, keep_usage) for role in range(WRITERS)]
    outcomes = [outcome.unwrap() for outcome in run(race, arguments)]
    assert all(refused in (["parent"], ["child"]) for refused in outcomes[1:])
    rows = UsageEntry.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    if keep_usage:
        assert not rows.filter(session__isnull=False).exists()
        assert usage.exists("parent")
    else:
        assert not rows.exists()


def test_entries_commit_with_the_callers_own_rows_or_not_at_all(committed_db: CommittedDatabase) -> None:
    sessions, usage = stores(committed_db)
    with transaction.atomic(using=committed_db.alias):
        sessions.create_session("session", agent_type="agent")
        usage.record_entry(custom(id="kept"))
    with transaction.atomic(using=committed_db.alias):
        usage.record_entry(custom(id="one"))
        usage.record_entries([custom(id="two"), custom(id="three")])
        with pytest.raises(SessionNotFound):
            usage.record_entry(custom("no session"))
        with pytest.raises(SessionNotFound):
            usage.record_entries([custom(id="four"), custom("no session")])
        assert len(usage.get_entries("session")) == 4
        transaction.set_rollback(True, using=committed_db.alias)
    assert [entry.id for entry in usage.get_entries("session")] == ["kept"]


class TestOnPostgreSQL:
    """Who waits for whom; SQLite has one writer at a time."""

    @pytest.fixture
    def database(self, postgres_db: CommittedDatabase) -> CommittedDatabase:
        sessions, usage = stores(postgres_db)
        sessions.create_session("session", agent_type="agent")
        usage.record_entry(custom(id="first"))
        return postgres_db

    @pytest.mark.parametrize("count", [1, 2])
    def test_recording_does_not_wait_for_a_step(self, database: CommittedDatabase, count: int) -> None:
        sessions, usage = stores(database)
        with transaction.atomic(using=database.alias):
            sessions.update_status("session", "running")
            recording = _in_background(lambda: usage.record_entries([custom()] * count))
            assert len(recording.result(PATIENCE_SECONDS)) == count
        assert len(usage.get_entries("session")) == count + 1

    @pytest.mark.parametrize("count", [1, 2])
    def test_recording_waits_for_a_deletion_and_is_refused(
        self, database: CommittedDatabase, count: int
    ) -> None:
        sessions, usage = stores(database)
        with transaction.atomic(using=database.alias):
            sessions.delete_session("session")
            recording = _in_background(lambda: usage.record_entries([custom()] * count))
            _until_somebody_waits(database)
            assert not recording.done()
        with pytest.raises(SessionNotFound):
            recording.result(PATIENCE_SECONDS)
        assert usage.query_usage().total == 0

    @pytest.mark.parametrize("count", [1, 2])
    def test_recording_goes_on_when_a_deletion_is_undone(
        self, database: CommittedDatabase, count: int
    ) -> None:
        sessions, usage = stores(database)
        with transaction.atomic(using=database.alias):
            sessions.delete_session("session")
            recording = _in_background(lambda: usage.record_entries([custom()] * count))
            _until_somebody_waits(database)
            transaction.set_rollback(True, using=database.alias)
        assert len(recording.result(PATIENCE_SECONDS)) == count
        assert len(usage.get_entries("session")) == count + 1

    @pytest.mark.parametrize("count", [1, 2])
    def test_a_deletion_waits_for_recording_and_takes_it_too(
        self, database: CommittedDatabase, count: int
    ) -> None:
        sessions, usage = stores(database)
        with transaction.atomic(using=database.alias):
            usage.record_entries([custom()] * count)
            deletion = _in_background(lambda: sessions.delete_session("session"))
            _until_somebody_waits(database)
        assert deletion.result(PATIENCE_SECONDS) == 1
        assert usage.query_usage().total == 0

    def test_an_id_that_another_transaction_takes_back_is_recorded(self, database: CommittedDatabase) -> None:
        _, usage = stores(database)
        with transaction.atomic(using=database.alias):
            usage.record_entry(custom(id="entry", amount=1))
            recording = _in_background(lambda: usage.record_entry(custom(id="entry", amount=2)))
            _until_somebody_waits(database)
            transaction.set_rollback(True, using=database.alias)
        assert recording.result(PATIENCE_SECONDS) == "entry"
        assert [entry.amount for entry in usage.get_entries("session")] == [1, 2]


def _in_background(call: Callable[[], T]) -> Future[T]:
    def run() -> T:
        try:
            return call()
        finally:
            connections.close_all()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future


def _until_somebody_waits(database: CommittedDatabase) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    waiting = """
        SELECT 1 FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()"""
    with database.connection.cursor() as cursor:
        while True:
            # A transaction otherwise sees the server's activity as it was at its first look.
            cursor.execute("SELECT pg_stat_clear_snapshot()")
            cursor.execute(waiting)
            if cursor.fetchone():
                return
            assert time.monotonic() < deadline, "no statement waits"
