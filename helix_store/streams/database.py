"""Streams in the database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from django.db.models import QuerySet
from django.db.models.functions import Now

from helix_store import conf
from helix_store.core import validation
from helix_store.core.guards import Guard
from helix_store.core.limits import Limits
from helix_store.core.payloads import decode
from helix_store.core.streams import (
    CLOSED,
    PrunedStreams,
    StreamHead,
    StreamInfo,
    StreamPage,
    seconds,
    settles,
)
from helix_store.core.types import StreamStatus
from helix_store.engine.async_twins import in_thread
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    reads,
    writes,
)
from helix_store.exceptions import (
    HelixStoreError,
    IntegrityFault,
    StreamClosed,
    StreamNotFound,
)
from helix_store.locks.database import hold_fence
from helix_store.models import Stream, StreamChunk
from helix_store.sessions.database.rows import first_row
from helix_store.streams.backend import (
    NewWriter,
    PruneRequest,
    Settlement,
    StreamWatch,
)
from helix_store.streams.manager import StreamManagerBase
from helix_store.streams.notifications import announce_after_commit
from helix_store.streams.pruning import prune
from helix_store.streams.sql import StreamStatements, stream_statements
from helix_store.streams.watching import watch_stream

__all__ = ["DatabaseStreamManager", "DatabaseStreams"]

R = TypeVar("R")

_UNGUARDED = Guard()
_CHUNKS_PER_STATEMENT = 1_000


class DatabaseStreamManager(StreamManagerBase):
    """Streams in a Django database: written and read by any process, without a server beside it.

    ``using`` and ``tenant`` are those of the sessions that the streams belong to. ``poll_interval`` is in
    seconds and ``retention`` is how long chunks of a stream that is over are kept, by default until they are
    pruned by age. On PostgreSQL readers are woken by NOTIFY; polling always remains.
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


class DatabaseStreams(DatabaseOperations):
    def __init__(self, db: Database, poll_interval: float | None = None) -> None:
        super().__init__(db)
        self._poll_interval = poll_interval

    async def call(self, verb: Callable[[], R]) -> R:
        return await in_thread(verb)

    async def watch(self) -> StreamWatch:
        return await watch_stream(self.db, self._poll_interval or conf.stream_options().poll_interval)

    # Writers

    def open(self, stream_id: str, writer: NewWriter, guard: Guard) -> None:
        parameters = {
            **self._row(stream_id),
            **_lease(writer),
            "run_id": writer.run_id,
            "agent_name": writer.agent_name,
            "no": False,
        }
        self._guarded(self._statements.open, stream_id, parameters, guard)

    def append(self, stream_id: str, texts: Sequence[str], writer: NewWriter | None, guard: Guard) -> int:
        parameters = {**self._row(stream_id), **_lease(writer), "count": len(texts), "texts": list(texts)}
        statement = self._statements.append
        if statement is not None:
            rows = self._guarded(statement, stream_id, parameters, guard)
        else:
            rows = self.db.transaction(lambda: self._append_in_two(stream_id, parameters, guard))
        if not rows:
            raise self._refusal(stream_id)
        ((key, last_sequence),) = rows
        self._announce(key, last_sequence)
        return int(last_sequence)

    def _append_in_two(
        self, stream_id: str, parameters: Mapping[str, Any], guard: Guard
    ) -> list[tuple[Any, ...]]:
        hold_fence(self.db, stream_id, guard)
        texts = parameters["texts"]
        advance = {name: value for name, value in parameters.items() if name != "texts"}
        rows = self.db.execute(self._statements.advance, advance)
        for key, last_sequence in rows:
            StreamChunk.objects.using(self.db.alias).bulk_create(
                [
                    StreamChunk(stream_id=key, sequence=sequence, payload=text)
                    for sequence, text in enumerate(texts, last_sequence - len(texts) + 1)
                ],
                batch_size=_CHUNKS_PER_STATEMENT,
            )
        return rows

    def renew(self, stream_id: str, writer: NewWriter) -> None:
        parameters = {**self._row(stream_id), **_lease(writer)}
        if not self.db.write(self._statements.renew, parameters):
            raise self._refusal(stream_id)

    def release(self, stream_id: str, writer: NewWriter) -> None:
        parameters = {**self._row(stream_id), "writer_id": writer.writer_id}
        self.db.write(self._statements.release, parameters)

    # The life of a stream

    @writes
    def settle(self, stream_id: str, settlement: Settlement, guard: Guard) -> None:
        stream = self._locked(stream_id, guard)
        if not settles(StreamStatus(stream.status), settlement.status):
            return
        self.db.execute(
            self._statements.settle,
            {
                "key": stream.pk,
                "status": settlement.status.value,
                "output": settlement.output,
                "error": settlement.error,
                "is_over": settlement.status in CLOSED,
                "is_kept": settlement.status in CLOSED and settlement.keep_ms is not None,
                "keep_ms": settlement.keep_ms or 0,
                "no": False,
            },
        )
        self._announce(stream.pk, stream.last_sequence)

    @writes
    def reset(self, stream_id: str, guard: Guard) -> None:
        stream = self._locked(stream_id, guard)
        self._chunks(stream.pk).delete()
        Stream.objects.using(self.db.alias).filter(pk=stream.pk).update(
            last_sequence=0,
            floor=0,
            generation=stream.generation + 1,
            status=StreamStatus.ACTIVE.value,
            output=None,
            error=None,
            ended_at=None,
            keep_until=None,
            lease_expires_at=None,
            is_emptied=False,
            updated_at=Now(),
        )
        self._announce(stream.pk, 0)

    @writes
    def delete(self, stream_id: str) -> bool:
        try:
            stream = self._locked(stream_id, _UNGUARDED)
        except StreamNotFound:
            return False
        self._chunks(stream.pk).delete()
        Stream.objects.using(self.db.alias).filter(pk=stream.pk)._raw_delete(self.db.alias)
        self._announce(stream.pk, 0)
        return True

    # Reading

    @reads
    def info(self, stream_id: str) -> StreamInfo | None:
        stream = first_row(self._of(stream_id))
        if stream is None:
            return None
        return StreamInfo(
            stream_id=stream.stream_id,
            status=StreamStatus(stream.status),
            chunk_count=stream.last_sequence - stream.floor,
            last_sequence=stream.last_sequence,
            output=None if stream.output is None else decode(stream.output),
            error=None if stream.error is None else decode(stream.error),
            run_id=stream.run_id,
            agent_name=stream.agent_name,
            created_at=stream.created_at,
            updated_at=stream.updated_at,
            ended_at=stream.ended_at,
        )

    def page(self, stream_id: str, after: int, limit: int) -> StreamPage | None:
        parameters = {**self._row(stream_id), "after": after, "last": min(after + limit, 2**63 - 1)}
        statements = self._statements
        rows = self.db.read(statements.joined_page or statements.page, parameters)
        if not rows:
            return None
        key, generation, status, last_sequence, floor, first_sequence, payload = rows[0]
        head = StreamHead((key, generation), StreamStatus(status), last_sequence, floor)
        if first_sequence is None:
            texts = []
        elif statements.joined_page:
            texts = payload.split("\n")
        else:
            texts = [row[-1] for row in rows]
        if after >= floor:
            _check_whole(len(texts), after, min(after + limit, last_sequence))
        return StreamPage(head, first_sequence or after + 1, tuple(texts))

    def prune(self, request: PruneRequest) -> PrunedStreams:
        return prune(self.db, self.db.tenant, request)

    # Shared

    @property
    def _statements(self) -> StreamStatements:
        return stream_statements(self.db.connection)

    def _row(self, stream_id: str) -> dict[str, Any]:
        return {"tenant": self.db.tenant, "stream_id": stream_id}

    def _of(self, stream_id: str) -> QuerySet[Stream]:
        return Stream.objects.using(self.db.alias).filter(tenant=self.db.tenant, stream_id=stream_id)

    def _chunks(self, key: int) -> QuerySet[StreamChunk]:
        return StreamChunk.objects.using(self.db.alias).filter(stream_id=key)

    def _locked(self, stream_id: str, guard: Guard) -> Stream:
        """The stream's head, locked until the transaction ends; the lock's row comes before it."""
        hold_fence(self.db, stream_id, guard)
        stream = first_row(
            self._of(stream_id).select_for_update().only("id", "status", "last_sequence", "generation")
        )
        if stream is None:
            raise StreamNotFound(stream_id)
        return stream

    def _guarded(
        self, statement: str, stream_id: str, parameters: Mapping[str, Any], guard: Guard
    ) -> list[tuple[Any, ...]]:
        """Run one statement that writes: alone, or with the fence held in one transaction."""
        if guard.fencing_token is None:
            return self.db.write(statement, parameters)

        def body() -> list[tuple[Any, ...]]:
            hold_fence(self.db, stream_id, guard)
            return self.db.execute(statement, parameters)

        return self.db.transaction(body)

    @reads
    def _refusal(self, stream_id: str) -> HelixStoreError:
        """Why a stream took nothing."""
        return StreamClosed() if self._of(stream_id).exists() else StreamNotFound(stream_id)

    def _announce(self, key: int, last_sequence: int) -> None:
        announce_after_commit(self.db.connection, key, last_sequence)


def _check_whole(count: int, after: int, last: int) -> None:
    """Head and chunks are of one moment, so whatever is missing between them was lost."""
    if count != max(0, last - after):
        raise IntegrityFault("A stream lacks chunks that it has numbered; other streams are not affected.")


def _lease(writer: NewWriter | None) -> dict[str, Any]:
    if writer is None:
        return {"writer_id": None, "lease_ms": int(conf.stream_options().writer_lease * 1000)}
    return {"writer_id": writer.writer_id, "lease_ms": writer.lease_ms}
