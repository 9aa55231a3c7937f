"""A notification wakes a reader before the first interval of its polling is over.

Not among the faults that were reported: found while testing them. On 5a5ce78 a process listens only after the
first interval, and a reader that hardly ever polls hears nothing until then.
"""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
from asgiref.sync import async_to_sync

from helix_store.core.streams import StoredChunk
from helix_store.stores import DatabaseStreamManager
from tests.database.separate import fetch
from tests.databases import CommittedDatabase
from tests.faults_found.races import until

PATIENCE_SECONDS: Final = 10.0


@pytest.mark.thorough
def test_a_reader_that_hardly_ever_polls_is_woken_by_each_write(postgres_db: CommittedDatabase) -> None:
    streams = DatabaseStreamManager(postgres_db.alias, tenant=postgres_db.tenant, poll_interval=3_600)

    async def follow() -> list[int]:
        writer = await streams.create_writer("stream", "run", "agent")
        reader = await streams.create_resumable_reader("stream")
        assert reader is not None
        heard: list[int] = []
        reading: asyncio.Task[StoredChunk] | None = None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                for _ in range(5):
                    reading = asyncio.create_task(anext(reader))
                    # The first writes may come before anybody listens.
                    while not reading.done():
                        await writer.write({"type": "t"})
                        await asyncio.wait({reading}, timeout=0.1)
                    heard.append((await reading).sequence)
                    while heard[-1] < (await last_sequence()):
                        heard.append((await anext(reader)).sequence)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.wait({reading})
            await reader.aclose()
            await stop_waiting_for_the_interval()
        return heard

    async def stop_waiting_for_the_interval() -> None:
        """A reader that polls often has the process notice that nobody reads any more."""
        often = DatabaseStreamManager(postgres_db.alias, tenant=postgres_db.tenant, poll_interval=0.05)
        reader = await often.create_resumable_reader("stream", from_sequence=await last_sequence())
        assert reader is not None
        reading = asyncio.create_task(anext(reader))
        await asyncio.wait({reading}, timeout=0.2)
        reading.cancel()
        await asyncio.wait({reading})
        await reader.aclose()

    async def last_sequence() -> int:
        info = await streams.get_info("stream")
        assert info is not None
        return info.last_sequence

    heard = async_to_sync(follow)()
    until(
        lambda: (
            not fetch(
                postgres_db.connection,
                "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'",
            )
        ),
        "the process listens although nobody reads",
    )
    assert heard == list(range(1, len(heard) + 1))
