"""LISTEN on a direct alias, while everything else goes through a pooler."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections
from django.test import override_settings

from helix_store.core.contracts import StreamManager
from helix_store.core.streams import LONGEST_SECONDS
from helix_store.models import Stream
from helix_store.stores import DatabaseStreamManager
from helix_store.streams.watching import Listener
from tests.databases import CommittedDatabase
from tests.deployments.conftest import PooledAlias

_PATIENCE_SECONDS = 30.0


async def read_each_written_chunk(
    written: StreamManager, read: StreamManager, stream_id: str, *, chunks: int, patience_seconds: float
) -> list[int]:
    """The sequences that a reader of ``read`` gets, each before the next chunk is written to ``written``."""
    writer = await written.create_writer(stream_id, "run", "agent")
    reader = await read.create_resumable_reader(stream_id)
    assert reader is not None
    sequences = []
    for _ in range(chunks):
        await writer.write({"type": "t"})
        async with asyncio.timeout(patience_seconds):
            sequences.append((await anext(reader)).sequence)
    await reader.aclose()
    await writer.close()
    return sequences


def _listening_on(value: Any) -> Any:
    return override_settings(HELIX_STORE={"STREAMS": {"listen_database": value}})


@pytest.mark.parametrize("of_each", [False, True], ids=["one name", "by alias"])
def test_a_listener_on_the_direct_alias_hears_a_writer_behind_the_pooler(
    postgres_db: CommittedDatabase, pooled_alias: PooledAlias, of_each: bool
) -> None:
    direct = postgres_db.alias
    with pooled_alias() as alias, _listening_on({alias: direct} if of_each else direct):
        is_connected, is_heard = threading.Event(), threading.Event()
        streams = DatabaseStreamManager(alias, tenant=postgres_db.tenant)
        async_to_sync(streams.create_writer)("stream", "run", "agent")
        key = Stream.objects.using(alias).get(tenant=postgres_db.tenant).pk
        listener = Listener(
            alias,
            changed=lambda changed: is_heard.set() if changed == key else None,
            missed=is_connected.set,
            probe_interval=LONGEST_SECONDS,
        )
        try:
            assert is_connected.wait(_PATIENCE_SECONDS)
            streams.write_sync("stream", [{"type": "t"}])
            assert is_heard.wait(_PATIENCE_SECONDS)
            assert listener.times_connected == 1
        finally:
            listener.stop()
            listener.join()


def test_a_reader_gets_chunks_without_polling(
    postgres_db: CommittedDatabase, pooled_alias: PooledAlias
) -> None:
    with pooled_alias() as alias, _listening_on(postgres_db.alias):
        streams = DatabaseStreamManager(alias, tenant=postgres_db.tenant, poll_interval=LONGEST_SECONDS)
        sequences = async_to_sync(read_each_written_chunk)(
            streams, streams, "stream", chunks=5, patience_seconds=_PATIENCE_SECONDS
        )
        assert sequences == [1, 2, 3, 4, 5]
        assert _listening_sessions(postgres_db.alias) >= 1


def _listening_sessions(alias: str) -> int:
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE query LIKE 'LISTEN%%' AND datname = current_database() AND client_port = -1"
        )
        (count,) = cursor.fetchone()
    return int(count)
