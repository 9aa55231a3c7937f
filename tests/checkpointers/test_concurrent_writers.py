"""Eight writers at once on one thread or session, on committed data."""

from __future__ import annotations

import random
from typing import Any

import pytest
from django.db import transaction

from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.core.ids import IdGenerator
from helix_store.exceptions import ConflictError
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.processes import run_in_processes, run_in_threads

pytestmark = pytest.mark.usefixtures("machine")

WRITERS = 8
CALLS = 200
CAP = 100
FEWER_THAN_WRITERS = [1, 2, 5]
"""Caps with which a put may wait while as many other puts as the cap commit."""


class JumpingClock:
    """A clock that stops, and steps forward and back by hours."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  test data
        self._now = 1_800_000_000 * 10**9

    def __call__(self) -> int:
        if self._random.random() < 0.5:
            self._now += self._random.randint(-7_200, 7_200) * 10**9
        return self._now


def put_many(alias: str, tenant: str, writer: int) -> list[str]:
    # Each put has another generator: only the store can bring the ids in order.
    clock = JumpingClock(writer)
    store = SnapshotCheckpointer(
        alias, tenant=tenant, max_checkpoints_per_thread=CAP, id_factory=lambda: IdGenerator(clock)()
    )
    ids = []
    for call in range(CALLS):
        ids.append(store.put("t", {"version": 1, "writer": writer, "call": call}))
        read = store.get("t")
        assert read is not None
        # The newest snapshot is that of this put or of a later put of another writer.
        assert read["writer"] != writer or read["call"] == call
        assert len(store.list("t")) == CAP or call < CAP
    return ids


def test_the_newest_is_the_last_committed_put_and_the_cap_is_exact(
    snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase
) -> None:
    arguments = [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    outcomes = run_in_processes(put_many, arguments, timeout=300)
    written = [outcome.unwrap() for outcome in outcomes]
    assert sum(map(len, written)) == WRITERS * CALLS
    metas = snapshots.list("t")
    assert len(metas) == CAP
    # The latest puts of each writer are left, in the order of its calls.
    for ids in written:
        kept = [meta.id for meta in metas if meta.id in ids]
        assert kept == [each for each in reversed(ids) if each in kept]
        assert not kept or kept[0] == ids[-1]
    newest = snapshots.get("t")
    assert newest is not None
    assert newest["call"] == CALLS - 1
    assert newest == snapshots.get("t", metas[0].id)
    assert broken_invariants(committed_db) == []


def watch_commits(alias: str, tenant: str, writer: int) -> int:
    """Put in a transaction and read before its end: no other put can commit in between."""
    store = SnapshotCheckpointer(alias, tenant=tenant, max_checkpoints_per_thread=CAP)
    seen = 0
    for call in range(25):
        with transaction.atomic(using=alias):
            mine = store.put("t", {"version": 1, "writer": writer, "call": call})
            seen += store.list("t", limit=1)[0].id == mine
            assert len(store.list("t")) <= CAP
    return seen


def test_a_put_is_the_newest_at_the_moment_of_its_commit(
    snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase
) -> None:
    arguments = [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    outcomes = run_in_processes(watch_commits, arguments, timeout=300)
    assert [outcome.unwrap() for outcome in outcomes] == [25] * WRITERS
    assert len(snapshots.list("t")) == CAP


@pytest.mark.parametrize("cap", FEWER_THAN_WRITERS)
def test_more_writers_than_the_cap_keep_it_exactly(committed_db: CommittedDatabase, cap: int) -> None:
    store = SnapshotCheckpointer(
        committed_db.alias, tenant=committed_db.tenant, max_checkpoints_per_thread=cap
    )
    for _ in range(cap):
        store.put("t", {"version": 1})

    def put_and_count() -> set[int]:
        counts = set()
        for _ in range(25):
            store.put("t", {"version": 1})
            counts.add(len(store.list("t")))
        return counts

    outcomes = run_in_threads(put_and_count, [()] * WRITERS)
    assert [outcome.unwrap() for outcome in outcomes] == [{cap}] * WRITERS


@pytest.mark.parametrize("cap", FEWER_THAN_WRITERS)
def test_puts_and_deletions_at_once_leave_what_they_leave_one_after_another(
    committed_db: CommittedDatabase, cap: int
) -> None:
    store = SnapshotCheckpointer(
        committed_db.alias, tenant=committed_db.tenant, max_checkpoints_per_thread=cap
    )
    left: list[str] = []

    # The session stays locked to the end of a block: blocks change ``left`` in the order of their commits.
    def put() -> None:
        for _ in range(25):
            with transaction.atomic(using=committed_db.alias):
                left.append(store.put("t", {"version": 1}))
                del left[:-cap]
                assert [meta.id for meta in store.list("t")] == left[::-1]

    def delete() -> None:
        for _ in range(50):
            newest = store.list("t", limit=1)
            with transaction.atomic(using=committed_db.alias):
                for meta in newest:
                    if store.delete("t", meta.id):
                        left.remove(meta.id)

    left.append(store.put("t", {"version": 1}))
    outcomes = run_in_threads(lambda call: call(), [(put,), (delete,)] * (WRITERS // 2))
    assert [outcome.error for outcome in outcomes] == [None] * WRITERS
    assert [meta.id for meta in store.list("t")] == left[::-1]
    assert broken_invariants(committed_db) == []


def first_put(alias: str, tenant: str, writer: int) -> str:
    return SnapshotCheckpointer(alias, tenant=tenant).put("new", {"version": 1, "writer": writer})


def test_first_puts_of_a_new_thread_at_once_all_arrive(
    snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase
) -> None:
    arguments = [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    ids = {outcome.unwrap() for outcome in run_in_processes(first_put, arguments)}
    assert {meta.id for meta in snapshots.list("new")} == ids
    assert len(ids) == WRITERS


def add_many(alias: str, tenant: str, writer: int) -> list[tuple[int, str | None]]:
    store = GraphCheckpointStore(alias, tenant=tenant)
    added = [store.add_message("s", role="user", content=f"{writer}/{call}") for call in range(CALLS)]
    return [(message.id, message.content) for message in added]


def test_each_caller_gets_the_message_that_it_added(
    graph: GraphCheckpointStore, committed_db: CommittedDatabase
) -> None:
    graph.create_session("", session_id="s")
    arguments = [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    outcomes = run_in_processes(add_many, arguments, timeout=300)
    returned: dict[int, str | None] = {}
    for writer, outcome in enumerate(outcomes):
        rows = outcome.unwrap()
        assert [content for _, content in rows] == [f"{writer}/{call}" for call in range(CALLS)]
        assert [key for key, _ in rows] == sorted(key for key, _ in rows)
        returned.update(rows)
    stored = graph.get_messages("s")
    assert len(stored) == WRITERS * CALLS
    assert {message.id: message.content for message in stored} == returned
    assert [message.id for message in stored] == sorted(returned)
    times = [message.created_at for message in stored]
    assert times == sorted(set(times))
    assert broken_invariants(committed_db) == []


def save_many(alias: str, tenant: str, writer: int) -> list[int]:
    store = GraphCheckpointStore(alias, tenant=tenant)
    return [store.save_checkpoint("s", step=writer).version for _ in range(25)]


def test_parallel_saves_take_every_version_once(
    graph: GraphCheckpointStore, committed_db: CommittedDatabase
) -> None:
    graph.create_session("", session_id="s")
    arguments = [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    outcomes = run_in_processes(save_many, arguments, timeout=120)
    versions = sorted(version for outcome in outcomes for version in outcome.unwrap())
    assert versions == list(range(1, WRITERS * 25 + 1))


def save_version_seven(alias: str, tenant: str, writer: int) -> bool:
    try:
        GraphCheckpointStore(alias, tenant=tenant).save_checkpoint("s", step=writer, version=7)
    except ConflictError:
        return False
    return True


def test_of_eight_saves_of_one_version_one_succeeds_and_seven_raise(
    graph: GraphCheckpointStore, committed_db: CommittedDatabase
) -> None:
    graph.create_session("", session_id="s")
    arguments = [(committed_db.alias, committed_db.tenant, writer) for writer in range(WRITERS)]
    won: list[Any] = [outcome.unwrap() for outcome in run_in_processes(save_version_seven, arguments)]
    assert won.count(True) == 1
    latest = graph.get_latest_checkpoint("s")
    assert latest is not None
    assert (latest.version, latest.step) == (7, won.index(True))
