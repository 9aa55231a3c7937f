"""A thousand readers on one server process: few connections to the database, and memory that stays."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from asgiref.sync import sync_to_async

from helix_store.stores import DatabaseStreamManager
from tests.asgi_server import AsgiServer, serving
from tests.databases import CommittedDatabase
from tests.streams.event_source import EventSource

_READERS: Final = 1_000
_STREAMS: Final = 50
_ROUNDS: Final = 8
_CHUNKS_PER_ROUND: Final = 20
_MOST_CONNECTIONS: Final = 12
_MOST_THREADS: Final = 40
_MEGABYTE: Final = 1024 * 1024


def test_1000_readers_cost_few_connections_and_constant_memory(postgres_db: CommittedDatabase) -> None:
    with (
        _many_open_files(),
        serving(
            postgres_db,
            settings="tests.streams.server_settings",
            HELIX_TEST_TENANT=postgres_db.tenant,
        ) as server,
    ):
        asyncio.run(_follow(postgres_db, server))


async def _follow(database: CommittedDatabase, server: AsgiServer) -> None:
    streams = DatabaseStreamManager(database.alias, tenant=database.tenant)
    writers = [await streams.create_writer(f"stream-{n}", "run", "agent") for n in range(_STREAMS)]
    async with _readers(server) as sources:
        footprints = []
        for round_number in range(1, _ROUNDS + 1):
            chunk = {"type": "t", "text": "x" * 200, "round": round_number}
            for writer in writers:
                await writer.write_many([chunk] * _CHUNKS_PER_ROUND)
            first = _CHUNKS_PER_ROUND * (round_number - 1) + 1
            for sequence in range(first, first + _CHUNKS_PER_ROUND):
                received = await asyncio.gather(*(source.next() for source in sources))
                assert {(event.id, event.data["round"]) for event in received if event is not None} == {
                    (str(sequence), round_number)
                }
            assert 0 < await _connections_of(server, database) <= _MOST_CONNECTIONS
            footprints.append(server.process.memory_info().rss)
        assert server.process.num_threads() < _MOST_THREADS
        shown = [footprint // _MEGABYTE for footprint in footprints]
        assert footprints[-1] - footprints[2] < 10 * _MEGABYTE, shown
        for number in range(_STREAMS):
            await streams.end_stream(f"stream-{number}", "done")
        last = await asyncio.gather(*(source.next() for source in sources))
        assert {event.event for event in last if event is not None} == {"end"}
        assert await _connections_of(server, database) <= _MOST_CONNECTIONS
    async with asyncio.timeout(30):
        # The server shows no other sign that it noticed the end of the last reader.
        while await _connections_of(server, database):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@asynccontextmanager
async def _readers(server: AsgiServer) -> AsyncIterator[list[EventSource]]:
    sources: list[EventSource] = []
    try:
        for start in range(0, _READERS, 100):
            paths = [f"/streams/stream-{number % _STREAMS}/" for number in range(start, start + 100)]
            sources += await asyncio.gather(*(EventSource.open(server.port, path) for path in paths))
        assert [source.status for source in sources] == [200] * _READERS
        yield sources
    finally:
        await asyncio.gather(*(source.close() for source in sources))


@sync_to_async
def _connections_of(server: AsgiServer, database: CommittedDatabase) -> int:
    with database.connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [server.application_name]
        )
        return int(cursor.fetchone()[0])


@contextmanager
def _many_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * _READERS if hard == resource.RLIM_INFINITY else min(hard, 4 * _READERS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
