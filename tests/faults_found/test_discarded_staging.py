"""Changes that were staged here and are gone decide nothing about the next step.

The patches of these changes cannot be applied: a step that still merges one raises ``PatchError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from django.db import transaction

from helix_store.core.types import SessionState, StepCommit, StepInfo
from helix_store.exceptions import FencedOutError, PatchError, SessionNotFound, StaleStateError
from helix_store.models import Session, StagedChange
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.processes import WorkerProcess

IMPOSSIBLE: Final = {"tool_call_id": "call", "patches": [{"op": "remove", "path": "/absent"}]}


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    create(store)
    return store


def create(store: DatabaseStateStore) -> None:
    store.create_session("s", agent_type="t")


def stage(store: DatabaseStateStore) -> None:
    store.stage_changes("s", "step", IMPOSSIBLE)


def make_step(store: DatabaseStateStore, **guard: Any) -> StepCommit:
    state = SessionState(session_id="s", agent_type="t", custom_state={"n": 1})
    return store.save_state_and_promote_staging("s", state, [], StepInfo("step", 1), **guard)


def assert_steps(store: DatabaseStateStore) -> None:
    commit = make_step(store)
    loaded = store.load_state("s")
    assert loaded is not None
    assert (loaded.version, loaded.custom_state) == (commit.new_version, {"n": 1})
    assert store.get_staged_changes("s", "step") == []


# What others do in a process of their own.


def discard(alias: str, tenant: str) -> int:
    return DatabaseStateStore(alias, tenant=tenant).discard_staging("s", "step")


def delete(alias: str, tenant: str) -> int:
    return DatabaseStateStore(alias, tenant=tenant).delete_session("s")


def create_again(alias: str, tenant: str) -> int:
    delete(alias, tenant)
    create(DatabaseStateStore(alias, tenant=tenant))
    return 1


def elsewhere(database: CommittedDatabase, function: Callable[[str, str], int]) -> int:
    count: int = WorkerProcess(function, database.alias, database.tenant).outcome().unwrap()
    return count


def test_a_change_that_is_still_staged_is_refused(store: DatabaseStateStore) -> None:
    stage(store)
    with pytest.raises(PatchError):
        make_step(store)
    assert len(store.get_staged_changes("s", "step")) == 1


def test_a_step_after_a_discard_of_this_process_has_nothing_to_merge(store: DatabaseStateStore) -> None:
    stage(store)
    assert store.discard_staging("s", "step") == 1
    assert_steps(store)


def test_a_step_after_a_discard_of_another_process_has_nothing_to_merge(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    stage(store)
    assert elsewhere(committed_db, discard) == 1
    assert_steps(store)


def test_a_step_after_rows_were_deleted_by_hand_has_nothing_to_merge(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    stage(store)
    with committed_db.second_connection() as other, other.cursor() as cursor:
        cursor.execute(
            f"DELETE FROM {StagedChange._meta.db_table} WHERE session_id IN"
            f" (SELECT id FROM {Session._meta.db_table} WHERE tenant = %s)",
            [committed_db.tenant],
        )
        assert cursor.rowcount == 1
    assert_steps(store)


def test_a_step_after_a_rollback_has_nothing_to_merge(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    with transaction.atomic(using=committed_db.alias):
        stage(store)
        transaction.set_rollback(True, using=committed_db.alias)
    assert_steps(store)


def test_a_step_after_the_rollback_of_a_savepoint_has_nothing_to_merge(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    with transaction.atomic(using=committed_db.alias):
        with transaction.atomic(using=committed_db.alias):
            stage(store)
            transaction.set_rollback(True, using=committed_db.alias)
        assert_steps(store)


def test_a_step_after_a_restored_checkpoint_has_nothing_to_merge(store: DatabaseStateStore) -> None:
    commit = make_step(store)
    stage(store)
    store.restore_checkpoint("s", commit.checkpoint_id)
    assert_steps(store)


@pytest.mark.parametrize("by", ["this process", "another process"])
def test_a_step_of_a_session_that_was_created_again_has_nothing_to_merge(
    committed_db: CommittedDatabase, store: DatabaseStateStore, by: str
) -> None:
    stage(store)
    if by == "this process":
        create_again(committed_db.alias, committed_db.tenant)
    else:
        assert elsewhere(committed_db, create_again) == 1
    assert_steps(store)


def test_a_step_for_another_version_is_stale_whatever_was_staged(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    stage(store)
    assert elsewhere(committed_db, discard) == 1
    store.update_status("s", "paused")
    with pytest.raises(StaleStateError):
        make_step(store, expected_version=1)


def test_a_step_of_a_former_holder_is_fenced_out_whatever_was_staged(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    lock = locks.acquire("s")
    assert lock is not None
    stage(store)
    assert elsewhere(committed_db, discard) == 1
    assert locks.force_release("s")
    with pytest.raises(FencedOutError):
        make_step(store, fencing_token=lock.fencing_token)


def test_a_step_of_a_deleted_session_finds_none_whatever_was_staged(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    stage(store)
    assert elsewhere(committed_db, delete) == 1
    with pytest.raises(SessionNotFound):
        make_step(store)


@pytest.mark.parametrize("refusal", [StaleStateError, FencedOutError])
def test_a_refusal_comes_before_what_is_still_staged(
    committed_db: CommittedDatabase, store: DatabaseStateStore, refusal: type[Exception]
) -> None:
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    lock = locks.acquire("s")
    assert lock is not None
    stage(store)
    if refusal is StaleStateError:
        store.update_status("s", "paused")
    else:
        assert locks.force_release("s")
    with pytest.raises(refusal):
        make_step(store, expected_version=1, fencing_token=lock.fencing_token)
    assert len(store.get_staged_changes("s", "step")) == 1
