"""What only the in-memory state store has: test helpers, shared worlds, and its own way to be atomic."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from helix_store.core.limits import Limits
from helix_store.core.types import (
    SessionMode,
    SessionState,
    StagedChanges,
    StepCommit,
    StepInfo,
    SubSessionRef,
)
from helix_store.exceptions import (
    ConflictError,
    HelixStoreError,
    IdempotencyConflict,
    InvalidPayload,
    LimitExceeded,
    PatchError,
    RunNotFound,
    SessionExists,
    SessionNotFound,
    StaleStateError,
)
from helix_store.stores.memory import InMemoryStateStore, MemoryWorld
from helix_store.stores.memory.records import SessionRecord

R = TypeVar("R")

THREADS = 16


@pytest.fixture
def world() -> MemoryWorld:
    return MemoryWorld()


@pytest.fixture
def store(world: MemoryWorld) -> InMemoryStateStore:
    return InMemoryStateStore(world=world)


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads that change places all the time, so that a lock that is missing is missed."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(call: Callable[[int], R]) -> list[R | HelixStoreError]:
    """Results or errors of calls that all start at the same moment."""
    return race(lambda _, number: call(number), rounds=1)[0]


def race(call: Callable[[int, int], R], *, rounds: int = 40) -> list[list[R | HelixStoreError]]:
    """Per round, the results or errors of one call from each thread, all started at the same moment."""
    barrier = threading.Barrier(THREADS)

    def attempts(number: int) -> list[R | HelixStoreError]:
        results: list[R | HelixStoreError] = []
        for turn in range(rounds):
            barrier.wait(timeout=30)
            try:
                results.append(call(turn, number))
            except HelixStoreError as error:
                results.append(error)
        return results

    with ThreadPoolExecutor(THREADS) as pool:
        by_thread = list(pool.map(attempts, range(THREADS)))
    return [list(results) for results in zip(*by_thread, strict=True)]


def loaded(store: InMemoryStateStore, session_id: str) -> SessionState:
    state = store.load_state(session_id)
    assert state is not None
    return state


def commit_step(
    store: InMemoryStateStore,
    session_id: str,
    number: int,
    *,
    custom_state: dict[str, Any] | None = None,
    messages: int = 1,
    **options: Any,
) -> str:
    """Commit a step that says its number in the custom state, and return the checkpoint's id."""
    state = replace(loaded(store, session_id), step_count=number)
    state.custom_state = {"number": number} if custom_state is None else custom_state
    texts = [{"role": "user", "content": f"{number}.{index}"} for index in range(messages)]
    step = StepInfo(step_id=f"step-{number}", step_count=number)
    commit = store.save_state_and_promote_staging(session_id, state, texts, step, **options)
    return commit.checkpoint_id


class TestHelpersForTests:
    def test_all_session_ids_are_given_in_the_order_of_creation(self, store: InMemoryStateStore) -> None:
        for session_id in ("b", "c", "a"):
            store.create_session(session_id, agent_type="planner")
        store.update_status("c", "paused")
        assert store.get_all_session_ids() == ["b", "c", "a"]

    def test_the_list_of_session_ids_is_the_callers_own(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")
        store.get_all_session_ids().clear()
        assert store.get_all_session_ids() == ["a"]

    def test_get_sync_gives_what_load_state_gives(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner", custom_state={"n": 1})
        assert store.get_sync("a") == store.load_state("a")
        assert store.get_sync("unknown") is None

    def test_clear_forgets_every_session_of_the_tenant_and_no_other(self, world: MemoryWorld) -> None:
        mine, other = (InMemoryStateStore(tenant=tenant, world=world) for tenant in ("mine", "other"))
        for store in (mine, other):
            store.create_session("a", agent_type="planner")
        mine.clear()
        assert mine.get_all_session_ids() == []
        assert mine.load_state("a") is None
        assert other.get_all_session_ids() == ["a"]

    def test_an_id_is_free_again_after_clear(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")
        commit_step(store, "a", 1)
        store.clear()
        store.clear()
        assert store.create_session("a", agent_type="planner").version == 1
        assert store.get_latest_checkpoint("a") is None
        assert store.get_message_count("a") == 0


class TestWorlds:
    def test_stores_of_one_world_and_tenant_see_each_other(self, world: MemoryWorld) -> None:
        first, second = (InMemoryStateStore(tenant="t", world=world) for _ in range(2))
        first.create_session("a", agent_type="planner")
        second.append_messages("a", [{"role": "user", "content": "hello"}])
        assert first.get_message_count("a") == 1
        with pytest.raises(SessionExists):
            second.create_session("a", agent_type="planner")

    def test_a_store_without_a_world_has_its_own(self) -> None:
        first, second = InMemoryStateStore(), InMemoryStateStore()
        first.create_session("a", agent_type="planner")
        assert not second.session_exists("a")

    def test_another_tenants_session_does_not_exist(self, world: MemoryWorld) -> None:
        InMemoryStateStore(tenant="mine", world=world).create_session("a", agent_type="planner")
        other = InMemoryStateStore(tenant="other", world=world)
        assert other.load_state("a") is None
        assert other.delete_session("a") == 0
        with pytest.raises(SessionNotFound):
            other.update_status("a", "completed")
        assert other.create_session("a", agent_type="planner").version == 1

    def test_a_tenant_is_checked_like_every_id(self) -> None:
        with pytest.raises(InvalidPayload):
            InMemoryStateStore(tenant="a\nb")

    def test_usage_goes_with_its_session_unless_it_is_kept(
        self, world: MemoryWorld, store: InMemoryStateStore
    ) -> None:
        usage = world.tenant("").usage
        for session_id in ("kept", "gone", "untouched"):
            store.create_session(session_id, agent_type="planner")
            usage[session_id] = [{"kind": "tokens"}]
        store.delete_session("kept", keep_usage=True)
        store.delete_session("gone")
        assert list(usage) == ["kept", "untouched"]

    def test_limits_of_the_store_hold_for_what_a_merge_makes(self, world: MemoryWorld) -> None:
        store = InMemoryStateStore(world=world, limits=Limits(max_state_bytes=2_000))
        store.create_session("a", agent_type="planner", custom_state={"notes": ["x" * 700]})
        with pytest.raises(LimitExceeded):
            store.merge_custom_state("a", {"notes": ["y" * 1_500]})
        assert loaded(store, "a").custom_state == {"notes": ["x" * 700]}
        assert loaded(store, "a").version == 1


class TestDetachment:
    """Nothing that a caller holds is what the store holds."""

    def test_what_was_given_can_be_changed_afterwards(self, store: InMemoryStateStore) -> None:
        tags, metadata, custom_state = ["one"], {"key": "value"}, {"list": [1]}
        store.create_session(
            "a", agent_type="planner", tags=tags, metadata=metadata, custom_state=custom_state
        )
        state = loaded(store, "a")
        message: dict[str, Any] = {"role": "user", "content": [{"type": "text"}]}
        store.save_state_and_promote_staging("a", state, [message], StepInfo("step-1", 1))
        patches = [{"op": "add", "path": "/x", "value": {"deep": 1}}]
        store.stage_changes("a", "step-2", StagedChanges(tool_call_id="call", patches=patches))

        tags.append("two")
        metadata["more"] = "value"
        custom_state["list"].append(2)
        state.tags.append("three")
        state.metadata["most"] = "value"
        state.custom_state["list"].append(3)
        message["content"].append("more")
        patches.clear()

        stored = loaded(store, "a")
        assert (stored.tags, stored.metadata, stored.custom_state) == (
            ["one"],
            {"key": "value"},
            {"list": [1]},
        )
        assert store.get_messages("a").messages == [{"role": "user", "content": [{"type": "text"}]}]
        assert len(store.get_staged_changes("a", "step-2")[0].patches) == 1
        checkpoint = store.get_latest_checkpoint("a")
        assert checkpoint is not None
        assert (checkpoint.state.tags, checkpoint.state.custom_state) == (["one"], {"list": [1]})

    def test_what_was_returned_can_be_changed_afterwards(self, store: InMemoryStateStore) -> None:
        created = store.create_session(
            "a", agent_type="planner", tags=["one"], metadata={"key": "value"}, custom_state={"list": [1]}
        )
        store.add_sub_session_refs(
            "a",
            [SubSessionRef(sub_session_id="sub", agent_type="x", location="remote", remote={"url": ["u"]})],
        )
        store.start_run("a", "run")
        store.update_run("a", "run", status="failed", error={"trace": []})
        commit_step(store, "a", 1, custom_state={"list": [1]}, run_id="run")

        def everything() -> list[Any]:
            return [
                store.load_state("a"),
                store.list_sessions().sessions,
                store.get_messages("a").messages,
                store.get_latest_checkpoint("a"),
                store.get_sub_session_refs("a"),
                store.list_runs("a"),
            ]

        before = copy.deepcopy(everything())
        state, heads, messages, checkpoint, refs, runs = everything()
        for value in (created, state, checkpoint.state):
            value.tags.append("two")
            value.metadata["more"] = "value"
            value.custom_state["list"].append(2)
        heads[0].tags.append("two")
        heads[0].metadata["more"] = "value"
        messages[0]["content"] = "changed"
        refs[0].remote["url"].append("v")
        runs[0].error["trace"].append("line")
        assert everything() == before

    def test_a_branch_shares_nothing_with_its_source(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner", tags=["one"], custom_state={"list": [1]})
        store.append_messages("a", [{"role": "user", "content": "first"}])
        store.branch_session("a", new_session_id="b")
        store.append_messages("b", [{"role": "user", "content": "second"}])
        store.merge_custom_state("b", {"list": [2]})
        assert store.get_message_count("a") == 1
        assert loaded(store, "a").custom_state == {"list": [1]}
        assert loaded(store, "b").custom_state == {"list": [1, 2]}


@pytest.mark.usefixtures("restless_threads")
class TestThreads:
    def test_of_many_saves_over_one_version_one_wins(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")
        state = loaded(store, "a")

        def save(turn: int, number: int) -> int:
            mine = replace(state, custom_state={"turn": turn, "writer": number})
            return store.save_state("a", mine, expected_version=turn + 1)

        for turn, results in enumerate(race(save)):
            assert results.count(turn + 2) == 1
            losers = [result for result in results if isinstance(result, StaleStateError)]
            assert [(loser.expected_version, loser.current_version) for loser in losers] == [
                (turn + 1, turn + 2)
            ] * (THREADS - 1)
        winner = results.index(turn + 2)
        assert loaded(store, "a").custom_state == {"turn": turn, "writer": winner}

    def test_of_many_creations_of_one_id_one_wins(self, store: InMemoryStateStore) -> None:
        def create(turn: int, number: int) -> str:
            return store.create_session(f"session-{turn}", agent_type=f"agent-{number}").agent_type

        for turn, results in enumerate(race(create)):
            winners = [result for result in results if isinstance(result, str)]
            assert winners == [loaded(store, f"session-{turn}").agent_type]
            assert sum(isinstance(result, SessionExists) for result in results) == THREADS - 1

    def test_parallel_appends_neither_lose_nor_interleave(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")

        def append(number: int) -> None:
            for _ in range(10):
                store.append_messages("a", [{"role": "user", "content": [number, part]} for part in range(3)])

        in_threads(append)
        contents = [message["content"] for message in store.get_messages("a").messages]
        assert len(contents) == THREADS * 10 * 3
        for first in range(0, len(contents), 3):
            writer = contents[first][0]
            assert contents[first : first + 3] == [[writer, 0], [writer, 1], [writer, 2]]
        assert loaded(store, "a").version == 1 + THREADS * 10

    def test_an_operation_that_many_repeat_is_applied_once(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")
        state = loaded(store, "a")

        def commit(turn: int, _: int) -> StepCommit:
            return store.save_state_and_promote_staging(
                "a",
                state,
                [{"role": "user"}],
                StepInfo(f"step-{turn}", turn),
                expected_version=turn + 1,
                operation_id=f"operation-{turn}",
            )

        rounds = race(commit)
        for turn, results in enumerate(rounds):
            assert results == [results[0]] * THREADS
            assert isinstance(results[0], StepCommit)
            assert results[0].new_version == turn + 2
        assert store.get_message_count("a") == len(rounds)
        assert store.list_checkpoints("a").total == len(rounds)

    def test_of_many_starts_one_run_is_running(self, store: InMemoryStateStore) -> None:
        def start(turn: int, number: int) -> str:
            return store.start_run(f"session-{turn}", f"run-{number}").run_id

        for turn in range(40):
            store.create_session(f"session-{turn}", agent_type="planner")
        for turn, results in enumerate(race(start, rounds=40)):
            started = [result for result in results if isinstance(result, str)]
            assert started == [run.run_id for run in store.list_runs(f"session-{turn}")]
            assert sum(isinstance(result, ConflictError) for result in results) == THREADS - 1

    def test_a_reader_sees_a_step_whole_or_not_at_all(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner", custom_state={"number": 0})
        finished = threading.Event()

        def write() -> None:
            try:
                for number in range(1, 501):
                    commit_step(store, "a", number)
            finally:
                finished.set()

        seen: list[SessionState] = []
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not finished.is_set():
                seen.append(loaded(store, "a"))
            writing.result()
        seen.append(loaded(store, "a"))
        assert seen[-1].message_count == 500
        for state in seen:
            assert (
                state.message_count == state.step_count == state.custom_state["number"] == state.version - 1
            )


def refused_writes() -> Iterator[Any]:
    """Writes to session ``a`` that begin well and fail later, with the error each ends in."""
    good = StagedChanges(tool_call_id="good", merge_changes={"promoted": True})
    bad = StagedChanges(tool_call_id="bad", patches=[{"op": "remove", "path": "/nowhere"}])
    large = StagedChanges(tool_call_id="large", merge_changes={"more": "x" * 900})

    def staged_step(store: InMemoryStateStore, *staged: StagedChanges) -> None:
        for changes in staged:
            store.stage_changes("a", "step-9", changes)

    def step(store: InMemoryStateStore, **options: Any) -> None:
        commit_step(store, "a", 9, messages=2, **options)

    yield pytest.param(
        lambda store: staged_step(store, good, bad), step, PatchError, id="a step whose second patch is bad"
    )
    yield pytest.param(
        lambda store: staged_step(store, good, large),
        lambda store: step(store, custom_state={"large": "y" * 900}),
        LimitExceeded,
        id="a step that grows too large by what was staged",
    )
    yield pytest.param(
        lambda store: staged_step(store, good),
        lambda store: step(store, run_id="unknown"),
        RunNotFound,
        id="a step of an unknown run",
    )
    yield pytest.param(
        lambda store: staged_step(store, good),
        lambda store: step(store, operation_id="taken"),
        IdempotencyConflict,
        id="a step under an operation id with another payload",
    )
    yield pytest.param(
        lambda store: staged_step(store, good, bad),
        lambda store: store.promote_staging("a", "step-9"),
        PatchError,
        id="a promotion whose second patch is bad",
    )
    yield pytest.param(
        lambda _: None,
        lambda store: store.append_messages("a", [{"role": "user"}, {"role": "user", "n": float("nan")}]),
        InvalidPayload,
        id="messages of which the second is bad",
    )
    yield pytest.param(
        lambda _: None,
        lambda store: store.add_sub_session_refs(
            "a",
            [
                SubSessionRef(sub_session_id="new", agent_type="x"),
                SubSessionRef(sub_session_id="known", agent_type="another"),
            ],
        ),
        ConflictError,
        id="refs of which the second differs from what is stored",
    )
    yield pytest.param(
        lambda _: None,
        lambda store: store.save_state(
            "a", replace(loaded(store, "a"), mode=SessionMode.STANDARD, custom_state={"new": True})
        ),
        ConflictError,
        id="a state with another mode",
    )


class TestAllOrNothing:
    @pytest.mark.parametrize(("prepare", "write", "error"), list(refused_writes()))
    def test_a_refused_write_leaves_everything_as_it_was(
        self,
        world: MemoryWorld,
        prepare: Callable[[InMemoryStateStore], None],
        write: Callable[[InMemoryStateStore], object],
        error: type[HelixStoreError],
    ) -> None:
        store = InMemoryStateStore(world=world, limits=Limits(max_state_bytes=1_800))
        store.create_session("a", agent_type="planner", mode="persistent")
        store.add_sub_session_refs("a", [SubSessionRef(sub_session_id="known", agent_type="x")])
        commit_step(store, "a", 1, operation_id="taken")
        prepare(store)
        before = self._copy_of(world, "a")
        with pytest.raises(error):
            write(store)
        assert world.tenant("").sessions == {"a": before}

    def test_a_refused_branch_makes_no_session(self, world: MemoryWorld, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")
        store.create_session("b", agent_type="planner")
        before = self._copy_of(world, "b")
        with pytest.raises(SessionExists):
            store.branch_session("a", new_session_id="b")
        assert store.get_all_session_ids() == ["a", "b"]
        assert world.tenant("").sessions["b"] == before

    @staticmethod
    def _copy_of(world: MemoryWorld, session_id: str) -> SessionRecord:
        return world.tenant("").sessions[session_id].draft()


class TestTrees:
    def test_a_cycle_of_parents_and_refs_is_deleted_once(self, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")
        store.create_session("b", agent_type="planner", parent_session_id="a")
        store.create_session("c", agent_type="planner")
        store.create_session("far", agent_type="planner")
        local = [SubSessionRef(sub_session_id=name, agent_type="planner") for name in ("a", "c", "missing")]
        remote = SubSessionRef(sub_session_id="far", agent_type="planner", location="remote")
        store.add_sub_session_refs("b", [*local, remote])
        assert store.delete_session("a") == 3
        assert store.get_all_session_ids() == ["far"]
