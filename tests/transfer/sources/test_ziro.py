"""``helix_import --from ziro``: what each row becomes, and which snapshot is the newest of its thread."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.core.validation import milliseconds_to_datetime
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.transfer.sources.origins import NOON, ZiroTable
from tests.transfer.sources.running import import_from, import_problems

MICROSECOND = timedelta(microseconds=1)
WRITTEN = milliseconds_to_datetime(NOON) + 456 * MICROSECOND


def uuid7(milliseconds: int, random: int) -> str:
    digits = f"{milliseconds:012x}7{random:03x}8{0:015x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


@pytest.fixture
def snapshots(committed_db: CommittedDatabase) -> SnapshotCheckpointer:
    return SnapshotCheckpointer(committed_db.alias, tenant=committed_db.tenant)


def test_a_thread_keeps_ids_versions_times_and_order(
    ziro: ZiroTable, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer
) -> None:
    ids = [uuid7(NOON + number, random) for number, random in ((0, 9), (1, 5), (2, 1))]
    for number in (1, 0, 2):
        at = WRITTEN + timedelta(milliseconds=number)
        ziro.snapshot("t é", ids[number], {"version": 2, "step": number, "é": [1.5, None]}, created_at=at)
    data = import_from(ziro, committed_db).data
    assert (data["imported"], data["source"], data["left"]) == ({"session": 1}, {"snapshots": 3}, {})
    listed = snapshots.list("t é")
    assert [meta.id for meta in listed] == ids[::-1]
    assert [meta.created_at for meta in listed] == [
        WRITTEN + timedelta(milliseconds=number) for number in (2, 1, 0)
    ]
    assert {meta.agent_snapshot_version for meta in listed} == {2}
    for number, checkpoint_id in enumerate(ids):
        assert snapshots.get("t é", checkpoint_id) == {"version": 2, "step": number, "é": [1.5, None]}
    assert snapshots.get("t é") == snapshots.get("t é", ids[2])
    assert broken_invariants(committed_db) == []


def test_of_one_millisecond_the_snapshot_written_last_is_the_newest(
    ziro: ZiroTable, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer
) -> None:
    """Its id is random there, and the original returns any of them."""
    first, second, third = uuid7(NOON, 900), uuid7(NOON, 100), uuid7(NOON, 500)
    for number, checkpoint_id in enumerate((first, second, third)):
        ziro.snapshot("t", checkpoint_id, created_at=WRITTEN + number * MICROSECOND)
    import_from(ziro, committed_db)
    assert [meta.id for meta in snapshots.list("t")] == [third, second, first]


def test_another_millisecond_is_later_whatever_the_databases_clock_says(
    ziro: ZiroTable, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer
) -> None:
    earlier, later = uuid7(NOON, 900), uuid7(NOON + 1, 100)
    ziro.snapshot("t", earlier, created_at=WRITTEN)
    ziro.snapshot("t", later, created_at=WRITTEN - timedelta(hours=1))
    import_from(ziro, committed_db)
    assert [meta.id for meta in snapshots.list("t")] == [later, earlier]


def test_ids_that_are_no_uuid_are_in_the_order_of_their_text(
    ziro: ZiroTable, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer
) -> None:
    for number, checkpoint_id in enumerate(("checkpoint-b-2", "checkpoint-b-1", "Checkpoint-c")):
        ziro.snapshot("t", checkpoint_id, created_at=WRITTEN + number * MICROSECOND)
    import_from(ziro, committed_db)
    assert [meta.id for meta in snapshots.list("t")] == ["checkpoint-b-2", "checkpoint-b-1", "Checkpoint-c"]


def test_an_imported_thread_is_continued(
    ziro: ZiroTable, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer
) -> None:
    old = uuid7(NOON, 1)
    ziro.snapshot("t", old)
    import_from(ziro, committed_db)
    new = snapshots.put("t", {"version": 2})
    assert [meta.id for meta in snapshots.list("t")] == [new, old]
    claim = snapshots.claim("t", old, owner="worker")
    assert claim is not None
    claim.done()
    assert snapshots.delete_threads(["t"]) == {"t": 2}


def test_another_table_is_read(
    server: str, schema: str, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer
) -> None:
    table = ZiroTable(server, schema, 'agents" {x} %s')
    try:
        table.snapshot("t", "c")
        assert import_from(table, committed_db, "--table", table.table).code == 0
    finally:
        table.drop()
    assert snapshots.get("t") == {"version": 2, "id": "c"}


def test_numbers_are_kept_as_python_reads_them(
    ziro: ZiroTable, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer
) -> None:
    ziro.snapshot("t", "c", '{"version": 1, "a": 1e21, "b": 1.10, "c": 12345678901234567890, "d": -0.0}')
    import_from(ziro, committed_db)
    assert snapshots.get("t") == {"version": 1, "a": 10**21, "b": 1.1, "c": 12345678901234567890, "d": 0.0}


# --- Faults of the source --------------------------------------------------------------------------


@pytest.mark.thorough
@for_each(
    ("document", "reason"),
    [
        ('{"step": 1}', "/snapshot/version: expected a whole number, got NoneType"),
        ('{"version": "2"}', "/snapshot/version: expected a whole number, got str"),
        ('{"version": 0}', "/snapshot/version: expected a whole number from 1"),
        ("[1]", "/snapshot: expected a dict, got list"),
        ('{"version": 2, "a": 1e1500}', "integer digits is 1000"),
        ('{"version": 2, "a": 1e9000}', "/snapshot: it is not readable JSON"),
        ('{"version": 2, "a": %s}' % ("[" * 300 + "]" * 300), "depth is 200"),
        (json.dumps({"version": 2, "a": "x" * 9_000_000}), "max_state_bytes is 8388608"),
    ],
    ids=lambda text: text[:40],
)
def test_a_snapshot_with_a_fault_is_left_and_told_by_its_id(
    ziro: ZiroTable,
    committed_db: CommittedDatabase,
    snapshots: SnapshotCheckpointer,
    document: str,
    reason: str,
) -> None:
    ziro.snapshot("t", "a", version=2)
    ziro.snapshot("t", "b", document)
    ziro.snapshot("t", "c")
    data = import_problems(ziro, committed_db)
    (problem,) = data["problems"]
    assert problem.startswith("snapshot 'b' of thread 't' is left out: ")
    assert reason in problem
    assert (data["source"], data["left"]) == ({"snapshots": 3}, {"snapshots": 1})
    assert [meta.id for meta in snapshots.list("t")] == ["c", "a"]
    assert broken_invariants(committed_db) == []


@for_each("thread_id", ["", "a\nb", "x" * 300])
def test_a_thread_whose_id_is_not_allowed_here_is_left(
    ziro: ZiroTable, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer, thread_id: str
) -> None:
    ziro.snapshot(thread_id, "a")
    ziro.snapshot(thread_id, "b")
    ziro.snapshot("sound", "c")
    data = import_problems(ziro, committed_db)
    assert (data["source"], data["left"]) == ({"snapshots": 3}, {"snapshots": 2})
    assert data["imported"] == {"session": 1}
    assert snapshots.get("sound") is not None


@for_each("at", ["infinity", "-infinity", "12000-01-01", "0044-03-15 BC"])
def test_a_snapshot_with_a_time_that_python_does_not_have_is_left(
    ziro: ZiroTable, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer, at: str
) -> None:
    ziro.snapshot("t", "a", created_at=at)
    ziro.snapshot("t", "b", created_at=WRITTEN)
    data = import_problems(ziro, committed_db)
    assert data["problems"] == [
        "snapshot 'a' of thread 't' is left out: The created_at of a row of Checkpoint cannot be read."
    ]
    assert [meta.created_at for meta in snapshots.list("t")] == [WRITTEN]


def test_a_thread_without_a_readable_snapshot_is_left(
    ziro: ZiroTable, committed_db: CommittedDatabase
) -> None:
    ziro.snapshot("t", "a", "[]")
    data = import_problems(ziro, committed_db)
    assert data["problems"][1] == "thread 't' is left out: problems in its rows: 1"
    assert (data["imported"], data["left"]) == ({}, {"snapshots": 1})


def test_only_whole_threads_are_imported_if_asked_for(
    ziro: ZiroTable, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer
) -> None:
    ziro.snapshot("t", "a", "[]")
    ziro.snapshot("t", "b")
    data = import_problems(ziro, committed_db, "--only-whole")
    assert (data["imported"], data["left"]) == ({}, {"snapshots": 2})
    assert snapshots.list("t") == []


def test_a_time_of_any_zone_is_kept(
    ziro: ZiroTable, committed_db: CommittedDatabase, snapshots: SnapshotCheckpointer
) -> None:
    ziro.snapshot("t", "a", created_at="2026-11-01T01:30:00.000001-05:00")
    import_from(ziro, committed_db)
    expected: Any = datetime(2026, 11, 1, 6, 30, 0, 1, tzinfo=UTC)
    assert snapshots.list("t")[0].created_at == expected
