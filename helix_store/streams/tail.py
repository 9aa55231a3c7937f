"""Following one stream from synchronous code: its stored chunks, and new ones until it ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, Self

from helix_store.core.payloads import decode
from helix_store.core.streams import StoredChunk, StreamInfo
from helix_store.exceptions import StreamNotFound
from helix_store.streams.manager import StreamManagerBase

_CHECK_SECONDS: Final = 0.2
"""The longest time that a request to stop waits for the next chunk."""


class StreamTail:
    """A reader from a position, by default from the oldest stored chunk. ``position`` is the last sequence
    that was handled, from which to continue. ``info`` is the stream as it was last read.
    """

    def __init__(self, streams: StreamManagerBase, info: StreamInfo, *, after: int | None = None) -> None:
        self._streams = streams
        self.info = info
        self.removed = info.last_sequence - info.chunk_count
        """The number of first chunks that are no longer stored."""
        self.position = self.removed if after is None else after

    @classmethod
    async def of(cls, streams: StreamManagerBase, stream_id: str, *, after: int | None = None) -> Self:
        """Begin to follow a stream. Raises `StreamNotFound`."""
        return cls(streams, await _info(streams, stream_id), after=after)

    async def chunks(
        self, *, follow: bool, is_stopped: Callable[[], bool]
    ) -> AsyncGenerator[StoredChunk, None]:
        """Yield the chunks, until the stream ends, fails or pauses, or ``is_stopped`` returns true.

        A chunk counts as handled when the next one is requested. ``follow=False`` yields only the chunks that
        were stored at the start. Raises `InvalidQuery`, `StreamNotFound` and `StreamTruncated`.
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
