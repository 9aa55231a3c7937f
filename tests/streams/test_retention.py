"""``prune_streams``: over tenants, in batches, and while the streams are in use."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from helix_store.core.streams import PrunedStreams
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.models import Stream, StreamChunk
from helix_store.retention import prune_streams
from helix_store.stores import DatabaseStreamManager
from tests.databases import CommittedDatabase

NO_TIME = timedelta(0)


def _ended(database: CommittedDatabase, stream_id: str, count: int, *, tenant: str = "") -> None:
    streams = DatabaseStreamManager(database.alias, tenant=database.tenant + tenant)
    async_to_sync(streams.create_writer)(stream_id, "run", "agent")
    if count:
        streams.write_sync(stream_id, [{"type": "t"}] * count)
    async_to_sync(streams.end_stream)(stream_id)


def test_one_tenant_or_all_of_them(empty_db: CommittedDatabase) -> None:
    for tenant in ("", "-a", "-b"):
        _ended(empty_db, "stream", 2, tenant=tenant)
    using = {"using": empty_db.alias, "older_than": NO_TIME}
    first = prune_streams(tenant=empty_db.tenant + "-a", **using)  # type: ignore[arg-type]
    assert first == PrunedStreams(streams=1, chunks=2, failed=0)
    expected = PrunedStreams(streams=2, chunks=4, failed=0)
    assert prune_streams(dry_run=True, **using) == expected  # type: ignore[arg-type]
    assert prune_streams(**using) == expected  # type: ignore[arg-type]
    assert StreamChunk.objects.using(empty_db.alias).count() == 0
    assert Stream.objects.using(empty_db.alias).count() == 3


def test_a_stream_whose_writer_died_is_failed_only_for_its_own_tenant(empty_db: CommittedDatabase) -> None:
    for tenant in ("-a", "-b"):
        streams = DatabaseStreamManager(empty_db.alias, tenant=empty_db.tenant + tenant)
        async_to_sync(streams.create_writer)("stream", "run", "agent")
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    Stream.objects.using(empty_db.alias).update(lease_expires_at=long_ago)
    pruned = prune_streams(using=empty_db.alias, tenant=empty_db.tenant + "-a", older_than=NO_TIME)
    assert pruned.failed == 1
    statuses = Stream.objects.using(empty_db.alias).order_by("tenant").values_list("status", flat=True)
    assert list(statuses) == ["failed", "active"]


def test_it_works_in_batches_of_streams_and_of_chunks(empty_db: CommittedDatabase) -> None:
    for number in range(7):
        _ended(empty_db, f"stream-{number}", number)
    _ended(empty_db, "long", 12_000)
    with (
        override_settings(HELIX_STORE={"PAGE_SIZE": 2}),
        CaptureQueriesContext(empty_db.connection) as captured,
    ):
        pruned = prune_streams(using=empty_db.alias, older_than=NO_TIME)
    assert pruned == PrunedStreams(streams=7, chunks=12_021, failed=0)
    deletes = [query for query in captured if query["sql"].startswith("DELETE")]
    assert len(deletes) >= 7 + 3
    assert Stream.objects.using(empty_db.alias).filter(is_emptied=False).count() == 0


def test_a_stream_that_is_locked_is_left_for_the_next_time(postgres_db: CommittedDatabase) -> None:
    _ended(postgres_db, "stream", 3)
    arguments: dict[str, Any] = {
        "using": postgres_db.alias,
        "tenant": postgres_db.tenant,
        "older_than": NO_TIME,
    }
    with postgres_db.second_connection() as holder, holder.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(
            f"SELECT 1 FROM {Stream._meta.db_table} WHERE tenant = %s FOR UPDATE", [postgres_db.tenant]
        )
        assert prune_streams(**arguments).chunks == 0
        cursor.execute("ROLLBACK")
    assert prune_streams(**arguments).chunks == 3


def test_finding_what_is_old_and_who_is_lost_takes_an_index(postgres_db: CommittedDatabase) -> None:
    _ended(postgres_db, "stream", 1)
    with postgres_db.connection.cursor() as cursor:
        with CaptureQueriesContext(postgres_db.connection) as captured:
            prune_streams(using=postgres_db.alias, older_than=timedelta(days=1), dry_run=True)
        cursor.execute("SET enable_seqscan = off")
        try:
            for query in captured.captured_queries:
                cursor.execute(f"EXPLAIN {query['sql']}")
                plan = "\n".join(row[0] for row in cursor.fetchall())
                assert "Seq Scan" not in plan, plan
        finally:
            cursor.execute("RESET enable_seqscan")


@pytest.mark.parametrize("bad", ["x" * 256, "nul\x00", 7], ids=lambda bad: repr(bad)[:10])
def test_a_tenant_is_an_identifier(bad: Any) -> None:
    with pytest.raises(InvalidPayload):
        prune_streams(tenant=bad, older_than=NO_TIME)


@pytest.mark.parametrize("bad", [-NO_TIME - timedelta(1), 5, "1d"], ids=repr)
def test_an_age_is_a_time(bad: Any) -> None:
    with pytest.raises(InvalidQuery):
        prune_streams(older_than=bad)
