"""What is looked for when the reply to an acquisition or a release was lost."""

from __future__ import annotations

import time

import pytest

from helix_store.engine.clocks import database_moment
from helix_store.engine.database import Database
from helix_store.locks import sql
from helix_store.locks.database import DatabaseLocks
from helix_store.locks.rules import Term
from helix_store.models import Lock
from tests.databases import CommittedDatabase


@pytest.fixture
def locks(committed_db: CommittedDatabase) -> DatabaseLocks:
    return DatabaseLocks(Database(committed_db.alias, committed_db.tenant))


def term_of(locks: DatabaseLocks, owner: str) -> Term:
    term = locks.acquire("name", owner=owner, ttl_ms=60_000)
    assert term is not None
    return term


def acquires_again(locks: DatabaseLocks, owner: str, began: float) -> bool:
    """Whether an owner whose acquisition began then, and lost its reply, gets another term."""
    parameters = {
        "tenant": locks.db.tenant,
        "name": "name",
        "owner": owner,
        "ttl_ms": 60_000,
        "key": 1,
        "since": database_moment(locks.db, began),
    }
    return any(locks.db.write(statement, parameters) for statement in sql.ACQUIRE_AGAIN)


def was_released(locks: DatabaseLocks, owner: str, token: int) -> bool:
    parameters = {"tenant": locks.db.tenant, "name": "name", "owner": owner, "token": token}
    return bool(locks.db.read(sql.WAS_RELEASED, parameters))


def test_only_the_term_that_was_lost_is_replaced(locks: DatabaseLocks) -> None:
    began = time.monotonic()
    first = term_of(locks, "worker")
    assert not acquires_again(locks, "another", began)
    assert acquires_again(locks, "worker", began)
    assert not locks.release("name", owner="worker", fencing_token=first.fencing_token)


def test_an_older_term_of_the_same_owner_is_not_replaced(locks: DatabaseLocks) -> None:
    term_of(locks, "worker")
    assert not acquires_again(locks, "worker", time.monotonic() + 60)


def test_a_release_is_known_by_owner_and_token(locks: DatabaseLocks) -> None:
    term = term_of(locks, "worker")
    token = term.fencing_token
    assert not was_released(locks, "worker", token)
    assert locks.release("name", owner="worker", fencing_token=token)
    assert was_released(locks, "worker", token)
    assert not was_released(locks, "another", token)
    assert not was_released(locks, "worker", token - 1)


def test_no_term_began_before_its_acquisition(locks: DatabaseLocks) -> None:
    """Also by a clock that shows milliseconds alone: else a lost term would keep its own worker off."""
    for number in range(200):
        began = time.monotonic()
        assert locks.acquire(f"name {number}", owner="worker", ttl_ms=60_000)
        since = database_moment(locks.db, began)
        row = Lock.objects.using(locks.db.alias).get(tenant=locks.db.tenant, name=f"name {number}")
        assert row.acquired_at is not None
        assert since <= row.acquired_at
