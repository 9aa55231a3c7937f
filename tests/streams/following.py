"""A reader that follows a writer."""

from __future__ import annotations

import asyncio

from helix_store.core.manager_contracts import StreamManager

__all__ = ["read_each_written_chunk"]


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
