"""Locks in the database: rows, statements and clocks, which the contract suite does not see."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction
from django.test.utils import CaptureQueriesContext

from helix_store.core import moments
from helix_store.core.types import StepInfo
from helix_store.exceptions import FencedOutError, LockLostError, SessionNotFound, StaleStateError
from helix_store.models import Lock as LockRow
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, Lock
from tests.cells import for_each
from tests.database.separate import separate_connection
from tests.databases import CommittedDatabase

pytestmark = pytest.mark.usefixtures("machine")

MESSAGE = {"role": "user", "content": "hello"}


@pytest.fixture
def locks(committed_db: CommittedDatabase) -> DatabaseLockManager:
    return DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant, default_ttl_ms=60_000)


@pytest.fixture
def others_locks(committed_db: CommittedDatabase) -> Iterator[DatabaseLockManager]:
    """The locks of another worker, on a separate connection."""
    with separate_connection(**committed_db.connection.settings_dict) as connection:
        yield DatabaseLockManager(connection.alias, tenant=committed_db.tenant, default_ttl_ms=60_000)


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("session", agent_type="agent")
    return store


def acquired(locks: DatabaseLockManager, name: str = "session") -> Lock:
    lock = locks.acquire(name)
    assert lock is not None
    return lock


def expire(database: CommittedDatabase, name: str = "session") -> None:
    """End a term as if the database's clock had jumped ahead."""
    rows = LockRow.objects.using(database.alias).filter(tenant=database.tenant, name=name)
    assert rows.update(expires_at=datetime.now(UTC) - timedelta(hours=1)) == 1


# Rows and statements


def test_a_row_says_who_holds_the_lock_and_until_when(
    committed_db: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    before = moments.now()
    lock = acquired(locks)
    row = LockRow.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
    assert (row.name, row.owner, row.token) == ("session", lock.owner, 1)
    assert row.expires_at == lock.expires_at
    assert row.acquired_at is not None
    assert abs(row.acquired_at - before) < timedelta(seconds=30)
    assert abs(row.expires_at - row.acquired_at - timedelta(minutes=1)) < timedelta(milliseconds=100)


def test_a_released_lock_keeps_its_row_and_its_token(
    committed_db: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    acquired(locks).release()
    row = LockRow.objects.using(committed_db.alias).get(tenant=committed_db.tenant)
    assert (row.token, row.expires_at) == (1, None)


def test_tokens_outlive_the_session_they_guard(locks: DatabaseLockManager, store: DatabaseStateStore) -> None:
    former = acquired(locks)
    former.release()
    store.delete_session("session")
    store.create_session("session", agent_type="agent")
    assert acquired(locks).fencing_token == 2
    with pytest.raises(FencedOutError):
        store.append_messages("session", [MESSAGE], fencing_token=former.fencing_token)


def test_each_call_is_one_statement_or_two(
    committed_db: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    on_sqlite = committed_db.vendor == "sqlite"

    def statements() -> CaptureQueriesContext:
        return CaptureQueriesContext(committed_db.connection)

    locks.is_locked("connects")
    with statements() as new:
        lock = acquired(locks)
    with statements() as held:
        assert locks.acquire("session") is None
    with statements() as refreshed:
        lock.refresh()
    with statements() as released:
        lock.release()
    with statements() as free:
        acquired(locks)
    with statements() as forced:
        locks.force_release("session")
    with statements() as seen:
        locks.is_locked("session")
    with statements() as listed:
        locks.get_active_locks()
    counts = [len(each) for each in (new, held, refreshed, released, free, forced, seen, listed)]
    # With BEGIN and COMMIT: only the number of its transaction tells whether a lost force_release was made.
    assert counts == ([3, 1, 1, 1, 2, 3, 1, 1] if on_sqlite else [2, 2, 1, 1, 1, 3, 1, 1])


# Transactions


def test_a_lock_acquired_in_a_transaction_is_rolled_back_with_it(
    committed_db: CommittedDatabase, locks: DatabaseLockManager, others_locks: DatabaseLockManager
) -> None:
    with transaction.atomic(using=committed_db.alias):
        assert acquired(locks).fencing_token == 1
        assert locks.is_locked("session")
        assert not others_locks.is_locked("session")
        transaction.set_rollback(True, using=committed_db.alias)
    assert not locks.is_locked("session")
    with transaction.atomic(using=committed_db.alias):
        lock = acquired(locks)
    assert others_locks.is_locked("session")
    assert lock.fencing_token == 1
    assert lock.release()


def test_a_refusal_leaves_the_callers_transaction_usable(
    committed_db: CommittedDatabase,
    locks: DatabaseLockManager,
    others_locks: DatabaseLockManager,
    store: DatabaseStateStore,
) -> None:
    acquired(others_locks)
    with transaction.atomic(using=committed_db.alias):
        assert locks.acquire("session") is None
        store.append_messages("session", [MESSAGE])
    assert store.get_message_count("session") == 1


# Clocks


@for_each("hours", [-1, 1, 24 * 365])
def test_the_workers_clock_decides_nothing(
    locks: DatabaseLockManager,
    others_locks: DatabaseLockManager,
    monkeypatch: pytest.MonkeyPatch,
    hours: int,
) -> None:
    held = acquired(locks)
    true_time, true_time_ns, true_now = time.time, time.time_ns, moments.now
    monkeypatch.setattr(time, "time", lambda: true_time() + hours * 3600)
    monkeypatch.setattr(time, "time_ns", lambda: true_time_ns() + hours * 3600 * 10**9)
    monkeypatch.setattr(moments, "now", lambda: true_now() + timedelta(hours=hours))
    assert others_locks.acquire("session") is None
    assert others_locks.is_locked("session")
    held.refresh()
    assert abs(held.expires_at - datetime.now(UTC) - timedelta(minutes=1)) < timedelta(seconds=30)
    assert held.is_trusted()
    assert held.release()
    assert acquired(others_locks).fencing_token == 2


def test_a_database_clock_that_jumps_ends_a_term_early_but_fences_its_holder(
    committed_db: CommittedDatabase,
    locks: DatabaseLockManager,
    others_locks: DatabaseLockManager,
    store: DatabaseStateStore,
) -> None:
    held = acquired(locks)
    expire(committed_db)
    assert acquired(others_locks).fencing_token == 2
    assert held.is_trusted()
    with pytest.raises(FencedOutError):
        store.append_messages("session", [MESSAGE], fencing_token=held.fencing_token)
    with pytest.raises(LockLostError):
        held.refresh()


@pytest.mark.thorough
def test_a_term_ends_within_a_transaction(
    committed_db: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    # Long enough for a busy machine to reach the next statement within the term.
    assert locks.acquire("session", ttl_ms=1_500) is not None
    deadline = time.monotonic() + 30
    with transaction.atomic(using=committed_db.alias):
        assert locks.is_locked("session")
        while locks.acquire("session") is None:
            assert time.monotonic() < deadline


# Fencing


def test_an_expired_holder_may_write_until_a_takeover(
    committed_db: CommittedDatabase, locks: DatabaseLockManager, store: DatabaseStateStore
) -> None:
    lock = acquired(locks)
    expire(committed_db)
    assert store.append_messages("session", [MESSAGE], fencing_token=lock.fencing_token) == 1


def test_the_holder_that_lost_its_lock_to_an_operator_is_fenced_out_at_once(
    locks: DatabaseLockManager, store: DatabaseStateStore
) -> None:
    lock = acquired(locks)
    locks.force_release("session")
    with pytest.raises(FencedOutError) as caught:
        store.append_messages("session", [MESSAGE], fencing_token=lock.fencing_token)
    assert caught.value.current_token > lock.fencing_token


def test_the_fence_is_checked_after_the_session_and_before_its_version(
    locks: DatabaseLockManager, store: DatabaseStateStore
) -> None:
    for name in ("session", "no session"):
        for _ in range(2):
            acquired(locks, name).release()
    state = store.load_state("session")
    assert state is not None
    with pytest.raises(SessionNotFound):
        store.append_messages("no session", [MESSAGE], fencing_token=1, expected_version=7)
    with pytest.raises(FencedOutError):
        store.append_messages("session", [MESSAGE], fencing_token=1, expected_version=7)
    with pytest.raises(StaleStateError):
        store.append_messages("session", [MESSAGE], fencing_token=2, expected_version=7)
    with pytest.raises(FencedOutError):
        store.save_state_and_promote_staging(
            "session", state, [], StepInfo("step", 1), fencing_token=1, expected_version=7
        )
    with pytest.raises(StaleStateError):
        store.save_state_and_promote_staging(
            "session", state, [], StepInfo("step", 1), fencing_token=2, expected_version=7
        )


def test_a_step_that_was_committed_is_repeated_to_a_fenced_worker_too(
    locks: DatabaseLockManager, store: DatabaseStateStore
) -> None:
    state = store.load_state("session")
    assert state is not None
    lock = acquired(locks)

    def commit(operation_id: str) -> object:
        return store.save_state_and_promote_staging(
            "session",
            state,
            [MESSAGE],
            StepInfo("step", 1),
            fencing_token=lock.fencing_token,
            operation_id=operation_id,
        )

    committed = commit("operation")
    locks.force_release("session")
    assert commit("operation") == committed
    with pytest.raises(FencedOutError):
        commit("another operation")
    assert store.get_message_count("session") == 1


@pytest.mark.parametrize("in_transaction", [False, True])
def test_the_fence_costs_a_guarded_write_one_statement(
    committed_db: CommittedDatabase,
    locks: DatabaseLockManager,
    store: DatabaseStateStore,
    in_transaction: bool,
) -> None:
    token = acquired(locks).fencing_token
    counts = []
    for guard in ({}, {"fencing_token": token}):
        with (
            transaction.atomic(using=committed_db.alias) if in_transaction else nullcontext(),
            CaptureQueriesContext(committed_db.connection) as statements,
        ):
            store.append_messages("session", [MESSAGE], **guard)
        counts.append(len(statements))
    assert counts[1] == counts[0] + 1
