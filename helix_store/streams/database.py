"""Streams in the database."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from django.db.models import Model, QuerySet
from django.db.models.functions import Now

from helix_store import conf
from helix_store.core.guards import Guard
from helix_store.core.streams import PrunedStreams, StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.engine.async_twins import in_thread_to_the_end
from helix_store.engine.database import Call, Database, DatabaseOperations, Rows, reads, writes
from helix_store.engine.moved_tenants import refuse_moved
from helix_store.engine.rows import lock_row
from helix_store.engine.statement import Statement
from helix_store.exceptions import (
    HelixStoreError,
    IntegrityFault,
    OutcomeUnknown,
    StreamClosed,
    StreamNotFound,
)
from helix_store.locks.database import hold_fence
from helix_store.models import Session, Stream, StreamChunk
from helix_store.models.sessions import WRITES_ELSEWHERE
from helix_store.streams import sql
from helix_store.streams.notifications import notify_after_commit
from helix_store.streams.pruning import prune
from helix_store.streams.rules import (
    HEAD_COLUMNS,
    LARGEST_SEQUENCE,
    TERMINAL_STATUSES,
    NewWriter,
    PruneRequest,
    StatusChange,
    StreamHead,
    StreamSlice,
    changes_status,
    info_of,
)
from helix_store.streams.watchers import Watch
from helix_store.streams.watching import watch_stream

R = TypeVar("R")


class DatabaseStreams(DatabaseOperations):
    def __init__(self, db: Database, poll_interval: float | None = None) -> None:
        super().__init__(db)
        self._poll_interval = poll_interval

    async def call(self, operation: Callable[[], R]) -> R:
        """Run an operation from asynchronous code."""
        return await in_thread_to_the_end(operation)

    async def watch(self) -> Watch:
        return await watch_stream(self.db, self._poll_interval or conf.stream_options().poll_interval)

    # Writers

    def open(self, stream_id: str, writer: NewWriter, guard: Guard) -> None:
        """Create the stream if it does not exist. If it is active, give its lease to this writer."""
        parameters = {**_lease(writer), "run_id": writer.run_id, "agent_name": writer.agent_name}
        self._repeatable_write(sql.OPEN, stream_id, parameters, guard)

    def append(self, stream_id: str, texts: Sequence[str], writer: NewWriter | None, guard: Guard) -> int:
        """Store chunks and return the last sequence. Raises `StreamClosed`.

        It renews the lease for the writer; without a writer, it renews any lease that exists.
        """
        of_stream = {**self._row(stream_id), **_lease(writer), "count": len(texts)}

        def write(call: Call) -> Rows:
            parameters = {**of_stream, "call_id": call.id}
            if call.has_fast_writes:
                with_texts = {**parameters, "texts": list(texts)}
                return self._write_with_fence(sql.APPEND, stream_id, with_texts, guard, call)
            return self.db.transaction(lambda: self._append_in_two(stream_id, texts, parameters, guard))

        def look_first(call: Call) -> Rows:
            return self._appended(stream_id, call.id, len(texts)) or write(call)

        rows = self.db.committed_once(write, look_first, operation_id=lambda: stream_id)
        if not rows:
            raise self._refusal(stream_id)
        ((key, last_sequence),) = rows
        notify_after_commit(self.db.alias, key, last_sequence)
        return int(last_sequence)

    def _append_in_two(
        self, stream_id: str, texts: Sequence[str], parameters: Mapping[str, Any], guard: Guard
    ) -> Rows:
        hold_fence(self.db, stream_id, guard)
        rows = self.db.execute(sql.ADVANCE, parameters)
        for key, last_sequence in rows:
            before = last_sequence - len(texts)
            chunks = {"key": key, "before": before, "texts": json.dumps(texts, ensure_ascii=False)}
            self.db.execute(sql.INSERT_CHUNKS, {**chunks, "call_id": parameters["call_id"]})
        return rows

    def _appended(self, stream_id: str, call_id: str, count: int) -> Rows:
        """Return the row of an append whose reply was lost, or none if it was not stored.

        Locks the stream. Raises `OutcomeUnknown` if the stream was reset or pruned: its chunks may be gone.
        """
        head = _lock_head(self.db, stream_id)
        if head is None:
            return []
        key, generation = head.identity
        chunks = StreamChunk.objects.using(self.db.alias).filter(stream_id=key, call_id=call_id)
        for sequence in chunks.values_list("sequence", flat=True):
            return [(key, sequence + count - 1)]
        if generation > 0 or head.floor > 0:
            raise OutcomeUnknown(stream_id)
        return []

    def renew(self, stream_id: str, writer: NewWriter) -> None:
        """Renew the writer's lease. Raises `StreamClosed`."""
        if not self._repeatable_write(sql.RENEW, stream_id, _lease(writer), Guard()):
            raise self._refusal(stream_id)

    def release(self, stream_id: str, writer: NewWriter) -> None:
        """End the lease if it still belongs to this writer."""
        self._repeatable_write(sql.RELEASE, stream_id, {"writer_id": writer.writer_id}, Guard())

    # Status

    @writes
    def set_status(self, stream_id: str, change: StatusChange, guard: Guard) -> None:
        head = self._locked_head(stream_id, guard)
        if not changes_status(head.status, change.status):
            return
        key, _ = head.identity
        is_over = change.status in TERMINAL_STATUSES
        self.db.execute(
            sql.SET_STATUS,
            {
                "key": key,
                "status": change.status.value,
                "output": change.output,
                "error": change.error,
                "is_over": is_over,
                "is_kept": is_over and change.keep_ms is not None,
                "keep_ms": change.keep_ms or 0,
            },
        )
        notify_after_commit(self.db.alias, key, head.last_sequence)

    @writes
    def reset(self, stream_id: str, guard: Guard) -> None:
        key, generation = self._locked_head(stream_id, guard).identity
        self.db.execute(sql.DELETE_CHUNKS, {"key": key, "last": LARGEST_SEQUENCE})
        Stream.objects.using(self.db.alias).filter(pk=key).update(
            last_sequence=0,
            floor=0,
            generation=generation + 1,
            status=StreamStatus.ACTIVE.value,
            output=None,
            error=None,
            ended_at=None,
            keep_until=None,
            lease_expires_at=None,
            is_emptied=False,
            updated_at=Now(),
        )
        notify_after_commit(self.db.alias, key, 0)

    @writes
    def delete(self, stream_id: str) -> bool:
        is_deleted = _delete_stream(self.db, stream_id)[Stream] > 0
        if not is_deleted:
            refuse_moved(self.db)
        return is_deleted

    # Reading

    @reads
    def info(self, stream_id: str) -> StreamInfo | None:
        try:
            stream = _streams(self.db).get(stream_id=stream_id)
        except Stream.DoesNotExist:
            return None
        return info_of(stream_id, stream)

    def page(self, stream_id: str, after: int, limit: int) -> StreamSlice | None:
        last = min(after + limit, LARGEST_SEQUENCE)
        rows = self.db.read(sql.PAGE, {**self._row(stream_id), "after": after, "last": last})
        if not rows:
            return None
        ((*columns, first_sequence, payloads),) = rows
        head = StreamHead.of(*columns)
        texts = [] if first_sequence is None else payloads.split("\n")
        # The head and its chunks are read at the same time.
        if after >= head.floor and len(texts) != max(0, min(last, head.last_sequence) - after):
            raise IntegrityFault("Numbered chunks of a stream are missing; other streams are not affected.")
        return StreamSlice(head, first_sequence or after + 1, tuple(texts))

    def prune(self, request: PruneRequest) -> PrunedStreams:
        return prune(self.db, self.db.tenant, request)

    # Shared

    def _row(self, stream_id: str) -> dict[str, Any]:
        return {"tenant": self.db.tenant, "stream_id": stream_id}

    def _locked_head(self, stream_id: str, guard: Guard) -> StreamHead:
        """Return the head, locked until the transaction ends; the row of the fence must be locked first."""
        hold_fence(self.db, stream_id, guard)
        head = _lock_head(self.db, stream_id)
        if head is None:
            refuse_moved(self.db)
            raise StreamNotFound(stream_id)
        return head

    def _repeatable_write(
        self, statement: Statement, stream_id: str, parameters: Mapping[str, Any], guard: Guard
    ) -> Rows:
        """Run one idempotent statement."""
        of_stream = {**self._row(stream_id), **parameters}
        write = partial(self._write_with_fence, statement, stream_id, of_stream, guard)
        return self.db.committed_once(write, write, operation_id=lambda: stream_id)

    def _write_with_fence(
        self, statement: Statement, stream_id: str, parameters: Mapping[str, Any], guard: Guard, call: Call
    ) -> Rows:
        """Run one statement that writes: alone, or in a transaction that holds the fence."""
        if guard.fencing_token is None:
            return call.write(statement, parameters)

        def body() -> Rows:
            hold_fence(self.db, stream_id, guard)
            return self.db.execute(statement, parameters)

        return self.db.transaction(body)

    @reads
    def _refusal(self, stream_id: str) -> HelixStoreError:
        """Return the error for a stream that accepts no chunks."""
        is_known = _streams(self.db).filter(stream_id=stream_id).exists()
        if is_known:
            return StreamClosed()
        refuse_moved(self.db)
        return StreamNotFound(stream_id)


def streams_of(db: Database, session_keys: Collection[int]) -> list[str]:
    """Return the ids of the existing streams that these sessions refer to."""
    sessions = Session.objects.using(db.alias).filter(pk__in=session_keys, stream_id__isnull=False)
    streams = _streams(db).filter(stream_id__in=sessions.values("stream_id"))
    return list(streams.order_by("id").values_list("stream_id", flat=True))


def delete_orphaned_streams(db: Database, stream_ids: Iterable[str]) -> Counter[type[Model]]:
    """Delete the streams that no session refers to, and return the number of rows of each model.

    Call this in the transaction that deleted the sessions.
    """
    deleted: Counter[type[Model]] = Counter()
    for stream_id in stream_ids:
        if not _has_session(db, stream_id):
            deleted += _delete_stream(db, stream_id)
    return deleted


def _has_session(db: Database, stream_id: str) -> bool:
    # The condition has two parts, so that each is one index lookup, even if SQLite has no statistics.
    sessions = Session.objects.using(db.alias).filter(tenant=db.tenant, stream_id=stream_id)
    return sessions.filter(session_id=stream_id).union(sessions.filter(WRITES_ELSEWHERE), all=True).exists()


def _delete_stream(db: Database, stream_id: str) -> Counter[type[Model]]:
    """Delete a stream with its chunks in the open transaction; return no rows if it does not exist."""
    head = _lock_head(db, stream_id)
    if head is None:
        return Counter()
    key, _ = head.identity
    db.execute(sql.DELETE_CHUNKS, {"key": key, "last": LARGEST_SEQUENCE})
    db.execute(sql.DELETE_STREAM, {"key": key})
    notify_after_commit(db.alias, key, 0)
    return Counter({Stream: 1, StreamChunk: head.last_sequence - head.floor})


def _lock_head(db: Database, stream_id: str) -> StreamHead | None:
    parameters = {"tenant": db.tenant, "stream_id": stream_id}
    row = lock_row(db, Stream, HEAD_COLUMNS, sql.STREAM_BY_ID, parameters)
    return None if row is None else StreamHead.of(*row)


def _streams(db: Database) -> QuerySet[Stream]:
    return Stream.objects.using(db.alias).filter(tenant=db.tenant)


def _lease(writer: NewWriter | None) -> dict[str, Any]:
    if writer is None:
        return {"writer_id": None, "lease_ms": int(conf.stream_options().writer_lease * 1000)}
    return {"writer_id": writer.writer_id, "lease_ms": writer.lease_ms}
