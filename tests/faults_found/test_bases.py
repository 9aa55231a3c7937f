"""A full payload that nothing is a delta of any more does not stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from helix_store.core.types import SessionState, StepCommit, StepInfo
from helix_store.models import Checkpoint, CheckpointKind
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants

BALLAST: Final = "x" * 2_000


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("s", agent_type="t")
    return store


def state_of(number: int, ballast: str = BALLAST) -> SessionState:
    return SessionState(
        session_id="s", agent_type="t", step_count=number, custom_state={"ballast": ballast, "n": number}
    )


def make_step(store: DatabaseStateStore, number: int, ballast: str = BALLAST) -> StepCommit:
    """A step of the state that was loaded, so that it can be stored as a delta."""
    state = store.load_state("s")
    assert state is not None
    state.step_count, state.custom_state = number, state_of(number, ballast).custom_state
    message = {"role": "user", "n": number}
    return store.save_state_and_promote_staging("s", state, [message], StepInfo(f"step-{number}", number))


def unneeded(database: CommittedDatabase) -> int:
    rows = Checkpoint.objects.using(database.alias).filter(session__tenant=database.tenant)
    named = rows.filter(base__isnull=False).values_list("base_id", flat=True)
    return rows.filter(kind=CheckpointKind.BASE).exclude(pk__in=list(named)).count()


def demoted_base(database: CommittedDatabase, store: DatabaseStateStore) -> None:
    """A base that is no checkpoint any more, and one delta of it, which is the current state."""
    first = make_step(store, 1)
    make_step(store, 2)
    assert store.delete_checkpoint("s", first.checkpoint_id)
    rows = Checkpoint.objects.using(database.alias).filter(session__tenant=database.tenant)
    assert rows.get(kind=CheckpointKind.BASE).checkpoint_id is None
    assert rows.get(base__isnull=False).checkpoint_id is not None
    assert unneeded(database) == 0


def demoted_state(database: CommittedDatabase, store: DatabaseStateStore) -> None:
    """The same, but what was the delta is no checkpoint either: the current state alone."""
    demoted_base(database, store)
    assert store.prune_checkpoints("s", keep=0) == 1
    rows = Checkpoint.objects.using(database.alias).filter(session__tenant=database.tenant)
    assert CheckpointKind.STATE in rows.values_list("kind", flat=True)
    assert unneeded(database) == 0


def assert_all_is_read(store: DatabaseStateStore, number: int, ballast: str = BALLAST) -> None:
    loaded = store.load_state("s")
    assert loaded is not None
    assert loaded.custom_state == {"ballast": ballast, "n": number}
    for head in store.list_checkpoints("s").items:
        checkpoint = store.get_checkpoint("s", head.checkpoint_id)
        assert checkpoint is not None
        assert checkpoint.state.custom_state["n"] == head.step_count


def stage_and_promote(store: DatabaseStateStore) -> int:
    store.stage_changes("s", "x", {"tool_call_id": "c", "merge_changes": {"ballast": "y", "n": 9}})
    return store.promote_staging("s", "x")


WRITES_OVER_A_STATE: Final[dict[str, Callable[[DatabaseStateStore], Any]]] = {
    "save_state": lambda store: store.save_state("s", state_of(9, "y")),
    "merge_custom_state": lambda store: store.merge_custom_state("s", {"ballast": "y", "n": 9}),
    "promote_staging": stage_and_promote,
    "a step": lambda store: make_step(store, 9, "y"),
    "a step under an operation id": lambda store: store.save_state_and_promote_staging(
        "s", state_of(9, "y"), [], StepInfo("step-9", 9), operation_id="operation"
    ),
}


@pytest.mark.thorough
@for_each("write", WRITES_OVER_A_STATE)
def test_a_base_goes_when_the_last_state_that_needed_it_is_written_over(
    committed_db: CommittedDatabase, store: DatabaseStateStore, write: str
) -> None:
    demoted_state(committed_db, store)
    WRITES_OVER_A_STATE[write](store)
    assert unneeded(committed_db) == 0
    assert broken_invariants(committed_db) == []
    assert_all_is_read(store, 9, "y")


@pytest.mark.parametrize("state", [demoted_base, demoted_state])
def test_a_base_goes_with_the_state_that_a_deletion_or_a_save_leaves_behind(
    committed_db: CommittedDatabase,
    store: DatabaseStateStore,
    state: Callable[[CommittedDatabase, DatabaseStateStore], None],
) -> None:
    state(committed_db, store)
    store.save_state("s", state_of(9, "y"))
    store.prune_checkpoints("s", keep=0)
    assert unneeded(committed_db) == 0
    assert broken_invariants(committed_db) == []
    assert_all_is_read(store, 9, "y")


def test_a_base_goes_when_an_older_checkpoint_is_restored(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    oldest = make_step(store, 1, "z")
    base = make_step(store, 2)
    make_step(store, 3)
    assert store.delete_checkpoint("s", base.checkpoint_id)
    store.restore_checkpoint("s", oldest.checkpoint_id)
    assert unneeded(committed_db) == 0
    assert broken_invariants(committed_db) == []
    assert_all_is_read(store, 1, "z")


def test_a_base_goes_when_an_older_checkpoint_is_restored_over_a_demoted_state(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    oldest = make_step(store, 1, "z")
    base = make_step(store, 2)
    last = make_step(store, 3)
    assert store.delete_checkpoint("s", base.checkpoint_id)
    assert store.delete_checkpoint("s", last.checkpoint_id)
    store.restore_checkpoint("s", oldest.checkpoint_id)
    assert unneeded(committed_db) == 0
    assert broken_invariants(committed_db) == []
    assert_all_is_read(store, 1, "z")


def test_a_base_goes_with_the_last_checkpoint_that_needed_it(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    base = make_step(store, 1)
    needing = [make_step(store, number) for number in (2, 3)]
    make_step(store, 4, "y")
    assert store.delete_checkpoint("s", base.checkpoint_id)
    assert store.delete_checkpoint("s", needing[0].checkpoint_id)
    rows = Checkpoint.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    assert rows.filter(kind=CheckpointKind.BASE).count() == 1
    assert_all_is_read(store, 4, "y")
    assert store.delete_checkpoint("s", needing[1].checkpoint_id)
    assert not rows.filter(kind=CheckpointKind.BASE).exists()
    assert_all_is_read(store, 4, "y")


def test_truncated_messages_take_an_unneeded_base_along(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    base = make_step(store, 1)
    make_step(store, 2)
    make_step(store, 3, "y")
    assert store.delete_checkpoint("s", base.checkpoint_id)
    store.truncate_messages("s", 0)
    assert unneeded(committed_db) == 0
    assert broken_invariants(committed_db) == []
    assert_all_is_read(store, 3, "y")
