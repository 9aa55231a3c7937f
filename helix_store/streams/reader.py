"""Reading a stream from any position, even while it is being written, without gaps or repetitions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Final, NamedTuple

from helix_store.core.payloads import decode
from helix_store.core.streams import StoredChunk, StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.exceptions import StreamNotFound, StreamTruncated
from helix_store.streams.backend import StreamBackend
from helix_store.streams.rules import FIRST_PAGE_LENGTH, StreamHead, StreamSlice, next_page_length
from helix_store.streams.watchers import Watch


class StoredText(NamedTuple):
    """A chunk in its encoded form."""

    sequence: int
    text: str


class ResumableReader:
    """Iterates over the chunks after a position until the stream ends, fails or pauses.

    ``status`` is the status of the stream when it was last read. Iterating raises `StreamTruncated` if
    pruning or a reset removes unread chunks, and `StreamNotFound` if the stream is deleted.
    The reader holds at most one page of chunks, even if its consumer is slow.
    Source: the stream manager of the in-memory store document.
    """

    def __init__(
        self, backend: StreamBackend, watch: Watch, stream_id: str, head: StreamHead, after: int
    ) -> None:
        self._backend = backend
        self._watch = watch
        self.stream_id: Final = stream_id
        self._head = head
        self._after = after
        self._chunks: AsyncGenerator[StoredChunk, None] | None = None

    @property
    def status(self) -> StreamStatus:
        return self._head.status

    @property
    def position(self) -> int:
        """The last sequence that was delivered; before that, the position at which reading started."""
        return self._after

    async def info(self) -> StreamInfo | None:
        """Return `get_info` of the stream manager, which is ``None`` once the stream is deleted."""
        query = partial(self._backend.info, self.stream_id)
        return await self._watch.read(query, ("info", self._head.identity))

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
        """Yield the chunks in encoded form, and ``None`` after ``heartbeat`` seconds without a chunk."""
        length = FIRST_PAGE_LENGTH
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

    async def _next_page(self, length: int) -> StreamSlice:
        key = (self._head.identity, self._after, length)
        read = partial(self._backend.page, self.stream_id, self._after, length)
        page = await self._watch.read(read, key)
        if page is None:
            raise StreamNotFound(self.stream_id)
        if page.head.identity != self._head.identity:
            # The stream was reset or replaced.
            raise StreamTruncated(1)
        self._head = page.head
        page.head.check_readable(self._after)
        return page
