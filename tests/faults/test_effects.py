"""Workers that charge cards are killed at any moment: no card is charged twice, and nothing is called done
that did not happen.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from helix_store.core.effects import effect_key
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.faults.crew import pause
from tests.faults.effecting import CALLS, World, charge, mode_of
from tests.invariants import broken_invariants
from tests.processes import WorkerProcess

_SESSIONS: Final = 6
_WORKERS: Final = 2
_KILLS: Final = 10
"""The kills of one trial."""
_LONGEST_PAUSE_SECONDS: Final = 0.4
_ROUNDS: Final = 40
_ROUND_SECONDS: Final = 20.0
_LOOK_SECONDS: Final = 0.1


def run_trial(database: CommittedDatabase, folder: Path, trial: Trial) -> None:
    tenant = f"{database.tenant}-{trial.seed}"
    world = World(folder / f"charges-{trial.seed}")
    store = DatabaseStateStore(database.alias, tenant=tenant)
    session_ids = [f"session-{number}" for number in range(_SESSIONS)]
    for session_id in session_ids:
        store.create_session(session_id, agent_type="shop")
    seeds = iter(range(trial.seed * 1_000, trial.seed * 1_000 + 1_000))

    def worker() -> WorkerProcess:
        return WorkerProcess(charge, database.alias, tenant, str(world.path), session_ids, next(seeds))

    workers = [worker() for _ in range(_WORKERS)]
    try:
        for _ in range(_KILLS):
            pause(trial.chance.uniform(0, _LONGEST_PAUSE_SECONDS))
            victim = trial.chance.randrange(_WORKERS)
            workers[victim].kill()
            trial.count("kills")
            workers[victim] = worker()
    finally:
        for each in workers:
            each.kill()
    _settle_and_finish(database.alias, tenant, store, world, session_ids, trial)
    _require_truth(store, world, tenant, session_ids, trial)
    assert broken_invariants(CommittedDatabase(alias=database.alias, tenant=tenant)) == []


def _settle_and_finish(
    alias: str, tenant: str, store: DatabaseStateStore, world: World, session_ids: list[str], trial: Trial
) -> None:
    """Settle what nobody knows by looking at the world, as a person would, until all sessions are done."""
    locks = DatabaseLockManager(alias, tenant=tenant)
    for _ in range(_ROUNDS):
        # No worker is alive, so nobody can still charge what is settled as not done.
        for session_id in session_ids:
            locks.force_release(session_id)
        for effect in store.find_unknown_effects():
            is_done = effect.key in world.charges()
            result = f"receipt of {effect.key}" if is_done else None
            assert store.settle_effect(effect.session_id, effect.id, done=is_done, result=result)
            trial.count("settled as done" if is_done else "settled as not done")
        if _have_ended(store, session_ids):
            return
        seed = trial.chance.randrange(2**32)
        last = WorkerProcess(charge, alias, tenant, str(world.path), session_ids, seed)
        try:
            give_up = time.monotonic() + _ROUND_SECONDS
            while time.monotonic() < give_up and last.is_alive:
                pause(_LOOK_SECONDS)
                if store.find_unknown_effects() or _have_ended(store, session_ids):
                    break
        finally:
            last.kill()
    raise AssertionError("The sessions did not end.")


def _have_ended(store: DatabaseStateStore, session_ids: list[str]) -> bool:
    states = map(store.load_state, session_ids)
    return all(state is not None and state.status == "completed" for state in states)


def _require_truth(
    store: DatabaseStateStore, world: World, tenant: str, session_ids: list[str], trial: Trial
) -> None:
    charged = Counter(world.charges())
    for session_id in session_ids:
        effects = {effect.id: effect for effect in store.list_effects(session_id).items}
        for number in range(CALLS):
            effect = effects.pop(f"effect-{number}")
            mode = mode_of(session_id, number)
            times = charged.pop(effect_key(tenant, session_id, effect.id), 0)
            trial.count(f"effects {mode}")
            trial.count("attempts", effect.attempt)
            assert effect.state == "done", f"{effect.id} of {session_id}, {mode}: {effect.state}"
            assert times == 1, f"{effect.id} of {session_id}, {mode}: charged {times} times"
            assert effect.result == f"receipt of {effect.key}"
        assert not effects
    assert not charged


@pytest.mark.campaign
@pytest.mark.thorough
def test_no_card_is_charged_twice(committed_db: CommittedDatabase, tmp_path: Path) -> None:
    with campaign("effects", committed_db.vendor, sizes=(1, 100, 1_000)) as made:
        made.run(lambda trial: run_trial(committed_db, tmp_path, trial))
