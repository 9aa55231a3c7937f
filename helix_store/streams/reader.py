"""Reading a stream while it is written, from any position, without a gap and without a repetition."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

from helix_store.core.payloads import decode
from helix_store.core.streams import (
    FIRST_PAGE,
    StoredChunk,
    StreamHead,
    StreamInfo,
    StreamPage,
    next_page_length,
    same_stream,
)
from helix_store.core.types import StreamStatus
from helix_store.streams.backend import StreamBackend, StreamWatch

__all__ = ["ResumableReader", "StoredText"]


class StoredText(NamedTuple):
    sequence: int
    text: str


class ResumableReader:
    """Iterates over the chunks after a position until the stream is over or paused.

    ``status`` is that of the stream when it was last read. Iterating raises `StreamTruncated` when pruning or
    a reset overtakes it, and `StreamNotFound` when the stream is deleted. It holds a page of chunks at most,
    however slowly it is read.
    Source: the stream manager of the in-memory store document.
    """

    def __init__(
        self, backend: StreamBackend, watch: StreamWatch, stream_id: str, head: StreamHead, after: int
    ) -> None:
        self._backend = backend
        self._watch = watch
        self._stream_id = stream_id
        self._head = head
        self._after = after
        self._chunks: AsyncGenerator[StoredChunk, None] | None = None

    @property
    def stream_id(self) -> str:
        return self._stream_id

    @property
    def status(self) -> StreamStatus:
        return self._head.status

    @property
    def position(self) -> int:
        """The last sequence that was delivered, or where reading began."""
        return self._after

    async def info(self) -> StreamInfo | None:
        """What is known of the stream now; ``None`` once it is deleted."""
        query = partial(self._backend.info, self._stream_id)
        return await self._watch.read(query, ("info", self._head.incarnation))

    def __aiter__(self) -> AsyncIterator[StoredChunk]:
        return self

    async def __anext__(self) -> StoredChunk:
        if self._chunks is None:
            self._chunks = self._decoded()
        return await anext(self._chunks)

    async def aclose(self) -> None:
        """Stop reading. Safe to repeat."""
        if self._chunks is not None:
            await self._chunks.aclose()

    async def _decoded(self) -> AsyncGenerator[StoredChunk, None]:
        async with aclosing(self.texts()) as texts:
            async for stored in texts:
                if stored is not None:
                    yield StoredChunk(decode(stored.text), stored.sequence)

    async def texts(self, *, heartbeat: float | None = None) -> AsyncGenerator[StoredText | None, None]:
        """The same as stored texts, with ``None`` whenever nothing came for ``heartbeat`` seconds."""
        length = FIRST_PAGE
        try:
            while True:
                page = await self._next_page(length)
                for sequence, text in enumerate(page.texts, page.first_sequence):
                    self._after = sequence
                    yield StoredText(sequence, text)
                length = next_page_length(page.texts)
                if self._after < page.head.last_sequence:
                    continue
                if page.head.status is not StreamStatus.ACTIVE:
                    return
                while not await self._watch.changed(page.head, heartbeat):
                    yield None
        finally:
            self._watch.close()

    async def _next_page(self, length: int) -> StreamPage:
        key = (self._head.incarnation, self._after, length)
        read = partial(self._backend.page, self._stream_id, self._after, length)
        page = same_stream(await self._watch.read(read, key), self._stream_id, self._head.incarnation)
        self._head = page.head
        page.head.check_readable(self._after)
        return page
