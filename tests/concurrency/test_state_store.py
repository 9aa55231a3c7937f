"""Many writers at once, in processes of their own, on committed data."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from helix_store.core.types import (
    StagedChanges,
    StepCommit,
    StepInfo,
)
from helix_store.exceptions import (
    CheckpointNotFound,
    ConflictError,
    IdempotencyConflict,
    InvalidQuery,
    SessionExists,
    SessionNotFound,
    StaleStateError,
)
from helix_store.models import Operation
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.processes import run_in_processes, run_in_threads

pytestmark = pytest.mark.usefixtures("machine")

WRITERS = 16


def open_store(alias: str, tenant: str) -> DatabaseStateStore:
    return DatabaseStateStore(alias, tenant=tenant)


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    return open_store(committed_db.alias, committed_db.tenant)


def save_at_version_one(alias: str, tenant: str, writer: int) -> int:
    store = open_store(alias, tenant)
    state = store.load_state("s")
    assert state is not None
    state.custom_state = {"winner": writer}
    return store.save_state("s", state, expected_version=1)


def step_at_version_one(alias: str, tenant: str, writer: int) -> int:
    store = open_store(alias, tenant)
    state = store.load_state("s")
    assert state is not None
    state.custom_state = {"winner": writer}
    info = StepInfo(f"step-{writer}", 1)
    message = {"role": "assistant", "content": f"writer {writer}"}
    return store.save_state_and_promote_staging("s", state, [message], info, expected_version=1).new_version


@pytest.mark.parametrize("run", [run_in_processes, run_in_threads], ids=["processes", "threads"])
@pytest.mark.parametrize("write", [save_at_version_one, step_at_version_one])
def test_of_sixteen_writers_at_one_version_exactly_one_wins(
    committed_db: CommittedDatabase, store: DatabaseStateStore, run: Any, write: Callable[..., int]
) -> None:
    store.create_session("s", agent_type="t")
    arguments = [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    outcomes = run(write, arguments)
    winners = [writer for writer, outcome in enumerate(outcomes) if outcome.error is None]
    assert len(winners) == 1
    losses = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert all(isinstance(error, StaleStateError) for error in losses), losses
    assert {(error.expected_version, error.current_version) for error in losses} == {(1, 2)}
    state = store.load_state("s")
    assert state is not None
    assert (state.version, state.custom_state) == (2, {"winner": winners[0]})
    assert broken_invariants(committed_db) == []


def append_batches(alias: str, tenant: str, writer: int) -> None:
    store = open_store(alias, tenant)
    for batch in range(10):
        store.append_messages(
            "s", [{"role": "user", "writer": writer, "batch": batch, "part": part} for part in range(3)]
        )


def test_parallel_appends_lose_and_interleave_nothing(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("s", agent_type="t")
    outcomes = run_in_processes(
        append_batches, [(committed_db.alias, committed_db.tenant, writer) for writer in range(8)]
    )
    assert [outcome.error for outcome in outcomes] == [None] * 8
    page = store.get_messages("s")
    assert page.total == 8 * 10 * 3
    batches = [page.messages[start : start + 3] for start in range(0, page.total, 3)]
    for parts in batches:
        assert len({(part["writer"], part["batch"]) for part in parts}) == 1
        assert [part["part"] for part in parts] == [0, 1, 2]
    for writer in range(8):
        assert [parts[0]["batch"] for parts in batches if parts[0]["writer"] == writer] == list(range(10))
    assert broken_invariants(committed_db) == []


def create(alias: str, tenant: str, writer: int) -> str:
    return open_store(alias, tenant).create_session("s", agent_type=f"writer-{writer}").agent_type


def test_a_race_to_create_one_session_has_one_winner(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    outcomes = run_in_processes(
        create, [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    )
    winners = [outcome.value for outcome in outcomes if outcome.error is None]
    assert len(winners) == 1
    assert {type(outcome.error) for outcome in outcomes if outcome.error is not None} == {SessionExists}
    state = store.load_state("s")
    assert state is not None
    assert (state.agent_type, state.version) == (winners[0], 1)
    assert broken_invariants(committed_db) == []


def increment(alias: str, tenant: str, writer: int) -> list[int]:
    store = open_store(alias, tenant)
    return [store.increment_step_count("s") for _ in range(20)]


def test_parallel_increments_give_every_number_once(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("s", agent_type="t")
    outcomes = run_in_processes(
        increment, [(committed_db.alias, committed_db.tenant, writer) for writer in range(8)]
    )
    numbers = sorted(number for outcome in outcomes for number in outcome.unwrap())
    assert numbers == list(range(1, 161))


def claim(alias: str, tenant: str, writer: int) -> tuple[bool, str]:
    result = open_store(alias, tenant).compare_and_set_status("s", ["active"], "running")
    return result.ok, "" if result.ok else result.current_status.value


def test_one_compare_and_set_wins_and_the_others_see_why_they_lost(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("s", agent_type="t")
    outcomes = run_in_processes(
        claim, [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    )
    results = Counter(outcome.unwrap() for outcome in outcomes)
    assert results == {(True, ""): 1, (False, "running"): WRITERS - 1}


def run_operation(alias: str, tenant: str, writer: int) -> StepCommit:
    store = open_store(alias, tenant)
    state = store.load_state("s")
    assert state is not None
    state.custom_state = {"notes": ["one"]}
    return store.save_state_and_promote_staging(
        "s",
        state,
        [{"role": "assistant", "content": "once"}],
        StepInfo("step-1", 1),
        operation_id="operation",
    )


def test_twins_of_one_operation_have_one_effect_and_one_result(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("s", agent_type="t")
    outcomes = run_in_processes(
        run_operation, [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    )
    assert len({outcome.unwrap() for outcome in outcomes}) == 1
    assert store.get_message_count("s") == 1
    assert (
        Operation.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant).count() == 1
    )


def stage_parts(alias: str, tenant: str, writer: int) -> None:
    store = open_store(alias, tenant)
    for part in range(15):
        change = StagedChanges(
            tool_call_id=f"{writer}-{part}",
            patches=[{"op": "add", "path": "/notes/-", "value": [writer, part, half]} for half in (1, 2)],
        )
        store.stage_changes("s", "step", change)


def commit_steps(alias: str, tenant: str, writer: int) -> None:
    store = open_store(alias, tenant)
    for number in range(15):
        state = store.load_state("s")
        assert state is not None
        store.save_state_and_promote_staging(
            "s", state, [], StepInfo("step", number), expected_version=state.version
        )


def stage_or_commit(alias: str, tenant: str, writer: int) -> None:
    (commit_steps if writer == 0 else stage_parts)(alias, tenant, writer)


def test_a_change_staged_while_a_step_commits_is_promoted_once_and_whole(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("s", agent_type="t", custom_state={"notes": []})
    arguments = [(committed_db.alias, committed_db.tenant, writer) for writer in range(6)]
    for outcome in run_in_processes(stage_or_commit, arguments):
        outcome.unwrap()
    store.promote_staging("s", "step")
    state = store.load_state("s")
    assert state is not None
    notes = [tuple(note) for note in state.custom_state["notes"]]
    assert sorted(notes) == [
        (writer, part, half) for writer in range(1, 6) for part in range(15) for half in (1, 2)
    ]
    for first, second in zip(notes[::2], notes[1::2], strict=True):
        assert first[:2] == second[:2]
    assert store.get_staged_changes("s", "step") == []


EXPECTED_IN_A_MIX = (
    CheckpointNotFound,
    ConflictError,
    IdempotencyConflict,
    InvalidQuery,
    SessionNotFound,
    StaleStateError,
)


def mixed_operations(alias: str, tenant: str, writer: int) -> Counter[str]:
    """A seeded mix of every write on a few sessions of one tree; anything unexpected is raised."""
    store = open_store(alias, tenant)
    chance = random.Random(writer)  # noqa: S311  a replayable mix
    done: Counter[str] = Counter()
    for number in range(60):
        session_id = f"s{chance.randrange(4)}"
        name = chance.choice(sorted(MIX))
        try:
            MIX[name](store, session_id, writer, number)
            done[name] += 1
        except EXPECTED_IN_A_MIX:
            done["refused"] += 1
    return done


def mixed_step(store: DatabaseStateStore, session_id: str, writer: int, number: int) -> None:
    state = store.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    info = StepInfo(f"step-{writer}", number)
    store.save_state_and_promote_staging(
        session_id, state, [{"role": "user"}], info, expected_version=state.version
    )


def mixed_restore(store: DatabaseStateStore, session_id: str, writer: int, number: int) -> None:
    latest = store.get_latest_checkpoint(session_id)
    if latest is not None:
        store.restore_checkpoint(session_id, latest.checkpoint_id)


def mixed_delete(store: DatabaseStateStore, session_id: str, writer: int, number: int) -> None:
    store.delete_session(session_id)
    store.create_session(session_id, agent_type="t", parent_session_id=None if session_id == "s0" else "s0")


MIX: dict[str, Callable[[DatabaseStateStore, str, int, int], Any]] = {
    "append": lambda store, session_id, writer, number: store.append_messages(
        session_id, [{"role": "user"}] * 2
    ),
    "branch": lambda store, session_id, writer, number: store.branch_session(session_id),
    "delete and create": mixed_delete,
    "increment": lambda store, session_id, writer, number: store.increment_resume_count(session_id),
    "interrupt": lambda store, session_id, writer, number: store.request_interrupt(session_id),
    "merge": lambda store, session_id, writer, number: store.merge_custom_state(session_id, {"n": number}),
    "prune": lambda store, session_id, writer, number: store.prune_checkpoints(session_id, keep=2),
    "refs": lambda store, session_id, writer, number: store.add_sub_session_refs(
        session_id, [{"sub_session_id": f"remote-{writer}", "agent_type": "t", "location": "remote"}]
    ),
    "restore": mixed_restore,
    "run": lambda store, session_id, writer, number: store.start_run(session_id, supersede=True),
    "stage": lambda store, session_id, writer, number: store.stage_changes(
        session_id, f"step-{writer}", {"tool_call_id": f"call-{number}", "merge_changes": {"list": [number]}}
    ),
    "status": lambda store, session_id, writer, number: store.update_status(session_id, "running"),
    "step": mixed_step,
    "truncate": lambda store, session_id, writer, number: store.truncate_messages(session_id, 5),
}


def test_a_random_mix_of_all_writes_never_deadlocks_and_breaks_nothing(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("s0", agent_type="t")
    for number in range(1, 4):
        store.create_session(f"s{number}", agent_type="t", parent_session_id="s0")
    before = deadlocks(committed_db)
    arguments = [(committed_db.alias, committed_db.tenant, writer) for writer in range(8)]
    outcomes = run_in_processes(mixed_operations, arguments, timeout=180)
    done: Counter[str] = sum((outcome.unwrap() for outcome in outcomes), Counter())
    assert sum(done.values()) == 8 * 60
    assert set(MIX) <= set(done)
    assert deadlocks(committed_db) == before
    assert broken_invariants(committed_db) == []


def deadlocks(database: CommittedDatabase) -> int:
    """How many deadlocks PostgreSQL has had to break; SQLite has one writer, and so none."""
    if database.vendor != "postgresql":
        return 0
    with database.connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot(), pg_stat_force_next_flush()")
        cursor.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        count: int = cursor.fetchone()[0]
    return count
