"""Streams: appending ten chunks, reading five hundred."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from benchmarks.bench import Bench
from benchmarks.evidence import Evidence
from benchmarks.figures import Target
from benchmarks.operations import Operation
from benchmarks.pgbench import Script
from benchmarks.races import Client, Comparison, Limit, Race
from benchmarks.reference import execute, reference_schema
from benchmarks.sessions import WORKERS
from helix_store.core.streams import StoredChunk
from helix_store.models import Stream, StreamChunk
from helix_store.stores import DatabaseStreamManager

__all__ = ["CASES"]

STREAMS_PER_WORKER = 25
CHUNKS = 10
READ_STREAM = "reading"
READ_CHUNKS = 10_000
PAGE = 500
_STRIDE = 457


class Append(Operation):
    def __init__(self, worker: int) -> None:
        self.manager = DatabaseStreamManager()
        names = [f"stream-{worker * STREAMS_PER_WORKER + number}" for number in range(STREAMS_PER_WORKER)]
        self.streams = itertools.cycle(names)
        self.chunks = chunks(CHUNKS)

    def __call__(self) -> None:
        self.manager.write_sync(next(self.streams), self.chunks)


class ReadChunks(Operation):
    def __init__(self, worker: int) -> None:
        self.manager = DatabaseStreamManager()
        self.positions = itertools.cycle(range(0, READ_CHUNKS - PAGE, _STRIDE))
        self.position = 0
        self.found: list[StoredChunk] = []

    def __call__(self) -> None:
        self.position = next(self.positions)
        self.found = self.manager.read_after(READ_STREAM, self.position, limit=PAGE)

    def check(self) -> None:
        expected = list(range(self.position + 1, self.position + PAGE + 1))
        assert [stored.sequence for stored in self.found] == expected
        assert self.found[0].chunk["type"] == "text_delta"


def chunks(count: int) -> list[dict[str, Any]]:
    return [{"type": "text_delta", "delta": f"some words of an answer {number}"} for number in range(count)]


def streams(bench: Bench) -> None:
    """The streams of all workers and one of 10,000 chunks, ours and the limit's."""
    asyncio.run(_create_streams())
    manager = DatabaseStreamManager()
    manager.write_sync(READ_STREAM, chunks(READ_CHUNKS))
    bench.once(reference_schema)
    execute(
        "default",
        "INSERT INTO ref_stream SELECT 'stream-' || n, 0, now() FROM generate_series(0, %s - 1) AS n",
        [WORKERS * STREAMS_PER_WORKER],
    )
    execute(
        "default",
        """
        INSERT INTO ref_chunk
        SELECT %s, number, chunk FROM jsonb_array_elements(%s::jsonb) WITH ORDINALITY AS c(chunk, number)""",
        [READ_STREAM, json.dumps(chunks(READ_CHUNKS))],
    )


async def _create_streams() -> None:
    manager = DatabaseStreamManager()
    for name in (READ_STREAM, *(f"stream-{number}" for number in range(WORKERS * STREAMS_PER_WORKER))):
        await manager.create_writer(name, "run", "bench")


CASES = [
    Race(
        contestants={
            "limit": Limit(
                script=Script(
                    choose=f"\\set s :client_id * {STREAMS_PER_WORKER} + :k % {STREAMS_PER_WORKER}",
                    sql=f"""
                        WITH head AS (
                            UPDATE ref_stream
                            SET last_seq = last_seq + {CHUNKS}, updated_at = clock_timestamp()
                            WHERE id = 'stream-' || :s RETURNING id, last_seq
                        )
                        INSERT INTO ref_chunk
                        SELECT head.id, head.last_seq - {CHUNKS} + number, chunk FROM head,
                            jsonb_array_elements(:chunks::jsonb) WITH ORDINALITY AS c(chunk, number);""",
                    parameters={"chunks": json.dumps(chunks(CHUNKS))},
                ),
                evidence=Evidence(
                    "SELECT (SELECT sum(last_seq) FROM ref_stream), (SELECT count(*) FROM ref_chunk)",
                    (CHUNKS, CHUNKS),
                ),
            ),
            "ours": Client(
                operation=Append,
                evidence=Evidence(
                    f'SELECT (SELECT sum(last_sequence) FROM "{Stream._meta.db_table}"), '
                    f'(SELECT count(*) FROM "{StreamChunk._meta.db_table}")',
                    (CHUNKS, CHUNKS),
                ),
            ),
        },
        comparisons=[Comparison(path="append of 10 chunks", target=Target(0.45, 0.65))],
        needs=[streams],
    ),
    Race(
        contestants={
            "limit": Limit(
                script=Script(
                    choose=f"\\set o (:k * {_STRIDE}) % {READ_CHUNKS - PAGE}",
                    sql=f"""
                        SELECT seq, payload FROM ref_chunk
                        WHERE stream_id = '{READ_STREAM}' AND seq > :o ORDER BY seq LIMIT {PAGE};""",
                    rows=PAGE,
                )
            ),
            "ours": Client(operation=ReadChunks),
        },
        comparisons=[Comparison(path="read of 500 chunks", target=Target(0.45, 0.6))],
        needs=[streams],
    ),
]
