"""Streams in the memory of one process."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, TypeVar

from helix_store import conf
from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.streams import PrunedStreams, StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.engine.async_twins import in_thread_to_the_end
from helix_store.engine.memory import MemoryTable, MemoryWorld
from helix_store.exceptions import StreamClosed, StreamNotFound
from helix_store.locks.memory import LockTable
from helix_store.streams.rules import (
    TERMINAL_STATUSES,
    WRITER_LOST,
    NewWriter,
    PruneRequest,
    StatusChange,
    StreamHead,
    StreamSlice,
    changes_status,
    info_of,
)
from helix_store.streams.watchers import Watch, Watches

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
