"""A step as a delta from a base that somebody else drops before it, or while it waits for the lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from helix_store.core.types import (
    SessionState,
    StepCommit,
    StepInfo,
)
from helix_store.models import Checkpoint, CheckpointKind
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.database.waiting import in_background, until_it_waits
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants

MESSAGE = {"role": "user", "content": "hello"}
STEPS = 3
OF_ANOTHER_KIND = 7


def custom_state(step: int) -> dict[str, Any]:
    return {"ballast": ("y" if step == OF_ANOTHER_KIND else "x") * 500, "step": step}


_in_hand: WeakKeyDictionary[DatabaseStateStore, SessionState] = WeakKeyDictionary()


def state_in_hand(store: DatabaseStateStore) -> SessionState:
    """The state that the worker with this store has loaded once, and saves with each step."""
    if store not in _in_hand:
        state = store.load_state("s")
        assert state is not None
        _in_hand[store] = state
    return _in_hand[store]


def make_step(store: DatabaseStateStore, step: int) -> StepCommit:
    state = state_in_hand(store)
    state.step_count, state.custom_state = step, custom_state(step)
    return store.save_state_and_promote_staging("s", state, [MESSAGE], StepInfo(f"step-{step}", step))


def delete_base(store: DatabaseStateStore) -> bool:
    return store.delete_checkpoint("s", store.list_checkpoints("s").items[-1].checkpoint_id)


def restore(store: DatabaseStateStore, number: int) -> int:
    return store.restore_checkpoint("s", store.list_checkpoints("s").items[-number].checkpoint_id)


MEANWHILE: dict[str, Callable[[DatabaseStateStore], Any]] = {
    "its checkpoints are pruned": lambda store: store.prune_checkpoints("s", keep=0),
    "its older checkpoints are pruned": lambda store: store.prune_checkpoints("s", keep=1),
    "the base is deleted": delete_base,
    "the base is deleted and its checkpoints pruned": lambda store: (
        delete_base(store),
        store.prune_checkpoints("s", keep=0),
    ),
    "its messages are truncated": lambda store: store.truncate_messages("s", 0),
    "its state is merged": lambda store: store.merge_custom_state("s", {"merged": 1}),
    "its state is merged and its checkpoints pruned": lambda store: (
        store.merge_custom_state("s", {"merged": 1}),
        store.prune_checkpoints("s", keep=0),
    ),
    "its base is restored": lambda store: restore(store, 1),
    "a delta is restored": lambda store: restore(store, 2),
    "another delta is written": lambda store: make_step(store, 8),
    "another full state is written": lambda store: make_step(store, OF_ANOTHER_KIND),
    "another full state is written and the others pruned": lambda store: (
        make_step(store, OF_ANOTHER_KIND),
        store.prune_checkpoints("s", keep=1),
    ),
}


@pytest.fixture
def others_store(
    store: DatabaseStateStore, other: BaseDatabaseWrapper, postgres_db: CommittedDatabase
) -> DatabaseStateStore:
    """A store on another connection, whose worker has loaded the state."""
    store.create_session("s", agent_type="t")
    for number in range(1, STEPS + 1):
        make_step(store, number)
    assert deltas_in(postgres_db).count() == STEPS - 1
    others_store = DatabaseStateStore(other.alias, tenant=postgres_db.tenant)
    state_in_hand(others_store)
    return others_store


def deltas_in(database: CommittedDatabase) -> QuerySet[Checkpoint]:
    rows = Checkpoint.objects.using(database.alias).filter(session__tenant=database.tenant)
    return rows.filter(base__isnull=False)


def assert_all_is_whole(
    database: CommittedDatabase, stores: list[DatabaseStateStore], last: StepCommit
) -> None:
    """Now, and after some more steps of all that may know something else."""
    assert broken_invariants(database) == []
    for each in stores:
        loaded = each.load_state("s")
        assert loaded is not None
        assert (loaded.custom_state, loaded.version) == (custom_state(9), last.new_version)
        _in_hand[each] = loaded
    for number, each in enumerate([*stores, *stores], 10):
        make_step(each, number)
    assert broken_invariants(database) == []
    for head in stores[0].list_checkpoints("s").items:
        checkpoint = stores[0].get_checkpoint("s", head.checkpoint_id)
        assert checkpoint is not None
        assert checkpoint.state.custom_state == custom_state(head.step_count)
    assert deltas_in(database).exists()


@pytest.mark.thorough
@for_each("commits", [True, False], ids=["committed", "rolled back"])
@for_each("meanwhile", MEANWHILE.values(), ids=MEANWHILE)
def test_every_state_is_whole_after_a_delta_that_waited(
    store: DatabaseStateStore,
    others_store: DatabaseStateStore,
    other: BaseDatabaseWrapper,
    postgres_db: CommittedDatabase,
    meanwhile: Callable[[DatabaseStateStore], Any],
    commits: bool,
) -> None:
    with transaction.atomic(using=postgres_db.alias):
        meanwhile(store)
        outcome = in_background(other, lambda: make_step(others_store, 9))
        until_it_waits(postgres_db, other)
        transaction.set_rollback(not commits, using=postgres_db.alias)
    result = outcome()
    assert isinstance(result, StepCommit)
    assert_all_is_whole(postgres_db, [store, others_store], result)


@pytest.mark.thorough
@for_each("before", MEANWHILE.values(), ids=MEANWHILE)
def test_every_state_is_whole_after_a_step_of_a_process_that_knows_an_outdated_base(
    store: DatabaseStateStore,
    others_store: DatabaseStateStore,
    postgres_db: CommittedDatabase,
    before: Callable[[DatabaseStateStore], Any],
) -> None:
    before(store)
    assert_all_is_whole(postgres_db, [store, others_store], make_step(others_store, 9))


def test_a_delta_may_build_on_a_base_that_stopped_being_a_checkpoint_while_it_waited(
    store: DatabaseStateStore,
    others_store: DatabaseStateStore,
    other: BaseDatabaseWrapper,
    postgres_db: CommittedDatabase,
) -> None:
    with transaction.atomic(using=postgres_db.alias):
        store.prune_checkpoints("s", keep=1)
        outcome = in_background(other, lambda: make_step(others_store, 9))
        until_it_waits(postgres_db, other)
    assert isinstance(outcome(), StepCommit)
    kept, added = deltas_in(postgres_db).select_related("base").order_by("version")
    assert kept.base == added.base
    assert added.base is not None
    assert added.base.kind == CheckpointKind.BASE
