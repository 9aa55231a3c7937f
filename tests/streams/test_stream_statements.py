"""What stream calls cost in statements, and what they leave behind when they fail."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from helix_store.exceptions import IntegrityFault, StoreFull, StreamClosed
from helix_store.models import Stream, StreamChunk
from helix_store.stores import DatabaseLockManager, DatabaseStreamManager
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.faults.statements import Fault, Kind, faults

CHUNKS = [{"type": "text_delta", "delta": f"word {number}"} for number in range(100)]


@pytest.fixture
def streams(committed_db: CommittedDatabase) -> DatabaseStreamManager:
    manager = DatabaseStreamManager(committed_db.alias, tenant=committed_db.tenant)
    async_to_sync(manager.create_writer)("stream", "run", "agent")
    return manager


def _sql(captured: CaptureQueriesContext) -> list[str]:
    statements = [query["sql"].strip().upper() for query in captured]
    return [sql for sql in statements if not sql.startswith(("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE"))]


def test_a_hundred_chunks_are_one_insert(
    committed_db: CommittedDatabase, streams: DatabaseStreamManager
) -> None:
    with CaptureQueriesContext(committed_db.connection) as captured:
        assert streams.write_sync("stream", CHUNKS) == 100
    statements = _sql(captured)
    assert sum("INSERT INTO" in sql for sql in statements) == 1
    assert len(statements) == (1 if committed_db.vendor == "postgresql" else 2)


def test_thousands_of_chunks_are_one_insert_too(
    committed_db: CommittedDatabase, streams: DatabaseStreamManager
) -> None:
    chunks = [{"type": "t", "number": number, "text": "\x00 \ud83d '\\\n%s"} for number in range(5_000)]
    with (
        override_settings(HELIX_STORE={"FAST_PATHS": False}),
        CaptureQueriesContext(committed_db.connection) as captured,
    ):
        assert streams.write_sync("stream", chunks) == 5_000
    assert len(_sql(captured)) == 2
    stored = streams.read_after("stream", 0, limit=5_000)
    assert [each.chunk for each in stored] == chunks
    assert [each.sequence for each in stored] == list(range(1, 5_001))


def test_a_write_in_a_thread_leaves_no_connection_open(
    committed_db: CommittedDatabase, streams: DatabaseStreamManager
) -> None:
    def write() -> bool:
        streams.write_sync("stream", CHUNKS[:1])
        return committed_db.connection.connection is None

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(write).result()


def test_a_fence_is_one_statement_more(
    committed_db: CommittedDatabase, streams: DatabaseStreamManager
) -> None:
    lock = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant).acquire("stream")
    assert lock is not None
    with CaptureQueriesContext(committed_db.connection) as captured:
        streams.write_sync("stream", CHUNKS, fencing_token=lock.fencing_token)
    statements = _sql(captured)
    assert len(statements) == (2 if committed_db.vendor == "postgresql" else 3)
    # The lock's row comes before the stream's, as everywhere.
    assert "HELIX_STORE_LOCK" in statements[0]


def test_reading_is_one_query(committed_db: CommittedDatabase, streams: DatabaseStreamManager) -> None:
    streams.write_sync("stream", CHUNKS)
    with CaptureQueriesContext(committed_db.connection) as captured:
        assert len(streams.read_after("stream", 50)) == 50
    assert len(_sql(captured)) == 1


def test_a_page_is_read_through_indexes(postgres_db: CommittedDatabase) -> None:
    streams = DatabaseStreamManager(postgres_db.alias, tenant=postgres_db.tenant)
    async_to_sync(streams.create_writer)("stream", "run", "agent")
    for _ in range(50):
        streams.write_sync("stream", CHUNKS)
    with postgres_db.connection.cursor() as cursor, CaptureQueriesContext(postgres_db.connection) as captured:
        cursor.execute(f"ANALYZE {StreamChunk._meta.db_table}")
        streams.read_after("stream", 100, limit=500)
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {captured.captured_queries[-1]['sql']}")
        (plan,) = cursor.fetchone()[0]
    (of_chunks,) = [node for node in _nodes(plan["Plan"]) if "chunk" in node.get("Relation Name", "")]
    assert of_chunks["Node Type"] in ("Index Scan", "Bitmap Heap Scan")
    assert of_chunks["Actual Rows"] == 500


def test_a_write_goes_with_the_callers_transaction(
    committed_db: CommittedDatabase, streams: DatabaseStreamManager
) -> None:
    with transaction.atomic(using=committed_db.alias):
        assert streams.write_sync("stream", CHUNKS[:3]) == 3
        transaction.set_rollback(True, using=committed_db.alias)
    assert streams.read_after("stream", 0) == []
    assert streams.write_sync("stream", CHUNKS[:1]) == 1


def test_a_refused_write_leaves_the_callers_transaction_usable(
    committed_db: CommittedDatabase, streams: DatabaseStreamManager
) -> None:
    async_to_sync(streams.end_stream)("stream")
    with transaction.atomic(using=committed_db.alias):
        with pytest.raises(StreamClosed):
            streams.write_sync("stream", CHUNKS)
        assert Stream.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).count() == 1


@for_each("lost", [1, 2, 3])
def test_a_lost_chunk_is_no_silent_hole(
    committed_db: CommittedDatabase, streams: DatabaseStreamManager, lost: int
) -> None:
    streams.write_sync("stream", CHUNKS[:3])
    rows = StreamChunk.objects.using(committed_db.alias).filter(stream__tenant=committed_db.tenant)
    rows.filter(sequence=lost).delete()
    assert len(streams.read_after("stream", lost)) == 3 - lost
    with pytest.raises(IntegrityFault):
        streams.read_after("stream", 0)

    async def read() -> None:
        reader = await streams.create_reader("stream")
        assert reader is not None
        await anext(reader)

    with pytest.raises(IntegrityFault):
        async_to_sync(read)()


def test_a_chunk_that_cannot_be_read_harms_no_other(
    committed_db: CommittedDatabase, streams: DatabaseStreamManager
) -> None:
    streams.write_sync("stream", CHUNKS[:3])
    rows = StreamChunk.objects.using(committed_db.alias).filter(stream__tenant=committed_db.tenant)
    rows.filter(sequence=2).update(payload="{broken")
    assert [stored.sequence for stored in streams.read_after("stream", 2)] == [3]
    with pytest.raises(IntegrityFault):
        streams.read_after("stream", 1)


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from _nodes(part)


def test_a_close_that_failed_can_be_made_again(
    committed_db: CommittedDatabase, streams: DatabaseStreamManager
) -> None:
    writer = async_to_sync(streams.create_writer)("stream", "another run", "agent")
    rows = Stream.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    with (
        faults(committed_db.connection, Fault(1, Kind.FULL, after=False)),
        pytest.raises(StoreFull),
    ):
        async_to_sync(writer.close)()
    with pytest.raises(StreamClosed):
        async_to_sync(writer.write)(CHUNKS[0])
    assert rows.get().lease_expires_at is not None
    async_to_sync(writer.close)()
    assert rows.get().lease_expires_at is None
