"""Lists of streams, across tenants, for commands and the admin."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from helix_store import conf
from helix_store.core import validation
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.serialization import Serializable
from helix_store.core.types import StreamStatus
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.engine.database import Database
from helix_store.models import Stream
from helix_store.streams import sql


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
    return [tenant for (tenant,) in Database(using, "", None).read(sql.TENANTS_OF, {"stream_id": name})]


def _listed(row: dict[str, Any], now: datetime) -> ListedStream:
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
