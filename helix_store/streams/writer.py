"""Writing to a stream, with a lease that shows that the writer is alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from helix_store.core.guards import Guard
from helix_store.core.limits import Limits
from helix_store.exceptions import (
    HelixStoreError,
    StreamClosed,
    StreamNotFound,
)
from helix_store.streams.backend import StreamBackend
from helix_store.streams.rules import NewWriter, encode_chunks

_RENEWALS_PER_LEASE: Final = 3

_logger = logging.getLogger(__name__)


def append_chunks(
    backend: StreamBackend, stream_id: str, texts: Sequence[str], writer: NewWriter | None, guard: Guard
) -> int:
    """Store chunks, if there are any, and return the last sequence of the stream."""
    if texts:
        return backend.append(stream_id, texts, writer, guard)
    info = backend.info(stream_id)
    if info is None:
        raise StreamNotFound(stream_id)
    return info.last_sequence


class StreamWriter:
    """Writes chunks to one stream; several writers may share a stream.

    It holds the stream's lease, which every write and `heartbeat` renews: `prune_streams` marks a stream
    whose lease has expired as failed. As an asynchronous context manager it renews the lease in the
    background. If an error occurs inside the block, the lease is left to expire, so that readers are notified
    unless another writer continues. Source: the stream manager of the in-memory store document.
    """

    def __init__(
        self, backend: StreamBackend, stream_id: str, writer: NewWriter, *, guard: Guard, limits: Limits
    ) -> None:
        self._backend = backend
        self.stream_id: Final = stream_id
        self.run_id: Final = writer.run_id
        self.agent_name: Final = writer.agent_name
        self._writer = writer
        self._guard = guard
        self._limits = limits
        self._is_closed = False
        self._has_lease = True
        self._renewing: asyncio.Task[None] | None = None

    async def write(self, chunk: dict[str, Any]) -> int:
        """Store a chunk, a dict with a ``type``, and return its sequence.

        One statement. Raises `InvalidPayload`, `LimitExceeded`, `StreamClosed`, `FencedOutError` and
        `StreamNotFound`; a refused chunk takes no sequence.
        """
        return await self.write_many([chunk])

    async def write_many(self, chunks: Iterable[dict[str, Any]]) -> int:
        """Store chunks in this order, all or none, and return the sequence of the last one.

        One statement. Without chunks, it writes nothing and returns the last sequence of the stream. Raises
        the errors of `write`.
        """
        texts = encode_chunks(chunks, self._limits)
        if self._is_closed:
            raise StreamClosed("This writer was closed; create another one.")
        append = partial(append_chunks, self._backend, self.stream_id, texts, self._writer, self._guard)
        return await self._backend.call(append)

    async def heartbeat(self) -> None:
        """Renew the lease without writing. Raises `StreamClosed` if the stream is not active."""
        if self._is_closed:
            raise StreamClosed("This writer was closed; create another one.")
        await self._backend.call(partial(self._backend.renew, self.stream_id, self._writer))

    async def close(self) -> None:
        """Stop writing and end the lease; the stream keeps its status. Safe to repeat, even after errors."""
        await self._stop_renewing()
        self._is_closed = True
        if self._has_lease:
            await self._backend.call(partial(self._backend.release, self.stream_id, self._writer))
            self._has_lease = False

    async def __aenter__(self) -> Self:
        self._renewing = asyncio.create_task(self._renew_often(), name="helix_store stream writer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        else:
            await self._stop_renewing()
            # The lease will expire, and then prune_streams marks the stream as failed.
            self._is_closed, self._has_lease = True, False

    async def _renew_often(self) -> None:
        while True:
            await asyncio.sleep(self._writer.lease_ms / 1000 / _RENEWALS_PER_LEASE)
            try:
                await self.heartbeat()
            except (StreamClosed, StreamNotFound):
                return
            except HelixStoreError as exc:
                _logger.warning(
                    "The lease of a stream was not renewed (%s); the writer tries again. If the lease "
                    "expires, prune_streams fails the stream.",
                    exc.code,
                )

    async def _stop_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewing
            self._renewing = None
