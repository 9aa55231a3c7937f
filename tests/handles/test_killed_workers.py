"""Workers that are killed, paused, or started twice: the next turn goes on as if nothing had happened.

A longer run::

    HELIX_TEST_KILLS=500 HELIX_TEST_RACES=1000 python -m pytest tests/handles/test_killed_workers.py
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest

from helix_store.core.types import RunStatus, SessionStatus
from helix_store.engine.database import Database
from helix_store.engine.threads import keep_open
from helix_store.exceptions import FencedOutError, LockLostError, SessionBusy
from tests.databases import CommittedDatabase
from tests.handles.workers import STEPS, drive, open_session, pause_in_a_step, take_turn
from tests.handles.worlds import World, database_world
from tests.processes import PROCESSES, WorkerProcess, run_in_threads

pytestmark = pytest.mark.usefixtures("machine")

KILLS: Final = int(os.environ.get("HELIX_TEST_KILLS", "40"))
RACES: Final = int(os.environ.get("HELIX_TEST_RACES", "250"))
_PATIENCE_SECONDS: Final = 60.0


@pytest.fixture
def world(committed_db: CommittedDatabase) -> World:
    return database_world(committed_db)


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that time makes true."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        pause.wait(0.01)


def goes_on(world: World, session_id: str) -> bool:
    """Drive the session in place of a dead worker; ``False`` if the server ran its acquisition just now."""
    world.locks.force_release(session_id)
    try:
        with world.session(session_id).turn() as turn:
            drive(turn)
    except SessionBusy:
        return False
    return True


def story(world: World, session_id: str) -> dict[str, Any]:
    """What a session is in the end, without the times and the versions that each attempt has."""
    state = world.loaded(session_id).to_dict()
    for name in ("session_id", "root_session_id", "stream_id", "version", "created_at", "updated_at"):
        del state[name]
    for call in state["pending_client_tool_calls"].values():
        del call["requested_at"], call["run_id"]
    state["client_tool_call_ownership"] = list(state["client_tool_call_ownership"])
    return {"state": state, "messages": world.session(session_id).messages()}


def require_whole_steps(world: World, database: CommittedDatabase, session_id: str) -> None:
    """Whatever moment it is: each step is stored with all that belongs to it."""
    # At one moment: the server may still run the last statement of a worker that was killed.
    with Database(database.alias, database.tenant).snapshot():
        state = world.loaded(session_id)
        heads = world.session(session_id).checkpoints().items
        entries = world.usage.get_entries(session_id)
    count = state.step_count
    assert state.message_count == 2 * count
    assert state.custom_state.get("calls", []) == [f"{c}-{n}" for n in range(1, count + 1) for c in "ab"]
    assert (state.status is SessionStatus.PAUSED) == (count == STEPS)
    assert list(state.pending_client_tool_calls) == (["approval"] if count == STEPS else [])
    steps = {(head.run_id, head.step_count) for head in heads}
    spent = {(entry.run_id, entry.step_count) for entry in entries}
    assert len(steps) == count
    assert steps <= spent


def test_a_killed_worker_is_followed_by_one_that_goes_on(
    world: World, committed_db: CommittedDatabase
) -> None:
    alias, tenant = committed_db.alias, committed_db.tenant
    world.new_session("undisturbed")
    begun = PROCESSES.Event()
    worker = WorkerProcess(take_turn, alias, tenant, "undisturbed", begun)
    assert begun.wait(_PATIENCE_SECONDS)
    started = time.monotonic()
    worker.outcome().unwrap()
    longest = 1.2 * (time.monotonic() - started)
    expected = story(world, "undisturbed")
    assert world.loaded("undisturbed").step_count == STEPS
    steps_at_death = []
    chance = random.Random(KILLS)  # noqa: S311  the same choices in each run
    for number in range(KILLS):
        name = f"killed-{number}"
        world.new_session(name)
        begun = PROCESSES.Event()
        worker = WorkerProcess(take_turn, alias, tenant, name, begun)
        assert begun.wait(_PATIENCE_SECONDS)
        worker.wait(chance.uniform(0, longest))
        worker.kill()
        steps_at_death.append(world.loaded(name).step_count)
        # The machine may have become faster or slower since the undisturbed worker.
        longest *= {0: 1.25, STEPS: 0.8}.get(steps_at_death[-1], 1.0)
        require_whole_steps(world, committed_db, name)
        until(partial(goes_on, world, name))
        require_whole_steps(world, committed_db, name)
        assert story(world, name) == expected
        runs = world.store.list_runs(name)
        assert RunStatus.RUNNING not in [run.status for run in runs]
        assert len(runs) <= 2
    assert len(set(steps_at_death)) > 2, f"the workers died in few places: {steps_at_death}"


@pytest.mark.parametrize("is_taken_over", [True, False], ids=["taken over", "expired"])
def test_a_worker_that_was_paused_past_its_term_writes_nothing(
    world: World, committed_db: CommittedDatabase, is_taken_over: bool
) -> None:
    world.new_session()
    inside, goes_on = PROCESSES.Event(), PROCESSES.Event()
    worker = WorkerProcess(
        pause_in_a_step, committed_db.alias, committed_db.tenant, "session", inside, goes_on
    )
    assert inside.wait(_PATIENCE_SECONDS)
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        until(lambda: not world.locks.is_locked("session"))
        if is_taken_over:
            with world.session().turn() as turn, turn.step() as step:
                step.say({"role": "assistant", "content": "in time"})
                step.stage("call", merge_changes={"n": 1})
        before = world.contents()
    finally:
        os.kill(worker.pid, signal.SIGCONT)
        # Not before: an event waits for those that it wakes.
        goes_on.set()
    with pytest.raises((FencedOutError, LockLostError)):
        worker.outcome().unwrap()
    assert world.contents() == before
    assert world.loaded().title is None


def test_of_two_workers_that_start_at_once_one_works(world: World, committed_db: CommittedDatabase) -> None:
    alias, tenant = committed_db.alias, committed_db.tenant
    world.new_session()
    at_once = threading.Barrier(2, timeout=_PATIENCE_SECONDS)
    inside: list[int] = []

    def work(worker: int) -> list[str]:
        # With a connection for all rounds: the race is for the lock.
        with keep_open():
            return [race(worker) for _ in range(RACES)]

    def race(worker: int) -> str:
        at_once.wait()
        try:
            with open_session(alias, tenant, "session").turn() as turn:
                inside.append(worker)
                # The other one has its outcome before this one leaves.
                at_once.wait()
                assert inside == [worker], "two workers drive one session"
                with turn.step() as step:
                    step.say({"role": "assistant", "content": str(worker)})
                inside.clear()
        except SessionBusy:
            at_once.wait()
            return "busy"
        return "worked"

    first, second = run_in_threads(work, [(0,), (1,)], timeout=RACES)
    rounds = list(zip(first.unwrap(), second.unwrap(), strict=True))
    assert all(sorted(outcomes) == ["busy", "worked"] for outcomes in rounds)
    assert len(rounds) == RACES
    assert world.loaded().step_count == RACES
    assert world.loaded().message_count == RACES
    runs = world.store.list_runs("session", limit=200)
    assert {run.status for run in runs} == {RunStatus.COMPLETED}
    assert runs[0].turn == RACES
