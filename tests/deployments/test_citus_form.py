"""The form for Citus on plain PostgreSQL: what its statements, run one after the other, must hold.

No cluster takes part. On one, advisory locks and the clock are those of the entry node, and the row locks
are those of the node with the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.db.models.functions import Coalesce, Now
from django.test.utils import CaptureQueriesContext

from helix_store import conf
from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.core import moments
from helix_store.counters import delete_usage
from helix_store.engine.database import Database, stay_on_node
from helix_store.exceptions import LockLostError, OutcomeUnknown, SessionNotFound, UnsupportedIsolation
from helix_store.models import Checkpoint, Session, Stream, UsageEntry
from helix_store.models import Lock as LockRow
from helix_store.stores import (
    DatabaseBudgetStore,
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
    Lock,
)
from helix_store.testing.usage.base import tokens
from tests.database.citus_rules import refusals
from tests.database.separate import execute, fetch
from tests.databases import CommittedDatabase
from tests.deployments.deployments import another_alias
from tests.deployments.sent import sent_through
from tests.faults.proxy import Cut
from tests.faults.wires import opened_wire
from tests.faults_found.races import Writers, held, held_session, until_backends_wait

MESSAGE: Final = {"role": "user", "content": "hello"}
END_TERM: Final = "UPDATE helix_store_lock SET expires_at = clock_timestamp() WHERE tenant = %s"


@pytest.fixture
def citus(postgres_db: CommittedDatabase) -> Iterator[CommittedDatabase]:
    settings = {**connections.settings[postgres_db.alias], "HELIX_STORE_CITUS": True}
    with another_alias("citus", **settings) as alias:
        yield CommittedDatabase(alias=alias, tenant=postgres_db.tenant)


@pytest.fixture
def locks(citus: CommittedDatabase) -> DatabaseLockManager:
    return DatabaseLockManager(citus.alias, tenant=citus.tenant, default_ttl_ms=60_000)


@pytest.fixture
def store(citus: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(citus.alias, tenant=citus.tenant)
    store.create_session("session", agent_type="agent")
    return store


@pytest.fixture
def usage(citus: CommittedDatabase, store: DatabaseStateStore) -> DatabaseUsageStore:
    return DatabaseUsageStore(citus.alias, tenant=citus.tenant)


def acquired(locks: DatabaseLockManager) -> Lock:
    lock = locks.acquire("name")
    assert lock is not None
    return lock


def acquire(locks: DatabaseLockManager, usage: DatabaseUsageStore) -> Callable[[], object]:
    assert acquired(locks).release()
    return lambda: acquired(locks)


def refresh(locks: DatabaseLockManager, usage: DatabaseUsageStore) -> Callable[[], object]:
    return acquired(locks).refresh


def record(locks: DatabaseLockManager, usage: DatabaseUsageStore) -> Callable[[], object]:
    return lambda: usage.record_entry(tokens("session"))


@pytest.mark.parametrize("prepared", [acquire, refresh, record], ids=lambda prepared: prepared.__name__)
def test_the_statements_of_a_form_are_one_transaction(
    citus: CommittedDatabase,
    locks: DatabaseLockManager,
    usage: DatabaseUsageStore,
    prepared: Callable[[DatabaseLockManager, DatabaseUsageStore], Callable[[], object]],
) -> None:
    call = prepared(locks, usage)
    with CaptureQueriesContext(citus.connection) as captured:
        call()
    first, second, *statements, last = [query["sql"] for query in captured.captured_queries]
    assert (first, second, last) == ("BEGIN", stay_on_node().postgresql, "COMMIT")
    assert len(statements) > 1
    assert not {"BEGIN", "COMMIT"} & set(statements)


def test_a_schema_stays_on_its_node_before_a_row_is_locked(
    citus: CommittedDatabase, store: DatabaseStateStore
) -> None:
    with CaptureQueriesContext(citus.connection) as captured:
        store.append_messages("session", [MESSAGE])
    begin, stay, lock, *_ = [query["sql"] for query in captured.captured_queries]
    assert (begin, stay) == ("BEGIN", stay_on_node().postgresql)
    assert lock.endswith("FOR NO KEY UPDATE")


def test_what_the_contract_suites_send_is_held_to_the_rules(postgres_db: CommittedDatabase) -> None:
    connections.close_all()
    with sent_through(postgres_db.alias) as sent:
        DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant).list_sessions()
        LockRow.objects.using(postgres_db.alias).filter(tenant=postgres_db.tenant).update(
            expires_at=Coalesce("expires_at", Now())
        )
    *read, update = sent.values()
    found = [refusals(postgres_db.connection, text, is_bound=True) for text in (*read, update)]
    assert found == [*[set()] * len(read), {"not immutable: statement_timestamp"}]
    assert read
    assert postgres_db.tenant in update


# --- An older clock -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "expected"),
    [(Lock.refresh, LockLostError), (Lock.release, False)],
    ids=["refresh", "release"],
)
def test_a_term_that_ends_while_its_holder_waits_for_the_row_is_over(
    citus: CommittedDatabase, locks: DatabaseLockManager, call: Callable[[Lock], Any], expected: Any
) -> None:
    lock = acquired(locks)
    with held(citus, LockRow, name="name") as alias:
        writers = Writers([lambda: call(lock)])
        until_backends_wait(citus, 1)
        execute(connections[alias], END_TERM, citus.tenant)
    (outcome,) = writers.outcomes()
    assert outcome.value is expected or type(outcome.error) is expected
    assert not locks.is_locked("name")


def test_a_term_that_ends_while_another_waits_for_its_row_is_not_ended_by_force(
    citus: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    acquired(locks)
    with held(citus, LockRow, name="name") as alias:
        writers = Writers([lambda: locks.force_release("name")])
        until_backends_wait(citus, 1)
        execute(connections[alias], END_TERM, citus.tenant)
    assert [outcome.unwrap() for outcome in writers.outcomes()] == [False]


def open_stream(streams: DatabaseStreamManager) -> object:
    return async_to_sync(streams.create_writer)("stream", "run", "agent")


def append(streams: DatabaseStreamManager) -> object:
    return streams.write_sync("stream", [{"type": "text", "text": "chunk"}])


@pytest.mark.thorough
@pytest.mark.parametrize("write", [open_stream, append])
def test_a_lease_begins_after_the_wait_for_the_row_of_its_stream(
    citus: CommittedDatabase, write: Callable[[DatabaseStreamManager], object]
) -> None:
    streams = DatabaseStreamManager(citus.alias, tenant=citus.tenant)
    open_stream(streams)
    with held(citus, Stream, stream_id="stream") as alias:
        writers = Writers([lambda: write(streams)])
        until_backends_wait(citus, 1)
        ((end_of_wait,),) = fetch(connections[alias], "SELECT clock_timestamp()")
    writers.outcomes()[0].unwrap()
    lease = timedelta(seconds=conf.stream_options().writer_lease)
    ends = Stream.objects.using(citus.alias).get(tenant=citus.tenant).lease_expires_at
    assert ends is not None
    assert ends >= end_of_wait + lease


# --- A missing key-share lock --------------------------------------------------------------------------


def test_usage_of_a_session_that_is_deleted_meanwhile_is_not_recorded(
    citus: CommittedDatabase, usage: DatabaseUsageStore
) -> None:
    with held_session(citus, "session") as alias:
        writers = Writers([lambda: usage.record_entry(tokens("session"))])
        until_backends_wait(citus, 1)
        Session.objects.using(alias).filter(tenant=citus.tenant).delete()
    (outcome,) = writers.outcomes()
    assert type(outcome.error) is SessionNotFound
    assert not UsageEntry.objects.using(citus.alias).filter(tenant=citus.tenant).exists()


def test_a_session_is_not_deleted_before_usage_of_it_is_committed(
    postgres_db: CommittedDatabase,
    citus: CommittedDatabase,
    store: DatabaseStateStore,
    usage: DatabaseUsageStore,
) -> None:
    with transaction.atomic(using=citus.alias):
        usage.record_entry(tokens("session"))
        writers = Writers([lambda: store.delete_session("session")])
        until_backends_wait(postgres_db, 1)
    writers.outcomes()[0].unwrap()
    assert not UsageEntry.objects.using(citus.alias).filter(tenant=citus.tenant).exists()


# --- Sums of deleted rows ------------------------------------------------------------------------------


def test_deleted_usage_is_subtracted_from_counters(
    citus: CommittedDatabase, store: DatabaseStateStore, usage: DatabaseUsageStore
) -> None:
    budgets = DatabaseBudgetStore(citus.alias, tenant=citus.tenant)
    budgets.set_budget("tree", scope="tree", value="session", period="day", limit_tokens=1_000_000)
    budgets.set_budget("agents", scope="agent_type", value="agent", limit_tokens=1_000_000)
    now = int(moments.now().timestamp() * 1000)
    usage.record_entries([tokens("session", timestamp=now, total=10) for _ in range(3)])
    assert budgets.status("tree").spent_tokens == budgets.status("agents").spent_tokens == 30
    assert usage.delete("session") == 3
    assert budgets.status("tree").spent_tokens == budgets.status("agents").spent_tokens == 0


def test_usage_is_not_deleted_where_a_new_budget_may_be_unseen(
    citus: CommittedDatabase, usage: DatabaseUsageStore
) -> None:
    usage.record_entry(tokens("session"))
    entries = UsageEntry.objects.using(citus.alias).filter(tenant=citus.tenant)
    with transaction.atomic(using=citus.alias):
        execute(citus.connection, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with pytest.raises(UnsupportedIsolation):
            delete_usage(Database(citus.alias, citus.tenant), entries)
        transaction.set_rollback(True, using=citus.alias)
    assert entries.count() == 1


# --- A kept finishing time -----------------------------------------------------------------------------


def test_the_first_finishing_time_of_a_claim_is_kept(
    postgres_db: CommittedDatabase, citus: CommittedDatabase
) -> None:
    snapshots = SnapshotCheckpointer(citus.alias, tenant=citus.tenant)
    snapshots.put("thread", {"version": 1})
    claim = snapshots.claim("thread", owner="owner")
    assert claim is not None
    with transaction.atomic(using=citus.alias):
        assert claim.done()
        first = finishing_time(citus)
        writers = Writers([claim.done])
        until_backends_wait(postgres_db, 1)
    assert writers.outcomes()[0].unwrap()
    assert finishing_time(citus) == first


def finishing_time(citus: CommittedDatabase) -> datetime | None:
    snapshots = Checkpoint.objects.using(citus.alias).filter(kind="snapshot")
    found: datetime | None = snapshots.get(session__tenant=citus.tenant).claim_done_at
    return found


# --- What the advisory lock and the number of a transaction are for ------------------------------------


def test_an_acquisition_does_not_wait_for_another_one_of_a_new_name(
    citus: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    with transaction.atomic(using=citus.alias):
        acquired(locks)
        (outcome,) = Writers([lambda: locks.acquire("name")]).outcomes()
        assert outcome.unwrap() is None


def test_an_acquisition_in_a_transaction_does_not_wait_for_a_write_to_its_session(
    citus: CommittedDatabase, store: DatabaseStateStore, locks: DatabaseLockManager
) -> None:
    def acquire() -> Lock | None:
        with transaction.atomic(using=citus.alias):
            return locks.acquire("session")

    with held_session(citus, "session"):
        (outcome,) = Writers([acquire]).outcomes()
        assert outcome.unwrap() is None
    assert acquire() is not None


def test_a_held_name_costs_its_contenders_no_lock(
    citus: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    acquired(locks)
    with transaction.atomic(using=citus.alias):
        assert locks.acquire("name") is None
        own = "SELECT locktype FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'"
        assert fetch(citus.connection, own) == []


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER], ids=lambda cut: cut.name.lower())
def test_the_entry_node_is_not_asked_what_became_of_a_transaction(
    citus: CommittedDatabase, store: DatabaseStateStore, cut: Cut
) -> None:
    with opened_wire(citus.alias, citus.tenant) as wire:
        behind = DatabaseStateStore(wire.alias, tenant=citus.tenant)
        wire.proxy.arm(cut)
        with pytest.raises(OutcomeUnknown) as raised:
            behind.append_messages("session", [MESSAGE])
        wire.proxy.wait_for_cut()
    assert raised.value.operation_id is None
    assert store.get_message_count("session") == (1 if cut is Cut.AFTER else 0)


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER], ids=lambda cut: cut.name.lower())
def test_a_lost_acquisition_is_looked_for_and_leaves_one_term(
    citus: CommittedDatabase, locks: DatabaseLockManager, cut: Cut
) -> None:
    with opened_wire(citus.alias, citus.tenant) as wire:
        behind = DatabaseLockManager(wire.alias, tenant=citus.tenant, default_ttl_ms=60_000)
        wire.proxy.arm(cut)
        lock = behind.acquire("name")
        wire.proxy.wait_for_cut()
    assert lock is not None
    (active,) = locks.get_active_locks()
    assert (active.owner, active.fencing_token) == (lock.owner, lock.fencing_token)
