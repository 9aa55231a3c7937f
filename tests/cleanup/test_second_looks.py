"""What a cleanup asks again under the lock: what it found may have changed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from helix_store.cleanup import erase
from helix_store.cleanup.expiry import DatabaseCleanup
from helix_store.cleanup.workspaces import SessionKey
from helix_store.core import moments
from helix_store.engine.database import Database
from helix_store.models import Lock, Session
from helix_store.sessions import heads
from helix_store.sessions.heads import forest_keys
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.cleanup.conftest import LONG_AGO
from tests.database.separate import execute
from tests.databases import CommittedDatabase
from tests.faults_found.races import held, held_session

DAY = timedelta(days=1)


def expired_sessions(database: CommittedDatabase, *names: str) -> list[SessionKey]:
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    for name in names:
        store.create_session(name, agent_type="agent", expires_at=LONG_AGO)
    rows = Session.objects.using(database.alias).filter(tenant=database.tenant).order_by("pk")
    return [SessionKey(row.session_id, row.tenant, row.pk) for row in rows]


def test_a_marked_session_is_deleted_by_the_expiry_that_it_has_then(committed_db: CommittedDatabase) -> None:
    cleanup = DatabaseCleanup(committed_db.alias, committed_db.tenant)
    (key,) = expired_sessions(committed_db, "s")
    now = moments.now()
    assert cleanup.mark_in_bulk([key], now) == []
    rows = Session.objects.using(committed_db.alias).filter(pk=key.key)
    assert rows.update(expires_at=now - DAY) == 1
    assert cleanup.delete(key, now - 2 * DAY, {}) == (0, 0)
    assert cleanup.delete(key, now, {}) == (1, 0)


@pytest.mark.parametrize("change", [{"expires_at": None}, {"status": "completed"}])
def test_sessions_are_marked_by_the_expiry_and_the_status_that_they_have_then(
    committed_db: CommittedDatabase, change: dict[str, object]
) -> None:
    renewed, other = expired_sessions(committed_db, "renewed", "other")
    assert Session.objects.using(committed_db.alias).filter(pk=renewed.key).update(**change) == 1
    cleanup = DatabaseCleanup(committed_db.alias, committed_db.tenant)
    assert cleanup.mark_in_bulk([renewed, other], moments.now()) == [renewed]


def test_a_session_that_another_transaction_has_locked_is_left_without_a_wait(
    postgres_db: CommittedDatabase,
) -> None:
    held, other = expired_sessions(postgres_db, "held", "other")
    cleanup = DatabaseCleanup(postgres_db.alias, postgres_db.tenant)
    with held_session(postgres_db, "held"):
        execute(postgres_db.connection, "SET lock_timeout = '5s'")
        assert cleanup.mark_in_bulk([held, other], moments.now()) == [held]


def test_a_tree_with_a_child_that_is_newer_than_its_locks_is_left_out(
    committed_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = expired_sessions(committed_db, "one", "other")
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    db = Database(committed_db.alias, committed_db.tenant)

    def then_a_child(*looked_up: Any) -> dict[int, set[int]]:
        found = forest_keys(*looked_up)
        if not store.session_exists("child"):
            store.create_session("child", agent_type="agent", parent_session_id="one")
        return found

    monkeypatch.setattr(heads, "forest_keys", then_a_child)
    trees = db.transaction(lambda: heads.lock_forest(db, [one.key, other.key]))
    assert trees == {other.key: {other.key}}
    assert store.session_exists("child")


def test_a_session_whose_lock_is_being_acquired_is_left(postgres_db: CommittedDatabase) -> None:
    expired_sessions(postgres_db, "s")
    lock = DatabaseLockManager(postgres_db.alias, tenant=postgres_db.tenant).acquire("s")
    assert lock is not None
    lock.release()
    with held(postgres_db, Lock, name="s"):
        execute(postgres_db.connection, "SET lock_timeout = '5s'")
        receipt = erase(using=postgres_db.alias, tenant=postgres_db.tenant, session_id="s")
    assert (receipt.sessions_left, receipt.errors) == (1, 0)
