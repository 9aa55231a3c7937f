"""What clients of one session are told is explained by one order of whole writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from helix_store.stores import (
    DatabaseStateStore,
    DatabaseUsageStore,
    InMemoryLockManager,
    InMemoryStateStore,
    InMemoryUsageStore,
)
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.clients import SESSION, client, read, run_interleaved
from tests.faults.crew import Crew
from tests.faults.history import History, faults_of
from tests.faults.planted import PLANTED, PLANTED_IN_USAGE, GivesTokensTwice

_CLIENTS: Final = 8
_CALLS: Final = 60
_TERMINATIONS: Final = 4
_CONNECTIONS: Final = "SELECT pid FROM pg_stat_activity WHERE application_name = %s ORDER BY pid"
_SEEDS: Final = range(1, 6)


def faults_in_memory(
    store_class: Callable[[], InMemoryStateStore] = InMemoryStateStore,
    locks_class: Callable[..., Any] = InMemoryLockManager,
    usage_class: Callable[..., InMemoryUsageStore] = InMemoryUsageStore,
    *,
    seed: int,
) -> list[str]:
    store = store_class()
    sound = InMemoryStateStore(world=store.world)
    sound.create_session(SESSION, agent_type="agent", custom_state={"list": []})
    history = History()
    locks, usage = locks_class(world=store.world), usage_class(world=store.world)
    clients = [client(store, locks, history, number, seed, 40, usage=usage) for number in range(4)]
    run_interleaved(clients, seed)
    read(sound, history, usage)
    return faults_of(history)


@for_each("store_class", PLANTED, ids=lambda each: each.__name__)
def test_the_checker_finds_a_planted_fault(store_class: type[InMemoryStateStore]) -> None:
    assert any(faults_in_memory(store_class, seed=seed) for seed in _SEEDS)


@pytest.mark.parametrize("usage_class", PLANTED_IN_USAGE, ids=lambda each: each.__name__)
def test_the_checker_finds_a_fault_planted_in_the_ledger(usage_class: type[InMemoryUsageStore]) -> None:
    assert any(faults_in_memory(usage_class=usage_class, seed=seed) for seed in _SEEDS)


def test_the_checker_finds_a_token_that_was_given_twice() -> None:
    assert any(faults_in_memory(locks_class=GivesTokensTwice, seed=seed) for seed in _SEEDS)


def test_the_checker_finds_nothing_in_a_sound_store() -> None:
    assert [faults_in_memory(seed=seed) for seed in _SEEDS] == [[]] * 5


def test_twelve_faults_and_more_are_planted() -> None:
    assert len(PLANTED) + len(PLANTED_IN_USAGE) + 1 >= 12


@pytest.mark.campaign
def test_histories_of_processes_have_one_order(committed_db: CommittedDatabase) -> None:
    is_postgresql = committed_db.vendor == "postgresql"
    name = "postgres" if is_postgresql else "sqlite"
    settings = {**committed_db.connection.settings_dict}
    if is_postgresql:
        settings["OPTIONS"] = {**settings["OPTIONS"], "application_name": committed_db.tenant}

    def race(trial: Trial) -> None:
        tenant = f"{committed_db.tenant}-{trial.seed}"
        store = DatabaseStateStore(committed_db.alias, tenant=tenant)
        store.create_session(SESSION, agent_type="agent", custom_state={"list": []})
        crew.begin(trial.seed, tenant, calls=_CALLS)
        if is_postgresql:
            for number in range(1, _TERMINATIONS + 1):
                crew.wait_for_calls(number * _CLIENTS * _CALLS // (_TERMINATIONS + 2))
                trial.count("connections terminated", terminate_one(committed_db, trial))
        history = crew.outcome()
        read(store, history, DatabaseUsageStore(committed_db.alias, tenant=tenant))
        for event in history.events:
            trial.count(f"{event.call}: {event.result}")
            if event.error is not None:
                trial.count(f"{event.call}: {type(event.error).__name__}")
        trial.count("calls", len(history.events))
        faults = faults_of(history)
        assert not faults, "\n".join(faults[:5])

    sizes = (2, 155, 1_550) if is_postgresql else (2, 40, 400)
    with campaign("histories", name, sizes=sizes) as made, Crew(settings, _CLIENTS) as crew:
        made.run(race)
    assert made.counts["step: ok"], made.counts
    assert not is_postgresql or made.counts["connections terminated"], made.counts


def terminate_one(database: CommittedDatabase, trial: Trial) -> int:
    """End the connection of one client, whatever it does."""
    with database.connection.cursor() as cursor:
        cursor.execute(_CONNECTIONS, [database.tenant])
        clients = [pid for (pid,) in cursor.fetchall()]
        cursor.execute("SELECT pg_terminate_backend(%s)", [trial.chance.choice(clients)])
        return int(cursor.fetchone()[0])
