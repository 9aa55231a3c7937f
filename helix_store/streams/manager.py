"""The stream managers, the readers and writers that they return, and streams in memory."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Self, TypeVar

from helix_store import conf
from helix_store.core import moments, validation
from helix_store.core.limits import Limits
from helix_store.core.payloads import decode, encode
from helix_store.core.streams import PrunedStreams, StoredChunk, StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.core.validation import Guard, guard
from helix_store.engine.async_twins import in_thread_to_the_end
from helix_store.engine.database import Database
from helix_store.engine.memory import MemoryTable, MemoryWorld
from helix_store.exceptions import HelixStoreError, StreamClosed, StreamNotFound, StreamTruncated
from helix_store.locks import LockTable
from helix_store.streams.chunks import (
    FIRST_PAGE_LENGTH,
    TERMINAL_STATUSES,
    WRITER_LOST,
    NewWriter,
    PruneRequest,
    StatusChange,
    StreamHead,
    StreamSlice,
    Watch,
    Watches,
    changes_status,
    duration_ms,
    encode_chunks,
    info_of,
    next_page_length,
    position,
    seconds,
)
from helix_store.streams.database import DatabaseStreams

R = TypeVar("R")

_KEYS: Final = itertools.count(1)


@dataclass(slots=True)
class StreamRecord:
    """One stream; hold the world's lock to change it. ``texts`` contains the chunks above ``floor``.

    ``lease_ends`` is in seconds on the process's monotonic clock.
    """

    run_id: str
    agent_name: str
    key: int = field(default_factory=lambda: next(_KEYS))
    generation: int = 0
    status: StreamStatus = StreamStatus.ACTIVE
    texts: list[str] = field(default_factory=list)
    floor: int = 0
    output: str | None = None
    error: str | None = None
    writer_id: str | None = None
    lease_ends: float | None = None
    created_at: datetime = field(default_factory=moments.now)
    updated_at: datetime = field(default_factory=moments.now)
    ended_at: datetime | None = None
    keep_until: datetime | None = None

    @property
    def last_sequence(self) -> int:
        return self.floor + len(self.texts)

    @property
    def has_lost_writer(self) -> bool:
        is_late = self.lease_ends is not None and self.lease_ends <= time.monotonic()
        return self.status is StreamStatus.ACTIVE and is_late

    def head(self) -> StreamHead:
        return StreamHead((self.key, self.generation), self.status, self.last_sequence, self.floor)


class StreamTable(dict[str, StreamRecord], MemoryTable):
    """The streams of a tenant by id, and the readers that wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.watches = Watches()

    def saved(self) -> Callable[[], None]:
        streams = {stream_id: copy.copy(stream) for stream_id, stream in self.items()}
        for stream in streams.values():
            stream.texts = stream.texts.copy()

        def put_back() -> None:
            self.clear()
            self.update(streams)

        return put_back

    def forget(self, stream_id: str) -> bool:
        """Delete a stream and wake its readers; return ``False`` if it does not exist.

        The caller must hold the lock.
        """
        stream = self.pop(stream_id, None)
        if stream is not None:
            self.watches.wake(stream.key)
        return stream is not None


class MemoryStreams:
    """The in-memory back end; see `DatabaseStreams` for its operations."""

    def __init__(self, world: MemoryWorld, tenant: str) -> None:
        self._lock = world.lock
        self._streams = world.table(StreamTable, tenant)
        self._locks = world.table(LockTable, tenant)
        self._watches = self._streams.watches

    async def call(self, operation: Callable[[], R]) -> R:
        if not self._lock.acquire(blocking=False):
            # A transaction may hold the lock until this event loop continues: do not wait for it here.
            return await in_thread_to_the_end(operation)
        try:
            return operation()
        finally:
            self._lock.release()

    async def watch(self) -> Watch:
        return Watch(self._watches, _at_once)

    # Writers

    def open(self, stream_id: str, writer: NewWriter, guard: Guard) -> None:
        with self._lock:
            self._locks.check_fence(stream_id, guard)
            record = self._streams.get(stream_id)
            if record is None:
                record = self._streams[stream_id] = StreamRecord(writer.run_id, writer.agent_name)
            if record.status is StreamStatus.ACTIVE:
                record.run_id, record.agent_name = writer.run_id, writer.agent_name
                record.updated_at = moments.now()
                self._renew_lease(record, writer)

    def append(self, stream_id: str, texts: Sequence[str], writer: NewWriter | None, guard: Guard) -> int:
        with self._lock:
            self._locks.check_fence(stream_id, guard)
            record = self._active_record(stream_id)
            record.texts.extend(texts)
            record.updated_at = moments.now()
            self._renew_lease(record, writer)
            self._watches.wake(record.key)
            return record.last_sequence

    def renew(self, stream_id: str, writer: NewWriter) -> None:
        with self._lock:
            self._renew_lease(self._active_record(stream_id), writer)

    def release(self, stream_id: str, writer: NewWriter) -> None:
        with self._lock:
            record = self._streams.get(stream_id)
            if record is not None and record.writer_id == writer.writer_id:
                record.lease_ends = None

    # Status

    def set_status(self, stream_id: str, change: StatusChange, guard: Guard) -> None:
        with self._lock:
            self._locks.check_fence(stream_id, guard)
            record = self._record(stream_id)
            if changes_status(record.status, change.status):
                self._set_status_locked(record, change)

    def _set_status_locked(self, record: StreamRecord, change: StatusChange) -> None:
        now = moments.now()
        is_over = change.status in TERMINAL_STATUSES
        record.status = change.status
        record.output, record.error = change.output, change.error
        record.lease_ends = None
        record.updated_at = now
        record.ended_at = now if is_over else None
        record.keep_until = None
        if is_over and change.keep_ms is not None:
            record.keep_until = now + timedelta(milliseconds=change.keep_ms)
        self._watches.wake(record.key)

    def reset(self, stream_id: str, guard: Guard) -> None:
        with self._lock:
            self._locks.check_fence(stream_id, guard)
            record = self._record(stream_id)
            record.texts, record.floor = [], 0
            record.generation += 1
            self._set_status_locked(record, StatusChange(status=StreamStatus.ACTIVE))

    def delete(self, stream_id: str) -> bool:
        with self._lock:
            return self._streams.forget(stream_id)

    # Reading

    def info(self, stream_id: str) -> StreamInfo | None:
        with self._lock:
            record = self._streams.get(stream_id)
            return None if record is None else info_of(stream_id, record)

    def page(self, stream_id: str, after: int, limit: int) -> StreamSlice | None:
        with self._lock:
            record = self._streams.get(stream_id)
            if record is None:
                return None
            start = max(0, after - record.floor)
            texts = tuple(record.texts[start : start + limit])
            return StreamSlice(record.head(), record.floor + start + 1, texts)

    def prune(self, request: PruneRequest) -> PrunedStreams:
        with self._lock:
            records = list(self._streams.values())
            lost = [record for record in records if record.has_lost_writer]
            if request.dry_run:
                removed = [self._new_floor(record, request) - record.floor for record in records]
            else:
                failure = StatusChange(status=StreamStatus.FAILED, error=WRITER_LOST)
                for record in lost:
                    self._set_status_locked(record, failure)
                removed = [self._remove_until(record, self._new_floor(record, request)) for record in records]
        return PrunedStreams(
            streams=sum(count > 0 for count in removed), chunks=sum(removed), failed=len(lost)
        )

    def _new_floor(self, record: StreamRecord, request: PruneRequest) -> int:
        now = moments.now()
        cutoff = request.older_than
        if isinstance(cutoff, timedelta):
            cutoff = now - cutoff
        is_old = cutoff is not None and record.ended_at is not None and record.ended_at <= cutoff
        if is_old or (record.keep_until is not None and record.keep_until <= now):
            return record.last_sequence
        if request.keep_chunks is None:
            return record.floor
        return max(record.floor, record.last_sequence - request.keep_chunks)

    def _remove_until(self, record: StreamRecord, floor: int) -> int:
        """Remove the oldest chunks and return how many were removed."""
        removed = floor - record.floor
        if removed:
            del record.texts[:removed]
            record.floor = floor
            self._watches.wake(record.key)
        return removed

    # Shared

    def _record(self, stream_id: str) -> StreamRecord:
        record = self._streams.get(stream_id)
        if record is None:
            raise StreamNotFound(stream_id)
        return record

    def _active_record(self, stream_id: str) -> StreamRecord:
        record = self._record(stream_id)
        if record.status is not StreamStatus.ACTIVE:
            raise StreamClosed
        return record

    def _renew_lease(self, record: StreamRecord, writer: NewWriter | None) -> None:
        if writer is not None:
            record.writer_id = writer.writer_id
            record.lease_ends = time.monotonic() + writer.lease_ms / 1000
        elif record.lease_ends is not None:
            record.lease_ends = time.monotonic() + conf.stream_options().writer_lease


async def _at_once(key: tuple[object, ...], query: Callable[[], R]) -> R:
    return query()


StreamBackend = DatabaseStreams | MemoryStreams


class StoredText(NamedTuple):
    """A chunk in its encoded form."""

    sequence: int
    text: str


class ResumableReader:
    """Iterates over the chunks after a position until the stream ends, fails or pauses.

    ``status`` is the status of the stream when it was last read. Iterating raises `StreamTruncated` if
    pruning or a reset removes unread chunks, and `StreamNotFound` if the stream is deleted.
    The reader holds at most one page of chunks, even if its consumer is slow.
    Source: the stream manager of `@helix-agents/store-memory`.
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
    unless another writer continues. Source: the stream manager of `@helix-agents/store-memory`.

    Example::

        async with await store.streams.create_writer("advice", "run-1", "travel") as writer:
            await writer.write({"type": "text_delta", "delta": "Take the "})
            await writer.write_many([{"type": "text_delta", "delta": word} for word in ("early ", "train.")])
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


P = ParamSpec("P")


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
        `reactivate_stream` before writing. Raises `SessionErased` for a new stream with the id of an erased
        session, until that session is created again or the tombstone of the erasure is gone.
        """
        validation.identifier(stream_id, "stream_id")
        writer = self._new_writer(run_id, agent_name)
        fence = guard(fencing_token=fencing_token)
        await self._backend.call(partial(self._backend.open, stream_id, writer, fence))
        return StreamWriter(self._backend, stream_id, writer, guard=fence, limits=self.limits)

    def _new_writer(self, run_id: str, agent_name: str) -> NewWriter:
        return NewWriter(
            writer_id=uuid.uuid4().hex,
            run_id=validation.identifier(run_id, "run_id"),
            agent_name=validation.identifier(agent_name, "agent_name"),
            lease_ms=max(1, int(1000 * (self._writer_lease or conf.stream_options().writer_lease))),
        )

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


def open_without_writer(streams: StreamManagerBase, stream_id: str, run_id: str, agent_name: str) -> None:
    """Create a stream from synchronous code, as `create_writer` and `StreamWriter.close` do.

    It uses no executor: an executor refuses work while its process ends.
    """
    writer = streams._new_writer(run_id, agent_name)
    streams._backend.open(stream_id, writer, guard(fencing_token=None))
    streams._backend.release(stream_id, writer)


class DatabaseStreamManager(StreamManagerBase):
    """Streams in a Django database. Every process can write and read them; no other server is needed.

    Pass the ``using`` and ``tenant`` of the sessions that the streams belong to. ``poll_interval`` is in
    seconds. ``retention`` is the time for which the chunks of a stream are kept after its end; without it,
    they are kept until they are pruned by age. PostgreSQL wakes readers with NOTIFY, and polling finds what a
    notification misses.

    Example::

        streams = DatabaseStreamManager()
        async with await streams.create_writer("advice", "run-1", "travel") as writer:
            await writer.write({"type": "text_delta", "delta": "Take the early train."})
        await streams.end_stream("advice")
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

    Example::

        streams = InMemoryStreamManager()
        writer = await streams.create_writer("advice", "run-1", "travel")
        await writer.write({"type": "text_delta", "delta": "Take the early train."})
        await writer.close()
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
