"""Eight processes post to sessions whose turns finish, fail, wait and are killed: no post is lost."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest

from helix_store.core.posts import Post
from helix_store.core.types import TERMINAL_STATUSES, Message
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.crew import pause
from tests.faults.posting import (
    Accepted,
    Broke,
    Committed,
    Ending,
    Refused,
    Told,
    drive,
    finish,
    post,
)
from tests.faults.receptions import Stored, faults_of
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, WorkerProcess

_POSTERS: Final = 8
_POSTS: Final = 50
"""The posts of each process that are accepted: 400 for a seed."""
_WORKERS: Final = 2
_MOST_TOLD: Final = 12
_SILENCE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 0.1
_PATIENCE_SECONDS: Final = 120.0


class Driver:
    """A worker that can be killed, and what it has told."""

    def __init__(self, alias: str, tenant: str, seed: int) -> None:
        self._ear, theirs = PROCESSES.Pipe(duplex=False)
        self._worker = WorkerProcess(drive, alias, tenant, seed, theirs)
        theirs.close()

    def hear(self, count: int) -> list[Told]:
        """Wait for ``count`` reports, unless the worker is silent for some time."""
        told: list[Told] = []
        while len(told) < count and self._ear.poll(_SILENCE_SECONDS):
            told.append(self._ear.recv())
        return told

    def kill(self) -> list[Told]:
        self._worker.kill()
        return _heard(self._ear)


def _heard(ear: Connection) -> list[Told]:
    told = []
    try:
        while ear.poll():
            told.append(ear.recv())
    except EOFError:
        pass
    return told


def run_history(database: CommittedDatabase, tenant: str, trial: Trial) -> None:
    alias = database.alias
    seeds = iter(range(trial.seed * 1_000, trial.seed * 1_000 + 1_000))
    drivers = [Driver(alias, tenant, next(seeds)) for _ in range(_WORKERS)]
    posters = [WorkerProcess(post, alias, tenant, each, next(seeds), _POSTS) for each in range(_POSTERS)]
    told: list[Told] = []
    try:
        while any(poster.is_alive for poster in posters):
            victim = trial.chance.randrange(_WORKERS)
            told += drivers[victim].hear(trial.chance.randint(1, _MOST_TOLD))
            pause(trial.chance.uniform(0, _LONGEST_PAUSE_SECONDS))
            told += drivers[victim].kill()
            trial.count("kills")
            if trial.chance.random() < 0.5:
                _break_locks(alias, tenant)
            drivers[victim] = Driver(alias, tenant, next(seeds))
        for poster in posters:
            told += poster.outcome(_PATIENCE_SECONDS).unwrap()
    finally:
        told += [each for driver in drivers for each in driver.kill()]
        for poster in posters:
            poster.kill()
    _break_locks(alias, tenant)
    stored = _finished(alias, tenant, told, trial)
    for each in told:
        trial.count(type(each).__name__.lower())
    states = Counter(
        f"posts of {each.status} sessions: {row.state}" for each in stored.values() for row in each.posts
    )
    for state, count in states.items():
        trial.count(state, count)
    faults = faults_of(told, stored)
    assert not faults, "\n".join(faults[:5])
    assert broken_invariants(CommittedDatabase(alias=alias, tenant=tenant)) == []


def _break_locks(alias: str, tenant: str) -> None:
    locks = DatabaseLockManager(alias, tenant=tenant)
    for head in DatabaseStateStore(alias, tenant=tenant).list_sessions(limit=200).sessions:
        locks.force_release(head.session_id)


def _finished(alias: str, tenant: str, told: list[Told], trial: Trial) -> dict[str, Stored]:
    """Finish the sessions that have not ended, and read them all."""
    store = DatabaseStateStore(alias, tenant=tenant)
    stored = {}
    for head in store.list_sessions(limit=200).sessions:
        session = store.session(head.session_id)
        if session.load().status not in TERMINAL_STATUSES:
            trial.count("still waiting", len(session.posts(limit=200).items))
            finish(session, trial.chance, told.append)
        posts, cursor = [], None
        while True:
            page = session.posts(states=("waiting", "received", "withdrawn"), limit=200, cursor=cursor)
            posts += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        for run in store.list_runs(session.id):
            trial.count(f"runs: {run.status}")
        stored[session.id] = Stored(session.load().status.value, session.messages(), posts)
    return stored


_BEGIN: Final = datetime(2026, 11, 25, tzinfo=UTC)
_ANSWER: Final[Message] = {"role": "assistant", "content": "answer"}


def _post(number: int, **changes: Any) -> Post:
    made: dict[str, Any] = {
        "post_id": f"id-{number}",
        "session_id": "s",
        "sequence": number,
        "message": None,
        "author": None,
        "key": str(number),
        "not_before": None,
        "posted_at": _BEGIN + timedelta(seconds=number),
        "state": "received",
        "received_at": _BEGIN + timedelta(minutes=1),
        "position": number - 1,
    }
    return Post(**{**made, **changes})


def _of_user(number: int) -> Message:
    return {"role": "user", "content": str(number)}


_TOLD: Final[list[Told]] = [
    Accepted("s", "1", "id-1", 1.0),
    Accepted("s", "2", "id-2", 2.0),
    Ending("s", 3.0),
    Committed("s", "answer", has_ended=True, at=4.0),
    Refused("s", "completed", "completed", 5.0),
]
_FOUND: Final = Stored("completed", [_of_user(1), _of_user(2), _ANSWER], [_post(1), _post(2)])


def test_the_checker_finds_nothing_in_a_sound_history() -> None:
    assert faults_of(_TOLD, {"s": _FOUND}) == []


@for_each(
    "told",
    [
        [*_TOLD, Broke("s", "StaleStateError")],
        [*_TOLD, Refused("s", "completed", "completed", 2.5)],
        [*_TOLD, Refused("s", "completed", "active", 5.0)],
        [*_TOLD[1:], Accepted("s", "1", "id-1", 4.5)],
        [*_TOLD, Accepted("s", "3", "id-3", 1.0)],
        [*_TOLD, Committed("s", "another", has_ended=False, at=2.0)],
        _TOLD[1:],
    ],
    ids=["stale", "refused early", "not ended", "accepted late", "post lost", "step lost", "never accepted"],
)
def test_the_checker_finds_a_fault_in_what_was_told(told: list[Told]) -> None:
    assert faults_of(told, {"s": _FOUND})


@for_each(
    "changes",
    [
        {"posts": [_post(1), _post(2, state="waiting", position=None, received_at=None)]},
        {"posts": [_post(1, position=1), _post(2, position=0)]},
        {"posts": [_post(1, received_at=_BEGIN + timedelta(minutes=2)), _post(2)]},
        {
            "history": [_of_user(2), _of_user(1), _ANSWER],
            "posts": [_post(1, position=1), _post(2, position=0)],
        },
        {"history": [_of_user(1), _ANSWER]},
        {"history": [_of_user(1), _of_user(2), _of_user(1), _ANSWER]},
        {"history": [_of_user(1), _ANSWER, _of_user(2)], "posts": [_post(1), _post(2, position=2)]},
        {"history": [{**_ANSWER, "tool_calls": [{"id": "call"}]}, _of_user(1), _of_user(2), _ANSWER]},
    ],
    ids=["waiting", "position", "passed", "order", "lost", "twice", "never answered", "in a call"],
)
def test_the_checker_finds_a_fault_in_what_is_stored(changes: dict[str, Any]) -> None:
    assert faults_of(_TOLD, {"s": _FOUND._replace(**changes)})


@pytest.mark.campaign
def test_every_accepted_post_is_received_once_and_in_order(committed_db: CommittedDatabase) -> None:
    name = "postgres" if committed_db.vendor == "postgresql" else "sqlite"
    with campaign("posts", name, sizes=(1, 5, 25)) as made:
        made.run(lambda trial: run_history(committed_db, f"{committed_db.tenant}-{trial.seed}", trial))
    assert made.counts["accepted"] == made.trials * _POSTERS * _POSTS, made.counts
