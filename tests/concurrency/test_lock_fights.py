"""Many processes fight for few names: at most one holds a name, and every term is told from the others."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import NamedTuple

from helix_store.stores import DatabaseLockManager
from tests.databases import CommittedDatabase
from tests.processes import run_in_processes

_PROCESSES = 16
_NAMES = ("a", "b", "c", "d")
_LONGER_THAN_THE_FIGHT_MS = 600_000


class Held(NamedTuple):
    """A term as its holder saw it, on the clock that all processes of a machine share."""

    name: str
    fencing_token: int
    entered_ns: int
    left_ns: int


def fight(alias: str, tenant: str, rounds: int, seed: int) -> list[Held]:
    """Acquire and release whichever name is free, until ``rounds`` terms are over."""
    locks = DatabaseLockManager(alias, tenant=tenant)
    chosen = random.Random(seed)  # noqa: S311  chance, not a secret
    held: list[Held] = []
    while len(held) < rounds:
        lock = locks.acquire(chosen.choice(_NAMES), ttl_ms=_LONGER_THAN_THE_FIGHT_MS)
        if lock is None:
            continue
        entered = time.monotonic_ns()
        left = time.monotonic_ns()
        assert lock.release()
        held.append(Held(lock.name, lock.fencing_token, entered, left))
    return held


def _assert_one_holder_at_a_time(terms: list[Held]) -> None:
    for name in _NAMES:
        in_order = sorted((term for term in terms if term.name == name), key=lambda term: term.fencing_token)
        tokens = [term.fencing_token for term in in_order]
        assert tokens == list(range(1, len(tokens) + 1))
        for earlier, later in pairwise(in_order):
            assert earlier.left_ns < later.entered_ns, (earlier, later)


def _fight(database: CommittedDatabase, *, acquisitions: int) -> None:
    rounds = acquisitions // _PROCESSES
    arguments = [(database.alias, database.tenant, rounds, seed) for seed in range(_PROCESSES)]
    outcomes = run_in_processes(fight, arguments, timeout=300)
    terms = [term for outcome in outcomes for term in outcome.unwrap()]
    assert len(terms) == acquisitions
    _assert_one_holder_at_a_time(terms)


def test_16_processes_fight_for_4_names_on_postgresql(postgres_db: CommittedDatabase) -> None:
    _fight(postgres_db, acquisitions=10_000)


def test_16_processes_fight_for_4_names_on_sqlite(sqlite_db: CommittedDatabase) -> None:
    _fight(sqlite_db, acquisitions=800)
