"""Streams in a database: writing, reading, listing and pruning."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from django.db.models import Count, F, Model, Q, QuerySet, Sum
from django.db.models.expressions import Combinable

from helix_store import conf
from helix_store.core import validation
from helix_store.core.ids import tombstone_digest
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payloads import Serializable
from helix_store.core.streams import PrunedStreams, StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.core.validation import Guard
from helix_store.engine.async_twins import in_thread_to_the_end
from helix_store.engine.database import Call, Database, DatabaseOperations, Rows, reads, refuse_moved, writes
from helix_store.engine.expressions import (
    DatabaseNow,
    NoIndexHint,
    list_parameter,
    lock_row,
    read_cursor,
    write_cursor,
)
from helix_store.engine.statement import Statement
from helix_store.exceptions import (
    HelixStoreError,
    IntegrityFault,
    OutcomeUnknown,
    SessionErased,
    StreamClosed,
    StreamNotFound,
    shown_id,
)
from helix_store.locks import hold_fence
from helix_store.models import Session, Stream, StreamChunk
from helix_store.models.sessions import WRITES_ELSEWHERE
from helix_store.streams.chunks import (
    ADVANCE,
    APPEND,
    COUNT_LOST,
    DELETE_ALL_CHUNKS,
    DELETE_CHUNKS,
    DELETE_STREAMS,
    FAIL_LOST,
    HEAD_COLUMNS,
    INSERT_CHUNKS,
    LARGEST_SEQUENCE,
    OPEN,
    PAGE,
    RELEASE,
    RENEW,
    SET_STATUS,
    STREAM_BY_ID,
    TENANTS_OF,
    TERMINAL_STATUSES,
    WRITER_LOST,
    NewWriter,
    PruneRequest,
    StatusChange,
    StreamHead,
    StreamSlice,
    Watch,
    changes_status,
    info_of,
)
from helix_store.streams.watching import notify_after_commit, watch_stream

_CHUNKS_PER_TRANSACTION: Final = 5_000

_NOTHING: Final = PrunedStreams(streams=0, chunks=0, failed=0)

_BY_KEY: Final = F("id")
_SORTED_BY_KEY: Final = F("id") + 0
"""The order for a condition that few streams meet, which makes the database find them by an index and then
sort them. With the plain key, it would read all streams in key order.
"""


class _Rule(NamedTuple):
    """A rule: the streams that it applies to, and how many of their newest chunks they keep."""

    condition: Q
    keep: int
    order: Combinable


def prune_streams(
    *,
    using: str | None = None,
    tenant: str | None = None,
    older_than: timedelta | datetime | None,
    keep_chunks: int | None = None,
    dry_run: bool = False,
) -> PrunedStreams:
    """Mark streams with a dead writer as failed, and delete chunks that are too old or too many.

    ``older_than`` is an age or a point in time: streams that ended or failed before it lose all of their
    chunks, as do streams whose manager's ``retention`` has passed. With ``keep_chunks`` every other stream
    keeps that many of its newest chunks. The rows of the streams are kept, so that readers of removed chunks
    get `StreamTruncated`. ``tenant=None`` prunes every tenant. ``dry_run=True`` only counts.

    Works in small transactions that lock one stream or one page of streams. Safe to repeat and to interrupt.
    Raises `InvalidQuery`.
    """
    conf.require_usable_prefix()
    request = PruneRequest.checked(older_than=older_than, keep_chunks=keep_chunks, dry_run=dry_run)
    checked = None if tenant is None else validation.tenant(tenant)
    return prune(Database(using, checked or "", None), checked, request)


def prune(db: Database, tenant: str | None, request: PruneRequest) -> PrunedStreams:
    """Prune the streams of one tenant, or of all tenants if it is ``None``.

    Each batch is a transaction, or a savepoint in the caller's. Safe to repeat and to interrupt.
    """
    pruned = _NOTHING
    for batch in prune_batches(db, tenant, request):
        pruned = batch
    return pruned


def prune_batches(db: Database, tenant: str | None, request: PruneRequest) -> Iterator[PrunedStreams]:
    """Run `prune` and yield the sum so far after each step."""
    if request.dry_run:
        # Deleting millions of chunks and rolling the deletion back would take as long as the real run.
        ((lost,),) = db.read(COUNT_LOST, {"tenant": tenant})
        yield replace(would_empty(db, _of_tenant(db, tenant), request), failed=int(lost))
        return
    pruned = _NOTHING
    for failed in _fail_lost(db, tenant):
        pruned = replace(pruned, failed=pruned.failed + failed)
        yield pruned
    for rule in _rules(request):
        for key in _each(db, tenant, rule):
            removed = _remove(db, key, rule)
            pruned = replace(pruned, streams=pruned.streams + (removed > 0), chunks=pruned.chunks + removed)
            yield pruned


def would_empty(db: Database, streams: QuerySet[Stream], request: PruneRequest) -> PrunedStreams:
    """Return the number of chunks that are too old or too many, and the number of streams that have them.
    Takes one statement for each rule.
    """
    pruned = _NOTHING
    for rule in _rules(request):
        surplus = F("last_sequence") - rule.keep - F("floor")
        found = streams.filter(rule.condition, last_sequence__gt=F("floor") + rule.keep)
        sums = db.query(partial(found.aggregate, streams=Count("pk"), chunks=Sum(surplus, default=0)))
        pruned = replace(
            pruned, streams=pruned.streams + sums["streams"], chunks=pruned.chunks + sums["chunks"]
        )
    return pruned


def _fail_lost(db: Database, tenant: str | None) -> Iterator[int]:
    parameters = {"tenant": tenant, "error": WRITER_LOST, "limit": conf.page_size()}

    def batch() -> int:
        rows = db.execute(FAIL_LOST, parameters)
        for key, last_sequence in rows:
            notify_after_commit(db.alias, key, last_sequence)
        return len(rows)

    while count := db.transaction(batch):
        yield count


def _rules(request: PruneRequest) -> list[_Rule]:
    # Each part repeats the condition of the partial index that serves it. The database's clock decides.
    expired = Q(keep_until__isnull=False, is_emptied=False, keep_until__lte=DatabaseNow())
    if request.older_than is not None:
        is_age = isinstance(request.older_than, timedelta)
        cutoff = DatabaseNow() - request.older_than if is_age else request.older_than
        expired |= Q(ended_at__isnull=False, is_emptied=False, ended_at__lte=cutoff)
    # These streams lose all of their chunks, because they ended too long ago.
    rules = [_Rule(expired, 0, _SORTED_BY_KEY)]
    if request.keep_chunks is not None:
        too_many = Q(last_sequence__gt=F("floor") + request.keep_chunks) & ~expired
        rules.append(_Rule(too_many, request.keep_chunks, _BY_KEY))
    return rules


def _of_tenant(db: Database, tenant: str | None) -> QuerySet[Stream]:
    streams = Stream.objects.using(db.alias)
    if tenant is None:
        return streams
    return streams.alias(unindexed_tenant=NoIndexHint("tenant")).filter(unindexed_tenant=tenant)


def _each(db: Database, tenant: str | None, rule: _Rule) -> Iterator[int]:
    """Yield the keys of the streams to which a rule applies, read in pages."""
    streams = _of_tenant(db, tenant).filter(rule.condition)
    keys = streams.alias(position=rule.order).order_by("position").values_list("pk", flat=True)
    last = 0
    while page := db.query(partial(list[int], keys.filter(position__gt=last)[: conf.page_size()])):
        yield from page
        last = page[-1]


def _remove(db: Database, key: int, rule: _Rule) -> int:
    removed = 0
    while count := db.transaction(lambda: _remove_batch(db, key, rule)):
        removed += count
    return removed


def _remove_batch(db: Database, key: int, rule: _Rule) -> int:
    """Delete the oldest chunks of a stream and return their number, or 0 if there are none to delete.

    The condition is checked again under the lock: the stream may have been reactivated. A locked stream is in
    use, so the next run prunes it.
    """
    streams = Stream.objects.using(db.alias).filter(pk=key)
    locked = streams.filter(rule.condition).select_for_update(skip_locked=True, no_key=True)
    for stream in locked.only("id", "last_sequence", "floor", "ended_at"):
        target = max(stream.floor, stream.last_sequence - rule.keep)
        floor = min(target, stream.floor + _CHUNKS_PER_TRANSACTION)
        db.execute(DELETE_CHUNKS, {"key": key, "last": floor})
        is_emptied = stream.ended_at is not None and floor == stream.last_sequence
        streams.update(floor=floor, is_emptied=is_emptied)
        notify_after_commit(db.alias, key, stream.last_sequence)
        return int(floor - stream.floor)
    return 0


class WriterState(StrEnum):
    """The state of a stream's newest writer, according to its lease.

    A ``lost`` writer was silent for longer than its lease: pruning marks the stream as failed. A stream
    without a lease has no writer: it ended, or its writer closed it.
    """

    ALIVE = "alive"
    LOST = "lost"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedStream(Serializable):
    """The head of a stream. ``chunk_count`` counts the stored chunks.

    ``age_seconds`` is the time since the last change, by the database's clock. ``run_id``, ``agent_name`` and
    ``writer_id`` belong to the newest writer.
    """

    tenant: str
    stream_id: str
    status: StreamStatus
    chunk_count: int
    last_sequence: int
    age_seconds: float
    writer: WriterState
    run_id: str
    agent_name: str
    writer_id: str | None
    lease_expires_at: datetime | None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None


_COLUMNS: Final = {each.name for each in fields(ListedStream)} - {"chunk_count", "age_seconds", "writer"} | {
    "floor"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamList(Serializable):
    """A page of streams. ``next_cursor`` is ``None`` on the last page."""

    streams: list[ListedStream]
    next_cursor: str | None


def list_streams(
    *,
    using: str | None = None,
    tenant: str | None = None,
    status: StreamStatus | str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> StreamList:
    """Return a page of streams, newest first; ``tenant=None`` lists every tenant.

    ``limit`` is 1 to 200; a larger one means 200. For the next page, pass ``next_cursor`` as ``cursor`` with
    the same filters. Runs two statements, which read no chunks. Raises `InvalidQuery` and `InvalidCursor`.
    """
    conf.require_usable_prefix()
    equal = {
        "tenant": None if tenant is None else validation.tenant(tenant),
        "status": None if status is None else validation.query_enum(StreamStatus, status, "status").value,
    }
    binding = {"of": "streams", **equal}
    length = validation.page_limit(limit)
    (before,) = [MAX_BIGINT] if cursor is None else read_cursor(cursor, query=binding)
    db = Database(using, "", None)
    rows = Stream.objects.using(db.alias).filter(pk__lt=before)
    rows = rows.filter(**{name: value for name, value in equal.items() if value is not None})
    page = rows.order_by("-pk").values("pk", *_COLUMNS)[: length + 1]
    now, found = db.query(lambda: (db.now(), list(page)))
    has_more = len(found) > length
    keys = [row.pop("pk") for row in found[:length]]
    return StreamList(
        streams=[_listed(row, now) for row in found[:length]],
        next_cursor=write_cursor([keys[-1]], query=binding) if has_more else None,
    )


def tenants_of_stream(stream_id: str, *, using: str | None = None) -> list[str]:
    """Return the tenants that have a stream with this id, in order. One index lookup for each tenant."""
    conf.require_usable_prefix()
    name = validation.identifier(stream_id, "stream_id")
    return [tenant for (tenant,) in Database(using, "", None).read(TENANTS_OF, {"stream_id": name})]


def _listed(row: dict[str, Any], now: datetime) -> ListedStream:
    # On SQLite, Django reads a text that is no time as None.
    if row["created_at"] is None or row["updated_at"] is None:
        raise IntegrityFault(
            f"A time of the stream {shown_id(row['stream_id'])} cannot be read. Run helix_doctor."
        )
    floor, status = row.pop("floor"), StreamStatus(row.pop("status"))
    age = max(now - row["updated_at"], timedelta())
    return ListedStream(
        **row,
        status=status,
        chunk_count=row["last_sequence"] - floor,
        age_seconds=age.total_seconds(),
        writer=_writer(status, row["lease_expires_at"], now),
    )


def _writer(status: StreamStatus, lease_expires_at: datetime | None, now: datetime) -> WriterState:
    if status is not StreamStatus.ACTIVE or lease_expires_at is None:
        return WriterState.NONE
    return WriterState.ALIVE if lease_expires_at > now else WriterState.LOST


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
        """Create the stream if it does not exist. If it is active, give its lease to this writer.

        Raises `SessionErased` for the stream of an erased session.
        """
        parameters = {
            **_lease(writer),
            "run_id": writer.run_id,
            "agent_name": writer.agent_name,
            "digest": tombstone_digest(self.db.tenant, stream_id),
        }
        opened = self._repeatable_write(OPEN, stream_id, parameters, guard)
        if not opened and not self.db.query(_streams(self.db).filter(stream_id=stream_id).exists):
            raise SessionErased(stream_id)

    def append(self, stream_id: str, texts: Sequence[str], writer: NewWriter | None, guard: Guard) -> int:
        """Store chunks and return the last sequence. Raises `StreamClosed`.

        It renews the lease for the writer; without a writer, it renews any lease that exists.
        """
        of_stream = {**self._row(stream_id), **_lease(writer), "count": len(texts)}

        def write(call: Call) -> Rows:
            parameters = {**of_stream, "call_id": call.id}
            if call.has_fast_writes:
                with_texts = {**parameters, "texts": list(texts)}
                return self._write_with_fence(APPEND, stream_id, with_texts, guard, call)
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
        rows = self.db.execute(ADVANCE, parameters)
        for key, last_sequence in rows:
            before = last_sequence - len(texts)
            chunks = {"key": key, "before": before, "texts": json.dumps(texts, ensure_ascii=False)}
            self.db.execute(INSERT_CHUNKS, {**chunks, "call_id": parameters["call_id"]})
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
        if not self._repeatable_write(RENEW, stream_id, _lease(writer), Guard()):
            raise self._refusal(stream_id)

    def release(self, stream_id: str, writer: NewWriter) -> None:
        """End the lease if it still belongs to this writer."""
        self._repeatable_write(RELEASE, stream_id, {"writer_id": writer.writer_id}, Guard())

    # Status

    @writes
    def set_status(self, stream_id: str, change: StatusChange, guard: Guard) -> None:
        head = self._locked_head(stream_id, guard)
        if not changes_status(head.status, change.status):
            return
        key, _ = head.identity
        is_over = change.status in TERMINAL_STATUSES
        self.db.execute(
            SET_STATUS,
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
        self.db.execute(DELETE_CHUNKS, {"key": key, "last": LARGEST_SEQUENCE})
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
            updated_at=DatabaseNow(),
        )
        notify_after_commit(self.db.alias, key, 0)

    @writes
    def delete(self, stream_id: str) -> bool:
        is_deleted = _delete_streams(self.db, [stream_id])[Stream] > 0
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
        rows = self.db.read(PAGE, {**self._row(stream_id), "after": after, "last": last})
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
    names = list(dict.fromkeys(stream_ids))
    if not names:
        return Counter()
    # The query has two parts, so that each is a lookup in an index, even if SQLite has no statistics.
    sessions = Session.objects.using(db.alias).filter(tenant=db.tenant).values_list("stream_id", flat=True)
    own = sessions.filter(session_id__in=names, stream_id=F("session_id"))
    kept = set(own.union(sessions.filter(WRITES_ELSEWHERE, stream_id__in=names), all=True))
    return _delete_streams(db, [name for name in names if name not in kept])


def _delete_streams(db: Database, stream_ids: Collection[str]) -> Counter[type[Model]]:
    """Delete streams with their chunks in the open transaction, without those that do not exist."""
    found = _streams(db).filter(stream_id__in=stream_ids).select_for_update(no_key=True).order_by("pk")
    heads = list(found.values_list("pk", "last_sequence", "floor"))
    if not heads:
        return Counter()
    keys = {"keys": list_parameter(db, [key for key, _, _ in heads])}
    db.execute(DELETE_ALL_CHUNKS, keys)
    db.execute(DELETE_STREAMS, keys)
    for key, _, _ in heads:
        notify_after_commit(db.alias, key, 0)
    return Counter({Stream: len(heads), StreamChunk: sum(last - floor for _, last, floor in heads)})


def _lock_head(db: Database, stream_id: str) -> StreamHead | None:
    parameters = {"tenant": db.tenant, "stream_id": stream_id}
    row = lock_row(db, Stream, HEAD_COLUMNS, STREAM_BY_ID, parameters)
    return None if row is None else StreamHead.of(*row)


def _streams(db: Database) -> QuerySet[Stream]:
    return Stream.objects.using(db.alias).filter(tenant=db.tenant)


def _lease(writer: NewWriter | None) -> dict[str, Any]:
    if writer is None:
        return {"writer_id": None, "lease_ms": int(conf.stream_options().writer_lease * 1000)}
    return {"writer_id": writer.writer_id, "lease_ms": writer.lease_ms}
