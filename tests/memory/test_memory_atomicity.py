"""The in-memory store under threads and under errors: one write at a time, and each whole or not at all."""

from __future__ import annotations

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
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import (
    ConflictError,
    HelixStoreError,
    IdempotencyConflict,
    InvalidPayload,
    LimitExceeded,
    PatchError,
    RunNotFound,
    SessionExists,
    StaleStateError,
)
from helix_store.sessions.records import SessionRecord, SessionTable
from helix_store.stores.store import InMemoryStateStore
from tests.memory.conftest import commit_step, loaded

R = TypeVar("R")

THREADS = 16


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads that change places all the time, so that a lock that is missing is missed."""
    interval = sys.getswitchinterval()
    if sys.gettrace() is None:  # Python 3.11 refuses trace functions to threads that begin at once
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
        assert world.table(SessionTable, "") == {"a": before}

    def test_a_refused_branch_makes_no_session(self, world: MemoryWorld, store: InMemoryStateStore) -> None:
        store.create_session("a", agent_type="planner")
        store.create_session("b", agent_type="planner")
        before = self._copy_of(world, "b")
        with pytest.raises(SessionExists):
            store.branch_session("a", new_session_id="b")
        assert store.get_all_session_ids() == ["a", "b"]
        assert world.table(SessionTable, "")["b"] == before

    @staticmethod
    def _copy_of(world: MemoryWorld, session_id: str) -> SessionRecord:
        return world.table(SessionTable, "")[session_id].draft()
