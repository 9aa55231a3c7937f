"""``python -m benchmarks.streams``: how long a chunk takes from its writer to a reader in another process."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from typing import Any

import django

from benchmarks.server import benchmark_server, create_database

STREAM = "delays"


def main() -> int:
    arguments = _arguments()
    with benchmark_server() as cluster:
        create_database(cluster, "default")
        context = multiprocessing.get_context("spawn")
        is_reading = context.Event()
        writer = context.Process(target=_write, args=(arguments.chunks, arguments.pause, is_reading))
        writer.start()
        delays = asyncio.run(_read(is_reading))
        writer.join()
    milliseconds = sorted(delay * 1_000 for delay in delays)
    print(
        f"{len(milliseconds)} chunks: median {statistics.median(milliseconds):.1f} ms, "
        f"p95 {milliseconds[int(len(milliseconds) * 0.95)]:.1f} ms, longest {milliseconds[-1]:.1f} ms"
    )
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--chunks", type=int, default=300)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between chunks")
    return parser.parse_args()


async def _read(is_reading: Any) -> list[float]:
    from helix_store.stores import DatabaseStreamManager

    manager = DatabaseStreamManager()
    await manager.create_writer(STREAM, "run", "benchmark")
    reader = await manager.create_resumable_reader(STREAM)
    assert reader is not None
    is_reading.set()
    # Both clocks are this machine's monotonic one.
    return [time.monotonic() - stored.chunk["written_at"] async for stored in reader]


def _write(chunks: int, pause: float, is_reading: Any) -> None:
    django.setup()
    asyncio.run(_write_chunks(chunks, pause, is_reading))


async def _write_chunks(chunks: int, pause: float, is_reading: Any) -> None:
    from helix_store.stores import DatabaseStreamManager

    manager = DatabaseStreamManager()
    is_reading.wait(60)
    writer = await manager.create_writer(STREAM, "run", "benchmark")
    for _ in range(chunks):
        await asyncio.sleep(pause)
        await writer.write({"type": "text_delta", "written_at": time.monotonic()})
    await writer.close()
    await manager.end_stream(STREAM)


if __name__ == "__main__":
    sys.exit(main())
