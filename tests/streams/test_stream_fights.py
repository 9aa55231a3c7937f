"""Many processes write, readers come and go: every chunk is delivered once and in order, or the test fails.

``HELIX_TEST_STREAM_CHUNKS`` sets the number of chunks that 8 writers write, by default 20,000.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.test import override_settings

from helix_store.stores import DatabaseStreamManager
from tests.databases import CommittedDatabase
from tests.processes import WorkerProcess

_WRITERS: Final = 8
_READER_PROCESSES: Final = 2
_READERS: Final = 5
_RECONNECTS: Final = 500
_CHUNKS: Final = int(os.environ.get("HELIX_TEST_STREAM_CHUNKS", "20000"))
_CHUNKS_ON_SQLITE: Final = 4_000
_PATIENCE_SECONDS: Final = 600.0


@contextmanager
def _notifications(*, on: bool) -> Iterator[None]:
    with override_settings(HELIX_STORE={"STREAMS": {"notify": on}}):
        yield


def write(alias: str, tenant: str, writer: int, count: int, notify: bool) -> int:
    """Write numbered chunks, one or many at a time; how many were written."""

    async def run() -> int:
        streams = DatabaseStreamManager(alias, tenant=tenant)
        chosen = random.Random(writer)  # noqa: S311  chance, not a secret
        handle = await streams.create_writer("stream", f"run-{writer}", "agent")
        number = 0
        while number < count:
            size = min(chosen.choice((1, 1, 2, 25, 100)), count - number)
            chunks = [{"type": "t", "writer": writer, "number": number + i} for i in range(size)]
            await handle.write_many(chunks)
            number += size
        await handle.close()
        return number

    with _notifications(on=notify):
        return async_to_sync(run)()


def read(alias: str, tenant: str, seed: int, reconnects: int, total: int, notify: bool) -> list[Any]:
    """Read everything with several readers, each of which goes away and comes back at random moments.

    Returns, for each reader, the number of its reconnections and what it saw: sequence, writer and number.
    """

    async def follow(reader: int, breaks: int) -> tuple[int, list[tuple[int, int, int]]]:
        chosen = random.Random(f"{seed} {reader}")  # noqa: S311
        streams = DatabaseStreamManager(alias, tenant=tenant, poll_interval=0.05)
        break_at = sorted(chosen.sample(range(1, total), breaks))
        seen: list[tuple[int, int, int]] = []
        connections = 0
        while True:
            connections += 1
            resumed = await streams.create_resumable_reader(
                "stream", from_sequence=seen[-1][0] if seen else 0
            )
            assert resumed is not None
            is_left = False
            async for stored in resumed:
                seen.append((stored.sequence, stored.chunk["writer"], stored.chunk["number"]))
                if break_at and len(seen) >= break_at[0]:
                    del break_at[0]
                    is_left = True
                    break
            await resumed.aclose()
            if not is_left:
                return connections - 1, seen

    async def run() -> list[Any]:
        return await asyncio.gather(*(follow(reader, reconnects // _READERS) for reader in range(_READERS)))

    with _notifications(on=notify):
        return async_to_sync(run)()


def _assert_delivered_once_and_in_order(seen: list[tuple[int, int, int]], total: int) -> None:
    assert [sequence for sequence, _, _ in seen] == list(range(1, total + 1))
    for writer in range(_WRITERS):
        numbers = [number for _, by, number in seen if by == writer]
        assert numbers == list(range(total // _WRITERS))


def _fight(database: CommittedDatabase, total: int, *, notify: bool) -> None:
    streams = DatabaseStreamManager(database.alias, tenant=database.tenant)
    async_to_sync(streams.create_writer)("stream", "run", "agent")
    where = (database.alias, database.tenant)
    reconnects = _RECONNECTS // _READER_PROCESSES
    readers = [
        WorkerProcess(read, *where, seed, reconnects, total, notify) for seed in range(_READER_PROCESSES)
    ]
    writers = [WorkerProcess(write, *where, writer, total // _WRITERS, notify) for writer in range(_WRITERS)]
    try:
        written = [writer.outcome(_PATIENCE_SECONDS).unwrap() for writer in writers]
        assert sum(written) == total
        async_to_sync(streams.end_stream)("stream")
        followed = [each for reader in readers for each in reader.outcome(_PATIENCE_SECONDS).unwrap()]
    finally:
        for worker in (*writers, *readers):
            worker.kill()
    assert sum(count for count, _ in followed) == _RECONNECTS
    for _, seen in followed:
        _assert_delivered_once_and_in_order(seen, total)


@pytest.mark.parametrize("notify", [True, False], ids=["notifications on", "notifications off"])
def test_8_writers_and_500_reconnecting_readers_on_postgresql(
    postgres_db: CommittedDatabase, notify: bool
) -> None:
    _fight(postgres_db, _CHUNKS, notify=notify)


def test_8_writers_and_500_reconnecting_readers_on_sqlite(sqlite_db: CommittedDatabase) -> None:
    _fight(sqlite_db, _CHUNKS_ON_SQLITE, notify=False)
