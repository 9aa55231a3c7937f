"""``CHECKPOINTS_KEEP``: a step leaves at most so many checkpoints of its session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.test import override_settings

from helix_store import conf
from helix_store.core.contracts import StateStore
from helix_store.core.types import SessionState, StepCommit, StepInfo
from helix_store.exceptions import CheckpointNotFound
from helix_store.models import Checkpoint, CheckpointKind
from helix_store.sessions.state import MAX_DELTAS
from helix_store.stores import DatabaseStateStore, InMemoryStateStore
from tests.cells import for_each
from tests.database.test_statements import sent_by
from tests.databases import CommittedDatabase
from tests.faults_found.races import Writers, held_session, until_backends_wait
from tests.invariants import broken_invariants

BALLAST: Final = "x" * 2_000
MORE_THAN_ONE_BASE: Final = 2 * MAX_DELTAS + 5


def kept(number: Any) -> override_settings:
    return override_settings(HELIX_STORE={**conf.configured(), "CHECKPOINTS_KEEP": number})


FORMS: Final = {
    "sqlite": ("sqlite_db", False),
    "postgres": ("postgres_db", False),
    "postgres in one statement": ("postgres_db", True),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[CommittedDatabase]:
    """Each database, and PostgreSQL with and without the form of a step in one statement."""
    database, fast_paths = FORMS[request.param]
    with override_settings(HELIX_STORE={"FAST_PATHS": fast_paths}):
        yield request.getfixturevalue(database)


def store_of(database: CommittedDatabase, alias: str | None = None) -> DatabaseStateStore:
    return DatabaseStateStore(alias or database.alias, tenant=database.tenant)


@pytest.fixture
def store(form: CommittedDatabase) -> DatabaseStateStore:
    store = store_of(form)
    store.create_session("s", agent_type="t")
    return store


def make_step(store: StateStore, number: int, ballast: str = BALLAST, **more: Any) -> StepCommit:
    """A step of the state that was loaded, so that it can be stored as a delta."""
    state = store.load_state("s")
    assert state is not None
    state.custom_state = {"ballast": ballast, "n": number}
    message = {"role": "user", "n": number}
    return store.save_state_and_promote_staging(
        "s", state, [message], StepInfo(f"step-{number}", number), **more
    )


def assert_kept(store: StateStore, numbers: list[int]) -> None:
    """These steps have a checkpoint, newest first, and each checkpoint can be read."""
    page = store.list_checkpoints("s", limit=200)
    assert [head.step_count for head in page.items] == numbers
    assert page.total == len(numbers)
    for head in page.items:
        checkpoint = store.get_checkpoint("s", head.checkpoint_id)
        assert checkpoint is not None
        assert (checkpoint.state.custom_state["n"], checkpoint.message_count) == (
            head.step_count,
            head.step_count,
        )
    latest, loaded = store.get_latest_checkpoint("s"), store.load_state("s")
    assert latest is not None
    assert loaded is not None
    assert latest.state.custom_state == loaded.custom_state


def rows_of(database: CommittedDatabase, *kinds: CheckpointKind) -> int:
    rows = Checkpoint.objects.using(database.alias).filter(session__tenant=database.tenant)
    return rows.filter(kind__in=kinds).count() if kinds else rows.count()


@for_each("keep", [1, 2, 5])
def test_a_step_leaves_the_newest_checkpoints_and_what_they_are_deltas_from(
    form: CommittedDatabase, store: DatabaseStateStore, keep: int
) -> None:
    bases = set()
    with kept(keep):
        for number in range(1, MORE_THAN_ONE_BASE + 1):
            make_step(store, number)
            assert rows_of(form, CheckpointKind.STEP) == min(number, keep)
            bases.add(rows_of(form, CheckpointKind.BASE))
            assert broken_invariants(form) == []
        assert_kept(store, list(range(MORE_THAN_ONE_BASE, MORE_THAN_ONE_BASE - keep, -1)))
    assert bases == {0, 1}
    assert rows_of(form) <= keep + 1


@pytest.mark.parametrize("keep", [1, 3])
def test_states_with_nothing_in_common_leave_no_base_behind(
    form: CommittedDatabase, store: DatabaseStateStore, keep: int
) -> None:
    with kept(keep):
        for number in range(1, 8):
            make_step(store, number, str(number) * 2_000)
            assert broken_invariants(form) == []
        assert_kept(store, [7, 6, 5][:keep])
    assert rows_of(form) == keep


def test_the_in_memory_store_keeps_as_many() -> None:
    store = InMemoryStateStore()
    store.create_session("s", agent_type="t")
    for number in range(1, 4):
        make_step(store, number)
    with kept(2):
        for number in range(4, 9):
            make_step(store, number)
            assert_kept(store, [number, number - 1])
    make_step(store, 9)
    assert_kept(store, [9, 8, 7])


def _with_staged_changes(store: DatabaseStateStore, number: int) -> None:
    changes = {"tool_call_id": "c", "merge_changes": {"staged": number}}
    store.stage_changes("s", f"step-{number}", changes)
    make_step(store, number)


def _after_a_save(store: DatabaseStateStore, number: int) -> None:
    store.merge_custom_state("s", {"saved": number})
    make_step(store, number)


FORMS_OF_A_STEP: Final[dict[str, Callable[[DatabaseStateStore, int], Any]]] = {
    "at a version": lambda store, number: make_step(
        store, number, expected_version=getattr(store.load_state("s"), "version", 0)
    ),
    "with a fencing token": lambda store, number: make_step(store, number, fencing_token=1),
    "of a run": lambda store, number: make_step(
        store, number, run_id=store.start_run("s", supersede=True).run_id
    ),
    "under an operation id": lambda store, number: make_step(store, number, operation_id=f"o-{number}"),
    "with staged changes": _with_staged_changes,
    "after a save": _after_a_save,
    "of a state that was built": lambda store, number: store.save_state_and_promote_staging(
        "s",
        SessionState(session_id="s", agent_type="t", custom_state={"ballast": BALLAST, "n": number}),
        [{"role": "user"}],
        StepInfo(f"step-{number}", number),
    ),
}


@for_each("step", FORMS_OF_A_STEP)
def test_every_form_of_a_step_keeps_as_many(
    form: CommittedDatabase, store: DatabaseStateStore, step: str
) -> None:
    with kept(2):
        for number in range(1, 6):
            FORMS_OF_A_STEP[step](store, number)
            assert broken_invariants(form) == []
        assert_kept(store, [5, 4])


def test_the_setting_is_read_at_each_step(form: CommittedDatabase, store: DatabaseStateStore) -> None:
    for number in range(1, 31):
        make_step(store, number)
    assert rows_of(form, CheckpointKind.STEP) == 30
    with kept(3):
        make_step(store, 31)
        assert broken_invariants(form) == []
        assert_kept(store, [31, 30, 29])
    make_step(store, 32)
    assert_kept(store, [32, 31, 30, 29])


def test_what_was_kept_can_be_restored_and_branched_and_goes_on(
    form: CommittedDatabase, store: DatabaseStateStore
) -> None:
    with kept(3):
        commits = [make_step(store, number) for number in range(1, 7)]
        branch = store.branch_session("s", commits[3].checkpoint_id, new_session_id="branch")
        assert branch.custom_state["n"] == 4
        store.restore_checkpoint("s", commits[3].checkpoint_id)
        assert_kept(store, [4])
        with pytest.raises(CheckpointNotFound):
            store.restore_checkpoint("s", commits[2].checkpoint_id)
        for number in range(5, 9):
            make_step(store, number)
            assert broken_invariants(form) == []
        assert_kept(store, [8, 7, 6])
        assert store.prune_checkpoints("s", keep=1) == 2
        assert_kept(store, [8])
        make_step(store, 9)
        assert_kept(store, [9, 8])
    assert broken_invariants(form) == []


def test_a_step_that_is_rolled_back_takes_its_pruning_back(
    form: CommittedDatabase, store: DatabaseStateStore
) -> None:
    for number in range(1, 5):
        make_step(store, number)
    with kept(2), transaction.atomic(using=form.alias):
        make_step(store, 5)
        assert_kept(store, [5, 4])
        transaction.set_rollback(True, using=form.alias)
    assert_kept(store, [4, 3, 2, 1])
    assert broken_invariants(form) == []


def test_a_repeated_operation_is_known_after_its_checkpoint_was_dropped(store: DatabaseStateStore) -> None:
    def repeatable() -> StepCommit:
        state = SessionState(session_id="s", agent_type="t", custom_state={"n": 1})
        return store.save_state_and_promote_staging("s", state, [], StepInfo("step-1", 1), operation_id="o")

    with kept(1):
        first = repeatable()
        make_step(store, 2)
        assert repeatable() == first
        assert store.get_checkpoint("s", first.checkpoint_id) is None


@for_each("keep", [0, -1, "2", True, 1.0])
def test_a_number_that_makes_no_sense_is_an_error_before_anything_is_written(
    store: DatabaseStateStore, keep: Any
) -> None:
    before = repr(store.load_state("s"))
    with kept(keep), pytest.raises(ImproperlyConfigured, match="CHECKPOINTS_KEEP"):
        make_step(store, 1)
    assert repr(store.load_state("s")) == before


def test_pruning_costs_no_statement_more_in_the_form_of_one_and_at_most_five_in_the_other(
    form: CommittedDatabase, store: DatabaseStateStore
) -> None:
    step = iter(range(1, 9))

    def counted() -> int:
        state = store.load_state("s")
        assert state is not None
        number = next(step)
        info = StepInfo(f"step-{number}", number)
        return len(sent_by(form.alias, lambda: store.save_state_and_promote_staging("s", state, [], info)))

    make_step(store, 0)
    alone = counted()
    with kept(2):
        first, *pruning = [counted() for _ in range(3)]
    assert alone == (1 if conf.fast_paths() else 4)
    assert max(first, *pruning) == (1 if conf.fast_paths() else 9)
    with kept(8):
        assert counted() == (1 if conf.fast_paths() else 5)
    assert counted() == alone


def test_a_step_that_waited_for_a_deletion_decides_by_what_is_left(
    postgres_forms: CommittedDatabase,
) -> None:
    database, store = postgres_forms, store_of(postgres_forms)
    store.create_session("s", agent_type="t")
    commits = [make_step(store, number) for number in range(1, 5)]
    with kept(3):
        state = store.load_state("s")
        assert state is not None
        state.custom_state = {"n": 5}
        with held_session(database, "s") as alias:
            commit = partial(
                store.save_state_and_promote_staging, "s", state, [{"role": "user"}], StepInfo("step-5", 5)
            )
            writers = Writers([partial(commit, expected_version=state.version)])
            until_backends_wait(database, 1)
            elsewhere = store_of(database, alias)
            for gone in commits[1:3]:
                assert elsewhere.delete_checkpoint("s", gone.checkpoint_id)
        writers.outcomes()[0].unwrap()
        assert_kept(store, [5, 4, 1])
    assert broken_invariants(database) == []


def test_steps_at_once_keep_as_many(postgres_forms: CommittedDatabase) -> None:
    database, store = postgres_forms, store_of(postgres_forms)
    store.create_session("s", agent_type="t")
    with kept(2):
        for number in range(1, 4):
            make_step(store, number)
        for number in range(10):
            with held_session(database, "s"):
                writers = Writers([partial(make_step, store, 10 * number + writer) for writer in range(4)])
                until_backends_wait(database, 4)
            for outcome in writers.outcomes():
                outcome.unwrap()
            assert rows_of(database, CheckpointKind.STEP) == 2
            assert broken_invariants(database) == []
