"""Workers killed anywhere in their turns: the next one takes over, and nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync

from helix_store.exceptions import FencedOutError, LockLostError, SessionBusy
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.crew import pause
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, WorkerProcess

_SESSION: Final = "session"
"""The session, its lock and its stream."""
_KILLS: Final = 4
_STEPS: Final = 3
_TERM_MS: Final = 250
_MOST_TOLD: Final = 10
_LONGEST_PAUSE_SECONDS: Final = 0.01
_PATIENCE_SECONDS: Final = 60.0


def take_turns(alias: str, tenant: str, tell: Connection, is_last: bool) -> None:
    """Take one turn, which must wait for the end of a dead worker's term, or turns without an end."""
    while True:
        try:
            take_a_turn(alias, tenant, tell.send)
        except (SessionBusy, FencedOutError, LockLostError):
            # Its term may also end because the machine is slow, or because somebody has broken the lock.
            pause(0.005)
        else:
            if is_last:
                return


def take_a_turn(alias: str, tenant: str, tell: Callable[[tuple[str, int]], None]) -> None:
    """Publish what a dead worker has stored and not published, then store and publish some steps."""
    streams = DatabaseStreamManager(alias, tenant=tenant)

    def publish(items: list[int]) -> None:
        chunks = [{"type": "item", "item": item} for item in items]
        if chunks:
            streams.write_sync(_SESSION, chunks, fencing_token=token)

    with DatabaseStateStore(alias, tenant=tenant).session(_SESSION).turn(ttl=_TERM_MS) as turn:
        token = turn.fencing_token
        tell(("token", token or 0))
        info = async_to_sync(streams.get_info)(_SESSION)
        assert info is not None
        publish(turn.state.custom_state["items"][info.last_sequence :])
        for _ in range(_STEPS):
            turn.tokens(model="no-such-model", prompt=1)
            with turn.step() as step:
                items = step.state.custom_state["items"]
                item = len(items)
                items.append(item)
                step.stage("call", merge_changes={"staged": item})
                step.say({"role": "assistant", "content": item})
            tell(("stored", item))
            publish([item])
            tell(("published", item))


def follow(alias: str, tenant: str, is_reading: Event) -> list[tuple[int, int]]:
    """The sequences and items of the stream, read from its begin to its end while it is written."""

    async def read() -> list[tuple[int, int]]:
        streams = DatabaseStreamManager(alias, tenant=tenant)
        reader = await streams.create_resumable_reader(_SESSION)
        assert reader is not None
        is_reading.set()
        return [(each.sequence, each.chunk["item"]) async for each in reader]

    return async_to_sync(read)()


def kill_turns(database: CommittedDatabase, tenant: str, trial: Trial) -> None:
    """Let workers take turns one after the other, and kill each but the last one."""
    alias = database.alias
    store, streams = DatabaseStateStore(alias, tenant=tenant), DatabaseStreamManager(alias, tenant=tenant)
    store.create_session(_SESSION, agent_type="agent", custom_state={"items": []})
    async_to_sync(streams.create_writer)(_SESSION, "run", "agent")
    is_reading = PROCESSES.Event()
    reader = WorkerProcess(follow, alias, tenant, is_reading)
    told: list[tuple[str, int]] = []
    try:
        assert is_reading.wait(_PATIENCE_SECONDS)
        for number in range(_KILLS + 1):
            told += work(alias, tenant, trial, is_last=number == _KILLS)
        async_to_sync(streams.end_stream)(_SESSION)
        read = reader.outcome().unwrap()
    finally:
        reader.kill()
    check(database.alias, tenant, told, read)
    trial.count("kills", _KILLS)
    trial.count("steps acknowledged", sum(what == "stored" for what, _ in told))
    trial.count("steps", len(read))
    assert broken_invariants(CommittedDatabase(alias=alias, tenant=tenant)) == []


def work(alias: str, tenant: str, trial: Trial, *, is_last: bool) -> list[tuple[str, int]]:
    """What a worker tells until it is killed, or until the end of its turn."""
    ours, theirs = PROCESSES.Pipe()
    worker = WorkerProcess(take_turns, alias, tenant, theirs, is_last)
    theirs.close()
    if is_last:
        worker.outcome(_PATIENCE_SECONDS).unwrap()
        return heard(ours)
    told: list[tuple[str, int]] = []
    for _ in range(trial.chance.randint(1, _MOST_TOLD)):
        assert ours.poll(_PATIENCE_SECONDS), "the worker is silent"
        try:
            told.append(ours.recv())
        except EOFError:
            worker.outcome().unwrap()
    # An operator may break the lock of a worker that lives: it is killed in what it does then.
    if trial.chance.random() < 0.5:
        trial.count("locks broken", DatabaseLockManager(alias, tenant=tenant).force_release(_SESSION))
    ours.poll(trial.chance.uniform(0, _LONGEST_PAUSE_SECONDS))
    worker.kill()
    trial.count(f"killed after it has told that it has {told[-1][0]}")
    return told + heard(ours)


def heard(pipe: Connection) -> list[tuple[str, int]]:
    told = []
    try:
        while pipe.poll():
            told.append(pipe.recv())
    except EOFError:
        pass
    return told


def check(alias: str, tenant: str, told: list[tuple[str, int]], read: list[tuple[int, int]]) -> None:
    """What was told is there, once and in its order, in the state, messages, usage and stream."""
    store = DatabaseStateStore(alias, tenant=tenant)
    state: Any = store.load_state(_SESSION)
    items = state.custom_state["items"]
    assert items == list(range(len(items))), items
    assert [message["content"] for message in store.get_messages(_SESSION).messages] == items
    assert state.custom_state["staged"] == items[-1]
    assert state.step_count == len(items)
    # A step that was fenced out has spent its tokens too: in another run than the step in its place.
    spent = [
        (each.run_id, each.step_count)
        for each in DatabaseUsageStore(alias, tenant=tenant).get_entries(_SESSION)
    ]
    assert len(spent) == len(set(spent)), f"recorded twice: {spent}"
    assert {number for _, number in spent} == {item + 1 for item in items}, spent
    assert read == list(enumerate(items, start=1)), read
    stored = [item for what, item in told if what == "stored"]
    assert len(stored) == len(set(stored)), f"acknowledged twice: {stored}"
    assert set(stored) <= set(items), f"acknowledged and lost: {stored}"
    tokens = [token for what, token in told if what == "token"]
    assert tokens == sorted(set(tokens)), tokens
    runs = store.list_runs(_SESSION)
    assert sum(run.status == "running" for run in runs) == 0, runs
    assert [run.turn for run in runs] == list(range(len(runs), 0, -1)), runs


@pytest.mark.campaign
def test_the_turn_of_a_killed_worker_is_taken_over(committed_db: CommittedDatabase) -> None:
    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"
    with campaign("killed_turns", name, sizes=(1, 30, 1_000)) as made:
        made.run(lambda trial: kill_turns(committed_db, f"{committed_db.tenant}-{trial.seed}", trial))
    assert made.counts["kills"], made.counts
