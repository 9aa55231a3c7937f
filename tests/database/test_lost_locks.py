"""What is looked for when the reply to an acquisition or a release was lost."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from helix_store import locks as sql
from helix_store.core import moments
from helix_store.engine.database import Database
from helix_store.engine.statement import Statement
from helix_store.locks import DatabaseLocks
from helix_store.models import Lock
from tests.databases import CommittedDatabase

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def locks(committed_db: CommittedDatabase) -> DatabaseLocks:
    return DatabaseLocks(Database(committed_db.alias, committed_db.tenant))


def call_id(locks: DatabaseLocks) -> str:
    """The id of the last call that acquired or released the name."""
    row = Lock.objects.using(locks.db.alias).get(tenant=locks.db.tenant, name="name")
    return str(row.call_id)


def rows(locks: DatabaseLocks, statement: Statement, call_id: str) -> list[tuple[Any, ...]]:
    return locks.db.read(statement, {"tenant": locks.db.tenant, "name": "name", "call_id": call_id})


def test_an_acquisition_finds_the_term_that_it_began(locks: DatabaseLocks) -> None:
    term = locks.acquire("name", owner="worker", ttl_ms=60_000)
    assert term is not None
    ((token, _),) = rows(locks, sql.BEGUN, call_id(locks))
    assert token == term.fencing_token


def test_a_term_that_the_same_owner_began_since_is_another_one(locks: DatabaseLocks) -> None:
    assert locks.acquire("name", owner="worker", ttl_ms=60_000)
    first = call_id(locks)
    assert locks.take_over("name", owner="worker", ttl_ms=60_000)
    assert rows(locks, sql.BEGUN, first) == []
    assert rows(locks, sql.BEGUN, call_id(locks))


def test_a_term_that_is_over_is_not_found(locks: DatabaseLocks) -> None:
    assert locks.acquire("name", owner="worker", ttl_ms=60_000)
    assert rows(locks, sql.BEGUN, call_id(locks)) != []
    an_hour_ago = moments.now() - timedelta(hours=1)
    Lock.objects.using(locks.db.alias).filter(tenant=locks.db.tenant).update(expires_at=an_hour_ago)
    assert rows(locks, sql.BEGUN, call_id(locks)) == []


def test_a_release_is_known_by_its_call(locks: DatabaseLocks) -> None:
    term = locks.acquire("name", owner="worker", ttl_ms=60_000)
    assert term is not None
    acquired = call_id(locks)
    assert rows(locks, sql.WAS_RELEASED, acquired) == []
    assert locks.release("name", term)
    released = call_id(locks)
    assert rows(locks, sql.BEGUN, acquired) == []
    assert rows(locks, sql.WAS_RELEASED, released) != []
    # Another call that finds the name free has not released it.
    assert rows(locks, sql.WAS_RELEASED, acquired) == []
    assert locks.acquire("name", owner="worker", ttl_ms=60_000)
    assert rows(locks, sql.WAS_RELEASED, released) == []
