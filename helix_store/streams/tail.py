"""Following one stream from synchronous surroundings: what is there, and what comes until it ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, Self

from helix_store.core.payloads import decode
from helix_store.core.streams import StoredChunk, StreamInfo
from helix_store.exceptions import StreamNotFound
from helix_store.streams.manager import StreamManagerBase

__all__ = ["StreamTail"]

_CHECK_SECONDS: Final = 0.2
"""How long a request to stop may wait for the next chunk."""


class StreamTail:
    """Reads a stream from a position on; without one from the oldest chunk that is stored.

    ``position`` is the last sequence that was handled, to go on from. ``info`` is the stream when it was last
    looked at.
    """

    def __init__(self, streams: StreamManagerBase, info: StreamInfo, *, after: int | None = None) -> None:
        self._streams = streams
        self.info = info
        self.removed = info.last_sequence - info.chunk_count
        """How many of the first chunks are not stored any more."""
        self.position = self.removed if after is None else after

    @classmethod
    async def of(cls, streams: StreamManagerBase, stream_id: str, *, after: int | None = None) -> Self:
        """Raises `StreamNotFound`."""
        return cls(streams, await _info(streams, stream_id), after=after)

    async def chunks(
        self, *, follow: bool, is_stopped: Callable[[], bool]
    ) -> AsyncGenerator[StoredChunk, None]:
        """The chunks, until the stream ends, fails or pauses, or ``is_stopped`` returns true.

        A chunk is handled when the next one is asked for. With ``follow=False`` only the chunks that were
        stored at the start. Raises `InvalidQuery`, `StreamNotFound` and `StreamTruncated`.
        """
        stream_id, last = self.info.stream_id, self.info.last_sequence
        reader = await self._streams.create_resumable_reader(stream_id, from_sequence=self.position)
        if reader is None:
            raise StreamNotFound(stream_id)
        if follow or self.position < last:
            async with aclosing(reader.texts(heartbeat=_CHECK_SECONDS)) as texts:
                async for stored in texts:
                    if stored is not None:
                        yield StoredChunk(decode(stored.text), stored.sequence)
                        self.position = stored.sequence
                    if is_stopped() or not (follow or self.position < last):
                        break
        self.info = await _info(self._streams, stream_id)


async def _info(streams: StreamManagerBase, stream_id: str) -> StreamInfo:
    info = await streams.get_info(stream_id)
    if info is None:
        raise StreamNotFound(stream_id)
    return info
