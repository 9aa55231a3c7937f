"""What clients of one session are told is explained by one order of whole writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from helix_store.engine.connections import keep_open
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    InMemoryLockManager,
    InMemoryStateStore,
)
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.clients import SESSION, client, read, run_interleaved
from tests.faults.history import History, faults_of
from tests.faults.planted import PLANTED, GivesTokensTwice
from tests.processes import run_in_threads

_CLIENTS: Final = 4
_CALLS: Final = 12
_SEEDS: Final = range(1, 6)


def faults_in_memory(
    store_class: Callable[[], InMemoryStateStore], locks_class: Callable[..., Any], seed: int
) -> list[str]:
    store = store_class()
    locks = locks_class(world=store.world)
    InMemoryStateStore(world=store.world).create_session(
        SESSION, agent_type="agent", custom_state={"list": []}
    )
    history = History()
    clients = [client(store, locks, history, number, seed, 40) for number in range(_CLIENTS)]
    run_interleaved(clients, seed)
    read(InMemoryStateStore(world=store.world), history)
    return faults_of(history)


@pytest.mark.parametrize("store_class", PLANTED, ids=lambda each: each.__name__)
def test_the_checker_finds_a_planted_fault(store_class: type[InMemoryStateStore]) -> None:
    assert any(faults_in_memory(store_class, InMemoryLockManager, seed) for seed in _SEEDS)


def test_the_checker_finds_a_token_that_was_given_twice() -> None:
    assert any(faults_in_memory(InMemoryStateStore, GivesTokensTwice, seed) for seed in _SEEDS)


def test_the_checker_finds_nothing_in_a_sound_store() -> None:
    assert [faults_in_memory(InMemoryStateStore, InMemoryLockManager, seed) for seed in _SEEDS] == [[]] * 5


def test_twelve_faults_and_more_are_planted() -> None:
    assert len(PLANTED) + 1 >= 12


@pytest.mark.campaign
def test_histories_of_threads_have_one_order(committed_db: CommittedDatabase) -> None:
    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"

    def race(trial: Trial) -> None:
        tenant = f"{committed_db.tenant}-{trial.seed}"
        store = DatabaseStateStore(committed_db.alias, tenant=tenant)
        locks = DatabaseLockManager(committed_db.alias, tenant=tenant)
        store.create_session(SESSION, agent_type="agent", custom_state={"list": []})
        history = History()

        def work(number: int) -> None:
            with keep_open():
                for _ in client(store, locks, history, number, trial.seed, _CALLS):
                    pass

        for outcome in run_in_threads(work, [(number,) for number in range(_CLIENTS)]):
            outcome.unwrap()
        read(store, history)
        for event in history.events:
            trial.count(f"{event.call}: {event.result}")
        trial.count("calls", len(history.events))
        faults = faults_of(history)
        assert not faults, "\n".join(faults[:5])

    with campaign("histories", name, sizes=(5, 1_250, 12_500)) as made:
        made.run(race)
    assert made.counts["step: ok"], made.counts
