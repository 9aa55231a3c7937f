"""One write is one transaction, run again only when that cannot do it twice."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from django.db import OperationalError, transaction

from helix_store.engine.database import Database
from helix_store.engine.statement import Statement
from helix_store.exceptions import StoreBusy, StoreTimeout
from helix_store.models import Lock
from helix_store.schema import current_version
from tests.databases import CommittedDatabase
from tests.faults.statements import Fault, Kind, faults

GIVE_UP = "DO $$ BEGIN RAISE EXCEPTION 'given up' USING ERRCODE = '40001'; END $$"


class Write:
    """A transaction that inserts a row and counts how often it was run."""

    def __init__(self, database: CommittedDatabase, *, given_up: int = 0, hook: bool = False) -> None:
        self.database = database
        self.db = Database(database.alias, database.tenant, None)
        self.given_up = given_up
        self.hook = hook
        self.runs = 0

    def body(self) -> int:
        self.runs += 1
        Lock.objects.using(self.database.alias).create(tenant=self.database.tenant, name=f"run {self.runs}")
        if self.hook:
            transaction.on_commit(self.give_up, using=self.database.alias)
        if self.runs <= self.given_up:
            self.give_up()
        return self.runs

    def give_up(self) -> None:
        with self.database.connection.cursor() as cursor:
            cursor.execute(GIVE_UP)

    def stored(self) -> list[str]:
        locks = Lock.objects.using(self.database.alias).filter(tenant=self.database.tenant)
        return list(locks.values_list("name", flat=True))


def test_a_transaction_that_the_database_gave_up_is_run_again(postgres_db: CommittedDatabase) -> None:
    write = Write(postgres_db, given_up=2)
    assert write.db.transaction(write.body) == 3
    assert write.stored() == ["run 3"]


def test_a_transaction_that_is_given_up_again_and_again_is_store_busy(postgres_db: CommittedDatabase) -> None:
    write = Write(postgres_db, given_up=99)
    with pytest.raises(StoreBusy) as caught:
        write.db.transaction(write.body)
    assert (caught.value.retryable, caught.value.applied) == (True, "no")
    assert write.runs == 5
    assert write.stored() == []


def test_inside_the_callers_block_nothing_is_run_again(postgres_db: CommittedDatabase) -> None:
    write = Write(postgres_db, given_up=1)
    with transaction.atomic(using=postgres_db.alias), pytest.raises(StoreBusy):
        write.db.transaction(write.body)
    assert write.runs == 1
    assert write.stored() == []


def test_a_hook_that_fails_after_the_commit_does_not_repeat_the_write(postgres_db: CommittedDatabase) -> None:
    write = Write(postgres_db, hook=True)
    with pytest.raises(OperationalError, match="given up"):
        write.db.transaction(write.body)
    assert write.runs == 1
    assert write.stored() == ["run 1"]


def test_a_dry_run_stores_nothing_and_calls_no_hook(committed_db: CommittedDatabase) -> None:
    write = Write(committed_db, hook=True)
    with write.db.rolled_back():
        assert write.db.transaction(write.body) == 1
        assert write.stored() == ["run 1"]
    assert write.stored() == []


def test_a_dry_run_that_fails_ends_with_its_own_error(committed_db: CommittedDatabase) -> None:
    write = Write(committed_db)

    def fail() -> None:
        with write.db.rolled_back():
            write.db.transaction(write.body)
            raise StoreBusy

    with pytest.raises(StoreBusy):
        fail()
    assert write.stored() == []


def test_reads_of_one_moment_end_with_their_own_error_when_sqlite_has_rolled_back(
    sqlite_db: CommittedDatabase,
) -> None:
    db = Database(sqlite_db.alias, sqlite_db.tenant, None)

    def fail() -> None:
        with db.snapshot():
            sqlite_db.connection.connection.rollback()
            raise StoreBusy

    with pytest.raises(StoreBusy):
        fail()
    with db.snapshot():
        assert sqlite_db.connection.connection.in_transaction


def test_a_schema_version_that_cannot_be_read_is_a_typed_error(committed_db: CommittedDatabase) -> None:
    with (
        faults(committed_db.connection, Fault(1, Kind.TIMEOUT, after=False)),
        pytest.raises(StoreTimeout),
    ):
        current_version(committed_db.alias)


def test_both_moments_of_a_repeated_hour_are_sent_as_themselves(sqlite_db: CommittedDatabase) -> None:
    summer = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    db = Database(sqlite_db.alias, sqlite_db.tenant)
    sent = [
        db.read(Statement("SELECT %(at)s"), {"at": moment}) for moment in (summer, summer.replace(fold=1))
    ]
    assert sent == [[("2026-10-25 00:30:00",)], [("2026-10-25 01:30:00",)]]
