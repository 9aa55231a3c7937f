"""Writers killed in each kind of write leave it all old or all new, and lose nothing acknowledged."""

from __future__ import annotations

import inspect

import pytest

from helix_store.core.contracts import StateStore
from helix_store.stores import DatabaseStateStore, InMemoryStateStore
from helix_store.testing.state_store.calls import ANSWERING_READS, RAISING_READS
from tests.databases import CommittedDatabase
from tests.faults.campaign import campaign
from tests.faults.killed_writers import kill_writers
from tests.faults.writes import KINDS, begin, everything, story, write
from tests.invariants import broken_invariants
from tests.processes import WorkerProcess

_LISTS = {"list_sessions", "find_expired_pending"}


@pytest.mark.campaign
def test_a_killed_writer_leaves_whole_writes(committed_db: CommittedDatabase) -> None:
    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"
    with campaign("killed_writers", name, sizes=(25, 10_000, 100_000)) as made:
        seeds = list(made.seeds())
        worker = WorkerProcess(kill_writers, committed_db.alias, committed_db.tenant, seeds)
        counts, faults = worker.outcome(timeout=60 + len(seeds)).unwrap()
        made.add(len(seeds), counts, faults)
        made.require_success()
    assert broken_invariants(committed_db) == []
    if made.trials > 1:
        assert made.trials > counts["killed between writes"], counts


def test_a_database_and_memory_have_the_same_after_each_story(committed_db: CommittedDatabase) -> None:
    for seed in range(3):
        database = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
        memory = InMemoryStateStore()
        for store in (database, memory):
            begin(store, f"story-{seed}")
        for kind in story(seed, 20):
            for store in (database, memory):
                write(store, f"story-{seed}", kind)
            assert everything(database, f"story-{seed}") == everything(memory, f"story-{seed}"), kind


def test_no_write_of_the_store_is_left_out() -> None:
    public = {name for name, _ in inspect.getmembers(StateStore, callable) if not name.startswith("_")}
    called = {call.method for call in (*ANSWERING_READS, *RAISING_READS)} | _LISTS | set(KINDS)
    assert {name for name in public - called if name[1:] not in public} == set()
