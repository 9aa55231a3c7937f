"""The stream managers: they check arguments, and create writers and readers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from helix_store import conf
from helix_store.core import validation
from helix_store.core.guards import guard
from helix_store.core.limits import Limits
from helix_store.core.payloads import decode, encode
from helix_store.core.streams import PrunedStreams, StoredChunk, StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.engine.database import Database
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import StreamNotFound
from helix_store.streams.backend import StreamBackend
from helix_store.streams.database import DatabaseStreams
from helix_store.streams.memory import MemoryStreams, StreamTable
from helix_store.streams.reader import ResumableReader
from helix_store.streams.rules import (
    NewWriter,
    PruneRequest,
    StatusChange,
    duration_ms,
    encode_chunks,
    position,
    seconds,
)
from helix_store.streams.writer import StreamWriter, append_chunks

P = ParamSpec("P")
R = TypeVar("R")


class StreamManagerBase:
    """A stream manager; subclasses provide the back end.

    Every write is atomic and joins the caller's transaction; readers see it after the commit. A
    ``fencing_token`` is compared with the newest token of the lock that has the stream's name; an older one
    raises `FencedOutError`, and nothing is written.
    """

    def __init__(
        self,
        backend: StreamBackend,
        *,
        tenant: str,
        retention: timedelta | None,
        writer_lease: float | timedelta | None,
        limits: Limits | None,
    ) -> None:
        self._backend = backend
        self.tenant: Final = tenant
        self._keep_ms = None if retention is None else duration_ms(retention, "retention")
        self._writer_lease = None if writer_lease is None else seconds(writer_lease, "writer_lease")
        self._given_limits = limits

    @property
    def limits(self) -> Limits:
        return conf.limits(self._given_limits)

    # Writing

    async def create_writer(
        self, stream_id: str, run_id: str, agent_name: str, *, fencing_token: int | None = None
    ) -> StreamWriter:
        """Create a writer, and the stream if it does not exist. Safe to repeat.

        One statement. It does not reactivate a stream that is paused, ended or failed: call
        `reactivate_stream` before writing.
        """
        validation.identifier(stream_id, "stream_id")
        writer = NewWriter(
            writer_id=uuid.uuid4().hex,
            run_id=validation.identifier(run_id, "run_id"),
            agent_name=validation.identifier(agent_name, "agent_name"),
            lease_ms=max(1, int(1000 * (self._writer_lease or conf.stream_options().writer_lease))),
        )
        fence = guard(fencing_token=fencing_token)
        await self._backend.call(partial(self._backend.open, stream_id, writer, fence))
        return StreamWriter(self._backend, stream_id, writer, guard=fence, limits=self.limits)

    def write_sync(
        self, stream_id: str, chunks: Iterable[dict[str, Any]], *, fencing_token: int | None = None
    ) -> int:
        """Store chunks from synchronous code, all or none, and return the last sequence of the stream.

        One statement, for a stream that exists. Raises the errors of `StreamWriter.write`.
        """
        validation.identifier(stream_id, "stream_id")
        fence = guard(fencing_token=fencing_token)
        return append_chunks(self._backend, stream_id, encode_chunks(chunks, self.limits), None, fence)

    # Status

    async def end_stream(
        self, stream_id: str, output: Any = None, *, fencing_token: int | None = None
    ) -> None:
        """End a stream, with an output for `get_info`. Safe to repeat: the first output is kept.

        Raises `StreamNotFound`, and `StreamClosed` if the stream has failed.
        """
        text = None if output is None else encode(output, limit=self.limits.max_state_bytes, path="output")
        change = StatusChange(status=StreamStatus.ENDED, output=text, keep_ms=self._keep_ms)
        await self._set_status(stream_id, change, fencing_token)

    async def fail_stream(self, stream_id: str, error: Any, *, fencing_token: int | None = None) -> None:
        """End a stream with an error, any JSON value. Safe to repeat: the first error is kept.

        Raises `StreamNotFound`, and `StreamClosed` if the stream has ended.
        """
        text = encode(error, limit=self.limits.max_state_bytes, path="error")
        change = StatusChange(status=StreamStatus.FAILED, error=text, keep_ms=self._keep_ms)
        await self._set_status(stream_id, change, fencing_token)

    async def pause_stream(self, stream_id: str, *, fencing_token: int | None = None) -> None:
        """Stop readers after the last chunk, and refuse writes until `reactivate_stream`. Safe to repeat.

        Raises `StreamNotFound`, and `StreamClosed` if the stream has ended or failed.
        """
        await self._set_status(stream_id, StatusChange(status=StreamStatus.PAUSED), fencing_token)

    async def reactivate_stream(self, stream_id: str, *, fencing_token: int | None = None) -> None:
        """Make a paused, ended or failed stream active; its sequences continue. Safe to repeat. Deletes its
        output and error. Raises `StreamNotFound`.
        """
        await self._set_status(stream_id, StatusChange(status=StreamStatus.ACTIVE), fencing_token)

    async def _set_status(self, stream_id: str, change: StatusChange, fencing_token: int | None) -> None:
        await self._call(self._backend.set_status, stream_id, change, guard(fencing_token=fencing_token))

    async def reset_stream(self, stream_id: str, *, fencing_token: int | None = None) -> None:
        """Delete all chunks and make the stream active; the next sequence is 1.

        Open readers get `StreamTruncated`. Raises `StreamNotFound`.
        """
        await self._call(self._backend.reset, stream_id, guard(fencing_token=fencing_token))

    async def delete_stream(self, stream_id: str) -> bool:
        """Delete a stream with its chunks; return ``False`` if it does not exist. Safe to repeat."""
        return await self._call(self._backend.delete, stream_id)

    async def prune(
        self,
        *,
        older_than: timedelta | datetime | None,
        keep_chunks: int | None = None,
        dry_run: bool = False,
    ) -> PrunedStreams:
        """Call `helix_store.retention.prune_streams` for the streams of this manager."""
        request = PruneRequest.checked(older_than=older_than, keep_chunks=keep_chunks, dry_run=dry_run)
        return await self._backend.call(partial(self._backend.prune, request))

    # Reading

    async def get_info(self, stream_id: str) -> StreamInfo | None:
        """Return the status, the counts and the times of a stream, or ``None`` for an unknown one."""
        return await self._call(self._backend.info, stream_id)

    def read_after(self, stream_id: str, from_sequence: int, *, limit: int = 500) -> list[StoredChunk]:
        """Return the next chunks after a position, at most ``limit``, for synchronous code, with one query.

        Raises `InvalidQuery`, `StreamNotFound` and `StreamTruncated`.
        """
        validation.identifier(stream_id, "stream_id")
        after = position(from_sequence)
        page = self._backend.page(stream_id, after, validation.query_number(limit, "limit", minimum=1))
        if page is None:
            raise StreamNotFound(stream_id)
        page.head.check_readable(after)
        return page.chunks()

    async def create_reader(self, stream_id: str) -> AsyncIterator[dict[str, Any]] | None:
        """Return a reader of the chunks from the start, or ``None`` for an unknown stream.

        Raises `StreamTruncated` if the first chunks were removed.
        """
        reader = await self.create_resumable_reader(stream_id)
        return None if reader is None else _chunks_of(reader)

    async def create_resumable_reader(
        self, stream_id: str, *, from_sequence: int = 0
    ) -> ResumableReader | None:
        """Return a reader of the chunks after ``from_sequence``, or ``None`` for an unknown stream.

        At the end, the reader waits for new chunks. Raises `InvalidQuery`, and `StreamTruncated` if chunks
        after ``from_sequence`` were removed.
        """
        validation.identifier(stream_id, "stream_id")
        after = position(from_sequence)
        watch = await self._backend.watch()
        head_alone = partial(self._backend.page, stream_id, after, 0)
        page = await watch.read(head_alone, ("head", self.tenant, stream_id))
        if page is None:
            return None
        page.head.check_readable(after)
        return ResumableReader(self._backend, watch, stream_id, page.head, after)

    async def _call(
        self, operation: Callable[Concatenate[str, P], R], stream_id: str, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Check the id, and run an operation of the back end."""
        validation.identifier(stream_id, "stream_id")
        return await self._backend.call(partial(operation, stream_id, *args, **kwargs))


async def _chunks_of(reader: ResumableReader) -> AsyncIterator[dict[str, Any]]:
    async with aclosing(reader):
        async for stored in reader:
            yield stored.chunk


class DatabaseStreamManager(StreamManagerBase):
    """Streams in a Django database. Every process can write and read them; no other server is needed.

    Pass the ``using`` and ``tenant`` of the sessions that the streams belong to. ``poll_interval`` is in
    seconds. ``retention`` is the time for which the chunks of a stream are kept after its end; without it,
    they are kept until they are pruned by age. PostgreSQL wakes readers with NOTIFY, and polling finds what a
    notification misses.
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        poll_interval: float | timedelta | None = None,
        retention: timedelta | None = None,
        writer_lease: float | timedelta | None = None,
        limits: Limits | None = None,
    ) -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), limits)
        super().__init__(
            DatabaseStreams(db, None if poll_interval is None else seconds(poll_interval, "poll_interval")),
            tenant=db.tenant,
            retention=retention,
            writer_lease=writer_lease,
            limits=limits,
        )


class InMemoryStreamManager(StreamManagerBase):
    """Streams in the memory of one process, with the contract of the database streams; for tests.

    With the ``world`` of an `InMemoryLockManager` it checks the fencing tokens of that manager.
    """

    def __init__(
        self,
        *,
        tenant: str = "",
        world: MemoryWorld | None = None,
        retention: timedelta | None = None,
        writer_lease: float | timedelta | None = None,
        limits: Limits | None = None,
    ) -> None:
        tenant = validation.tenant(tenant)
        world = MemoryWorld() if world is None else world
        self._lock = world.lock
        self._streams = world.table(StreamTable, tenant)
        super().__init__(
            MemoryStreams(world, tenant),
            tenant=tenant,
            retention=retention,
            writer_lease=writer_lease,
            limits=limits,
        )

    def clear(self) -> None:
        """Delete every stream of the tenant. Safe to repeat."""
        with self._lock:
            for stream_id in self.get_all_stream_ids():
                self._backend.delete(stream_id)

    def get_all_stream_ids(self) -> list[str]:
        """Return the ids of the tenant's streams, in order of creation."""
        with self._lock:
            return list(self._streams)

    def get_status_sync(self, stream_id: str) -> StreamStatus | None:
        info = self._backend.info(validation.identifier(stream_id, "stream_id"))
        return None if info is None else info.status

    def get_chunks_sync(self, stream_id: str) -> list[dict[str, Any]]:
        """Return the stored chunks, or an empty list for an unknown stream."""
        with self._lock:
            record = self._streams.get(validation.identifier(stream_id, "stream_id"))
            return [] if record is None else [decode(text) for text in record.texts]
