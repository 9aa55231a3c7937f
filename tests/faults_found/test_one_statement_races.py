"""What a write decides by is true when it commits, however long it waited for the session's lock.

A statement that waited reads again only the row it waited for. Everything else that it reads is as old as its
start. Each test makes all writers wait for that row before any of them goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.core.types import SessionState, StepCommit, StepInfo
from helix_store.exceptions import ConflictError, FencedOutError, SessionNotFound, StaleStateError
from helix_store.models import Stream, UsageEntry
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing.usage.base import custom
from tests.database.separate import separate_connection
from tests.databases import CommittedDatabase
from tests.faults_found.races import Writers, held, held_session, until, until_backends_wait
from tests.invariants import broken_invariants
from tests.processes import Outcome

pytestmark = pytest.mark.usefixtures("machine")

ROUNDS: Final = 20
WRITERS: Final = 8
PUTS: Final = 3


# Snapshots


def snapshots_of(database: CommittedDatabase, cap: int, alias: str | None = None) -> SnapshotCheckpointer:
    return SnapshotCheckpointer(
        alias or database.alias, tenant=database.tenant, max_checkpoints_per_thread=cap
    )


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_more_writers_than_the_cap_never_leave_more_snapshots_than_the_cap(
    postgres_forms: CommittedDatabase, cap: int
) -> None:
    snapshots = snapshots_of(postgres_forms, cap)

    def put_and_count(thread: str) -> int:
        counts = []
        for _ in range(PUTS):
            snapshots.put(thread, {"version": 1})
            counts.append(len(snapshots.list(thread)))
        return max(counts)

    most, kept = [], []
    for number in range(ROUNDS // 2):
        thread = f"thread-{number}"
        for _ in range(cap):
            snapshots.put(thread, {"version": 1})
        with held_session(postgres_forms, thread):
            writers = Writers([partial(put_and_count, thread)] * WRITERS)
            until_backends_wait(postgres_forms, WRITERS)
        most.append(max(outcome.unwrap() for outcome in writers.outcomes()))
        kept.append(len(snapshots.list(thread)))
    assert most == [cap] * len(most)
    assert kept == [cap] * len(kept)


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_each_snapshot_is_the_newest_when_it_commits(postgres_forms: CommittedDatabase, cap: int) -> None:
    snapshots = snapshots_of(postgres_forms, cap)

    def put(thread: str, writer: int, order: list[tuple[int, int]]) -> None:
        for number in range(PUTS):
            # The session's lock lasts to the end of the block, so the order here is the order of the commits.
            with transaction.atomic(using=postgres_forms.alias):
                snapshots.put(thread, {"version": 1, "by": [writer, number]})
                order.append((writer, number))
                assert snapshots.get(thread) == {"version": 1, "by": [writer, number]}
                assert len(snapshots.list(thread)) == cap

    for round_number in range(ROUNDS // 4):
        thread = f"thread-{round_number}"
        order: list[tuple[int, int]] = []
        for _ in range(cap):
            snapshots.put(thread, {"version": 1})
        with held_session(postgres_forms, thread):
            writers = Writers([partial(put, thread, writer, order) for writer in range(WRITERS)])
            until_backends_wait(postgres_forms, WRITERS)
        for outcome in writers.outcomes():
            outcome.unwrap()
        kept = [snapshots.get(thread, meta.id) for meta in snapshots.list(thread)]
        assert kept == [{"version": 1, "by": list(by)} for by in order[::-1][:cap]]


@pytest.mark.parametrize("cap", [2, 5])
def test_a_put_that_waited_for_a_deletion_drops_no_more_than_the_cap_asks_for(
    postgres_forms: CommittedDatabase, cap: int
) -> None:
    snapshots = snapshots_of(postgres_forms, cap)
    before = [snapshots.put("thread", {"version": 1}) for _ in range(cap)]
    with held_session(postgres_forms, "thread") as alias:
        writers = Writers([lambda: snapshots.put("thread", {"version": 1})])
        until_backends_wait(postgres_forms, 1)
        assert snapshots_of(postgres_forms, cap, alias).delete("thread", before[-1]) == 1
    added = writers.outcomes()[0].unwrap()
    assert [meta.id for meta in snapshots.list("thread")] == [added, *before[-2::-1]]


# Runs


def test_one_of_many_runs_starts(postgres_forms: CommittedDatabase) -> None:
    store = DatabaseStateStore(postgres_forms.alias, tenant=postgres_forms.tenant)
    store.create_session("session", agent_type="agent")
    with held_session(postgres_forms, "session"):
        writers = Writers([partial(store.start_run, "session") for _ in range(WRITERS)])
        until_backends_wait(postgres_forms, WRITERS)
    outcomes = writers.outcomes()
    (started,) = [outcome.value for outcome in outcomes if outcome.error is None]
    assert {type(outcome.error) for outcome in outcomes if outcome.error} == {ConflictError}
    assert store.list_runs("session") == [started]


def test_a_run_that_waited_for_an_interrupt_clears_it(postgres_forms: CommittedDatabase) -> None:
    store = DatabaseStateStore(postgres_forms.alias, tenant=postgres_forms.tenant)
    store.create_session("session", agent_type="agent")
    with held_session(postgres_forms, "session") as alias:
        writers = Writers([partial(store.start_run, "session")])
        until_backends_wait(postgres_forms, 1)
        DatabaseStateStore(alias, tenant=postgres_forms.tenant).request_interrupt("session")
    writers.outcomes()[0].unwrap()
    assert store.check_interrupt("session") is None


# Steps


STATE: Final = SessionState(session_id="s", agent_type="t", custom_state={"saved": True})
BEFORE: Final = 3
"""The version of a session with one step, after which two changes were staged."""
STAGED: Final = {"first": 1, "second": 1}


def store_of(database: CommittedDatabase, alias: str | None = None) -> DatabaseStateStore:
    return DatabaseStateStore(alias or database.alias, tenant=database.tenant)


def stage(store: DatabaseStateStore, call: str, value: int = 1) -> None:
    store.stage_changes("s", "step-2", {"tool_call_id": call, "merge_changes": {call: value}})


def make_step(store: DatabaseStateStore, expected_version: int | None) -> StepCommit:
    state = SessionState(session_id="s", agent_type="t", custom_state={"step": 2})
    return store.save_state_and_promote_staging(
        "s", state, [{"role": "user"}], StepInfo("step-2", 2), expected_version=expected_version
    )


def custom_state(store: DatabaseStateStore) -> dict[str, Any]:
    state = store.load_state("s")
    assert state is not None
    return state.custom_state


def staged(store: DatabaseStateStore) -> dict[str, Any]:
    left: dict[str, Any] = {}
    for change in store.get_staged_changes("s", "step-2"):
        left |= change.merge_changes or {}
    return left


Waiting = Callable[[Callable[[DatabaseStateStore], Any], int | None], Outcome]


@pytest.fixture
def store(postgres_forms: CommittedDatabase) -> DatabaseStateStore:
    return store_of(postgres_forms)


@pytest.fixture(params=["staged by this process", "staged by another one"])
def waiting_step(
    request: pytest.FixtureRequest, postgres_forms: CommittedDatabase, store: DatabaseStateStore
) -> Waiting:
    """Let a step that would merge two staged changes wait while something happens to them."""
    store.create_session("s", agent_type="t")
    store.save_state_and_promote_staging("s", STATE, [], StepInfo("step-1", 1))
    store.merge_custom_state("s", {"merged": True})
    if request.param == "staged by this process":
        stage_both(store)
    else:
        # A store remembers things by alias, so another alias of the same database is another process to it.
        with separate_connection(**postgres_forms.connection.settings_dict) as connection:
            stage_both(store_of(postgres_forms, connection.alias))

    def run(meanwhile: Callable[[DatabaseStateStore], Any], expected_version: int | None) -> Outcome:
        with held_session(postgres_forms, "s") as alias:
            writers = Writers([partial(make_step, store, expected_version)])
            until_backends_wait(postgres_forms, 1)
            meanwhile(store_of(postgres_forms, alias))
        (outcome,) = writers.outcomes()
        assert broken_invariants(postgres_forms) == []
        return outcome

    return run


def stage_both(store: DatabaseStateStore) -> None:
    stage(store, "first")
    stage(store, "second")


def assert_stale(outcome: Outcome) -> None:
    assert isinstance(outcome.error, StaleStateError), outcome
    assert (outcome.error.expected_version, outcome.error.current_version) == (BEFORE, BEFORE + 1)


@pytest.mark.parametrize("expected_version", [None, BEFORE])
def test_a_step_that_waited_for_a_discard_has_none_of_what_was_discarded(
    store: DatabaseStateStore, waiting_step: Waiting, expected_version: int | None
) -> None:
    discarded: list[int] = []
    outcome = waiting_step(
        lambda others: discarded.append(others.discard_staging("s", "step-2")), expected_version
    )
    assert discarded == [2]
    assert outcome.unwrap().new_version == BEFORE + 1
    assert custom_state(store) == {"step": 2}
    assert staged(store) == {}


@pytest.mark.parametrize("expected_version", [None, BEFORE])
def test_a_step_that_waited_for_a_discard_of_another_step_merges_its_own(
    store: DatabaseStateStore, waiting_step: Waiting, expected_version: int | None
) -> None:
    outcome = waiting_step(lambda others: others.discard_staging("s", "step-3"), expected_version)
    assert outcome.unwrap().new_version == BEFORE + 1
    assert custom_state(store) == {"step": 2, **STAGED}
    assert staged(store) == {}


@pytest.mark.parametrize("expected_version", [None, BEFORE])
def test_a_step_that_waited_for_a_replaced_change_takes_the_old_or_the_new(
    store: DatabaseStateStore, waiting_step: Waiting, expected_version: int | None
) -> None:
    outcome = waiting_step(lambda others: stage(others, "first", 2), expected_version)
    assert outcome.unwrap().new_version == BEFORE + 1
    assert (custom_state(store), staged(store)) in (
        ({"step": 2, **STAGED}, {"first": 2}),
        ({"step": 2, **STAGED, "first": 2}, {}),
    )


@pytest.mark.parametrize("expected_version", [None, BEFORE])
def test_a_step_that_waited_for_another_change_takes_it_or_leaves_it(
    store: DatabaseStateStore, waiting_step: Waiting, expected_version: int | None
) -> None:
    outcome = waiting_step(lambda others: stage(others, "third"), expected_version)
    assert outcome.unwrap().new_version == BEFORE + 1
    assert (custom_state(store), staged(store)) in (
        ({"step": 2, **STAGED}, {"third": 1}),
        ({"step": 2, **STAGED, "third": 1}, {}),
    )


CHANGED: Final[dict[str, Callable[[DatabaseStateStore], Any]]] = {
    "promoted": lambda others: others.promote_staging("s", "step-2"),
    "restored": lambda others: others.restore_checkpoint(
        "s", others.list_checkpoints("s").items[0].checkpoint_id
    ),
    "status": lambda others: others.update_status("s", "paused"),
    "compared status": lambda others: others.compare_and_set_status("s", ["active"], "paused"),
    "message": lambda others: others.append_messages("s", [{"role": "user"}]),
}
KEEPS_STAGING: Final = {"status", "compared status", "message"}


@pytest.mark.parametrize("change", CHANGED)
def test_a_step_that_waited_for_another_version_is_stale(
    store: DatabaseStateStore, waiting_step: Waiting, change: str
) -> None:
    assert_stale(waiting_step(CHANGED[change], BEFORE))
    assert custom_state(store).get("step") is None
    assert staged(store) == (STAGED if change in KEEPS_STAGING else {})


@pytest.mark.parametrize("change", CHANGED)
def test_a_step_for_any_version_that_waited_builds_on_the_newest(
    store: DatabaseStateStore, waiting_step: Waiting, change: str
) -> None:
    assert waiting_step(CHANGED[change], None).unwrap().new_version == BEFORE + 2
    assert custom_state(store) == {"step": 2, **(STAGED if change in KEEPS_STAGING else {})}
    assert staged(store) == {}
    assert store.get_message_count("s") == (2 if change == "message" else 1)


@pytest.mark.parametrize("expected_version", [None, BEFORE])
def test_a_step_that_waited_for_a_deletion_finds_no_session(
    store: DatabaseStateStore, waiting_step: Waiting, expected_version: int | None
) -> None:
    outcome = waiting_step(lambda others: others.delete_session("s"), expected_version)
    assert isinstance(outcome.error, SessionNotFound), outcome
    assert store.load_state("s") is None


# One version, one status, one lock


ONE_VERSION: Final[dict[str, Callable[[DatabaseStateStore, int], Any]]] = {
    "save_state_and_promote_staging": lambda store, writer: store.save_state_and_promote_staging(
        "s", state_of(writer), [{"role": "user"}], StepInfo(f"step-{writer}", writer), expected_version=1
    ),
    "save_state": lambda store, writer: store.save_state("s", state_of(writer), expected_version=1),
    "merge_custom_state": lambda store, writer: store.merge_custom_state(
        "s", {"writer": writer}, expected_version=1
    ),
    "append_messages": lambda store, writer: store.append_messages(
        "s", [{"role": "user"}], expected_version=1
    ),
    "promote_staging": lambda store, writer: store.promote_staging("s", "staged", expected_version=1),
}


def state_of(writer: int) -> SessionState:
    return SessionState(session_id="s", agent_type="t", custom_state={"writer": writer})


@pytest.mark.parametrize("write", ONE_VERSION)
def test_of_many_writers_that_expect_one_version_one_commits(
    postgres_forms: CommittedDatabase, store: DatabaseStateStore, write: str
) -> None:
    for _ in range(ROUNDS // 4):
        store.create_session("s", agent_type="t")
        store.stage_changes("s", "staged", {"tool_call_id": "call", "merge_changes": {"staged": 1}})
        with held_session(postgres_forms, "s"):
            writers = Writers([partial(ONE_VERSION[write], store, writer) for writer in range(WRITERS)])
            until_backends_wait(postgres_forms, WRITERS)
        errors = [outcome.error for outcome in writers.outcomes()]
        losses = [error for error in errors if error is not None]
        assert len(losses) == WRITERS - 1
        for error in losses:
            assert isinstance(error, StaleStateError), error
            assert (error.expected_version, error.current_version) == (1, 2)
        assert broken_invariants(postgres_forms) == []
        if write not in ("append_messages", "promote_staging"):
            assert custom_state(store) == {"writer": errors.index(None)}
        store.delete_session("s")


def test_of_many_that_set_one_status_one_wins(
    postgres_forms: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.create_session("s", agent_type="t")
    for number in range(ROUNDS):
        store.update_status("s", "active")
        with held_session(postgres_forms, "s"):
            writers = Writers([partial(store.compare_and_set_status, "s", ["active"], "running")] * WRITERS)
            until_backends_wait(postgres_forms, WRITERS)
        results = [outcome.unwrap() for outcome in writers.outcomes()]
        won = [result.new_version for result in results if result]
        assert won == [2 * number + 3]
        lost = [(result.current_status, result.current_version) for result in results if not result]
        assert lost == [("running", won[0])] * (WRITERS - 1)


@pytest.mark.parametrize("end", ["force_release", "expiry"])
def test_no_step_of_a_former_holder_commits_once_the_next_one_has_the_lock(
    postgres_forms: CommittedDatabase, store: DatabaseStateStore, end: str
) -> None:
    locks = DatabaseLockManager(postgres_forms.alias, tenant=postgres_forms.tenant)
    store.create_session("s", agent_type="t")
    for _ in range(ROUNDS // 2):
        former = locks.acquire("s", ttl_ms=60_000 if end == "force_release" else 50)
        assert former is not None
        if end == "expiry":
            until(lambda: not locks.is_locked("s"), "the term does not end")
        with held_session(postgres_forms, "s"):
            writers = Writers(
                [
                    partial(
                        store.save_state_and_promote_staging,
                        "s",
                        state_of(writer),
                        [],
                        StepInfo(f"step-{writer}", writer),
                        fencing_token=former.fencing_token,
                    )
                    for writer in range(WRITERS)
                ]
            )
            until_backends_wait(postgres_forms, WRITERS)
            if end == "force_release":
                assert locks.force_release("s")
            successor = locks.acquire("s")
            acknowledged_at = version(store)
        outcomes = writers.outcomes()
        if successor is None:
            # Writes that were under way kept the lock from it until they were through.
            successor = locks.acquire("s")
            assert successor is not None
            acknowledged_at = version(store)
        for outcome in outcomes:
            if outcome.error is None:
                assert outcome.value.new_version <= acknowledged_at
            else:
                assert isinstance(outcome.error, FencedOutError), outcome
        assert version(store) == acknowledged_at
        successor.release()


def version(store: DatabaseStateStore) -> int:
    state = store.load_state("s")
    assert state is not None
    return state.version


def test_of_many_that_claim_a_snapshot_one_gets_it(postgres_forms: CommittedDatabase) -> None:
    snapshots = snapshots_of(postgres_forms, 5)
    for _ in range(ROUNDS):
        snapshots.put("thread", {"version": 1})
        writers = Writers(
            [partial(snapshots.claim, "thread", owner=f"owner-{writer}") for writer in range(WRITERS)]
        )
        claims = [outcome.unwrap() for outcome in writers.outcomes()]
        assert len([claim for claim in claims if claim is not None]) == 1


# Usage and streams


@pytest.mark.parametrize("keep_usage", [True, False])
def test_usage_that_waited_for_a_deletion_is_not_recorded(
    postgres_forms: CommittedDatabase, store: DatabaseStateStore, keep_usage: bool
) -> None:
    usage = DatabaseUsageStore(postgres_forms.alias, tenant=postgres_forms.tenant)
    for _ in range(ROUNDS // 4):
        store.create_session("s", agent_type="t")
        with held_session(postgres_forms, "s") as alias:
            writers = Writers([partial(usage.record_entry, custom("s"))] * WRITERS)
            until_backends_wait(postgres_forms, WRITERS)
            store_of(postgres_forms, alias).delete_session("s", keep_usage=keep_usage)
        errors = [outcome.error for outcome in writers.outcomes()]
        assert [type(error) for error in errors] == [SessionNotFound] * WRITERS
        rows = UsageEntry.objects.using(postgres_forms.alias).filter(tenant=postgres_forms.tenant)
        assert not rows.exists()


def test_appends_that_waited_together_number_their_chunks_without_gaps(
    postgres_forms: CommittedDatabase,
) -> None:
    streams = DatabaseStreamManager(postgres_forms.alias, tenant=postgres_forms.tenant)
    async_to_sync(streams.create_writer)("stream", "run", "agent")
    for number in range(ROUNDS):
        chunks = [
            [{"type": "t", "writer": writer, "part": part} for part in range(3)] for writer in range(WRITERS)
        ]
        with held(postgres_forms, Stream, stream_id="stream"):
            writers = Writers([partial(streams.write_sync, "stream", each) for each in chunks])
            until_backends_wait(postgres_forms, WRITERS)
        before = 3 * WRITERS * number
        last = [outcome.unwrap() for outcome in writers.outcomes()]
        assert sorted(last) == list(range(before + 3, before + 3 * WRITERS + 1, 3))
        written = streams.read_after("stream", before)
        assert [chunk.sequence for chunk in written] == list(range(before + 1, before + 3 * WRITERS + 1))
        for writer, end in enumerate(last):
            assert [chunk.chunk for chunk in written if end - 3 < chunk.sequence <= end] == chunks[writer]
