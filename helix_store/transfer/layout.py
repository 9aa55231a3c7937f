"""The layout of an export: which table is part of what, in which order, and which columns stay behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from django.db.models import Model

from helix_store.app_tables import AppTable, registered_tables
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    InterruptRequest,
    Item,
    Lock,
    Message,
    Operation,
    Run,
    Session,
    StagedChange,
    Stream,
    StreamChunk,
    SubSessionRef,
    UsageEntry,
)
from helix_store.transfer.columns import Table

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "NOT_EXPORTED",
    "PARTS",
    "TABLES",
    "Part",
    "UnitLayout",
    "app_part",
    "parts_of_sessions",
    "tables",
    "units",
]

FORMAT: Final = "helix_store.export"
FORMAT_VERSION: Final = 1

_KEY: Final = "A key of one database; the order of the records stands for it."
_SESSION: Final = "The session that the record follows."
_STREAM: Final = "The stream that the record follows."
_LEASE: Final = "A lease of a process that writes to the other database. Only the token must grow."

NOT_EXPORTED: Final[dict[type[Model], dict[str, str]]] = {
    Session: {
        "id": _KEY,
        "base_key": "It matches states that processes have loaded from the other database, with its keys.",
    },
    Message: {"id": _KEY, "session": _SESSION},
    Item: {"id": _KEY, "session": _SESSION},
    Run: {"id": _KEY, "session": _SESSION},
    SubSessionRef: {"id": _KEY, "session": _SESSION},
    InterruptRequest: {"id": _KEY, "session": _SESSION},
    StagedChange: {"id": _KEY, "session": _SESSION},
    Operation: {"id": _KEY, "session": _SESSION},
    Checkpoint: {"id": _KEY, "session": _SESSION},
    UsageEntry: {"id": _KEY, "session": f"{_SESSION} After its deletion, the entries follow a kept_usage."},
    Stream: {"id": _KEY},
    StreamChunk: {"id": _KEY, "stream": _STREAM},
    Lock: {
        "id": _KEY,
        "tenant": "The tenant of the locks that the record follows.",
        "owner": _LEASE,
        "acquired_at": _LEASE,
        "expires_at": _LEASE,
    },
}
"""The columns that no record holds, with the reason. Every other column of every table is exported."""


def _table(record: str, model: type[Model], reference: str | None = None) -> Table:
    return Table(record, model, without=NOT_EXPORTED[model], reference=reference)


SESSIONS: Final = _table("session", Session, "current")
CHECKPOINTS: Final = _table("checkpoint", Checkpoint, "base")
MESSAGES: Final = _table("message", Message)
ITEMS: Final = _table("item", Item)
RUNS: Final = _table("run", Run)
SUB_SESSION_REFS: Final = _table("sub_session_ref", SubSessionRef)
INTERRUPT_REQUESTS: Final = _table("interrupt_request", InterruptRequest)
STAGED_CHANGES: Final = _table("staged_change", StagedChange)
OPERATIONS: Final = _table("operation", Operation)
USAGE_ENTRIES: Final = _table("usage_entry", UsageEntry)
STREAMS: Final = _table("stream", Stream)
STREAM_CHUNKS: Final = _table("stream_chunk", StreamChunk)
LOCKS: Final = _table("lock", Lock)

TABLES: Final[Mapping[str, Table]] = {
    table.record: table
    for table in (
        SESSIONS,
        CHECKPOINTS,
        MESSAGES,
        ITEMS,
        RUNS,
        SUB_SESSION_REFS,
        INTERRUPT_REQUESTS,
        STAGED_CHANGES,
        OPERATIONS,
        USAGE_ENTRIES,
        STREAMS,
        STREAM_CHUNKS,
        LOCKS,
    )
}
"""The tables of this app by the name of their records."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The rows of a table that belong to one row, its ``parent``, in an order without ties.

    The order ends with ``id`` where the order of insertion is data.
    """

    table: Table
    parent: str
    order: tuple[str, ...]
    only: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """What is exported and imported together: a record and its parts.

    ``identity`` names the two columns that no two units share.
    """

    identity: tuple[str, str | None]
    records: frozenset[str]


def _checkpoints(kind: CheckpointKind, *order: str) -> Part:
    return Part(CHECKPOINTS, "session_id", order, {"kind": kind.value})


SESSION_PARTS: Final = (
    # A base comes before what is a delta from it.
    _checkpoints(CheckpointKind.BASE, "namespace", "version"),
    _checkpoints(CheckpointKind.STEP, "namespace", "version"),
    _checkpoints(CheckpointKind.STATE, "namespace", "version"),
    # The newest of all namespaces is that of the highest version, and then of the highest key.
    _checkpoints(CheckpointKind.GRAPH, "version", "id"),
    _checkpoints(CheckpointKind.SNAPSHOT, "namespace", "version"),
    Part(MESSAGES, "session_id", ("sequence",)),
    Part(ITEMS, "session_id", ("lane", "id")),
    Part(RUNS, "session_id", ("turn",)),
    Part(SUB_SESSION_REFS, "session_id", ("id",)),
    Part(INTERRUPT_REQUESTS, "session_id", ("id",)),
    Part(STAGED_CHANGES, "session_id", ("id",)),
    Part(OPERATIONS, "session_id", ("operation_id",)),
    Part(USAGE_ENTRIES, "session_id", ("timestamp", "id")),
)
STREAM_PARTS: Final = (Part(STREAM_CHUNKS, "stream_id", ("sequence",)),)
PARTS: Final = (*SESSION_PARTS, *STREAM_PARTS)


# --- With the tables of other apps -------------------------------------------------------------------


def tables() -> dict[str, Table]:
    """All tables by the name of their records."""
    return {**TABLES, **{each.record: app_part(each).table for each in registered_tables()}}


def parts_of_sessions() -> tuple[Part, ...]:
    """What follows a session: the parts of this app, then those of others by the name of their records."""
    return SESSION_PARTS + tuple(map(app_part, registered_tables("session")))


@cache
def app_part(table: AppTable) -> Part:
    """The rows of a registered table that belong to a session or tenant. Raises `TypeError`."""
    exported = Table(
        table.record, table.model, without=table.implied.union(table.not_exported), parent=table.parent
    )
    return Part(exported, table.parent, table.order)


def units() -> dict[str, UnitLayout]:
    """The units by the name of their first record, in the order of an export.

    Locks come first: a session must not be imported before the token that its fences begin with. Then come
    rows that several sessions share.
    """
    of_tenants = frozenset(each.record for each in registered_tables("tenant"))
    of_sessions = frozenset(part.table.record for part in parts_of_sessions())
    return {
        "locks": UnitLayout(("tenant", None), frozenset({"lock"})),
        "tenant_rows": UnitLayout(("tenant", "of"), of_tenants),
        "session": UnitLayout(("tenant", "session_id"), of_sessions),
        "stream": UnitLayout(("tenant", "stream_id"), frozenset({"stream_chunk"})),
        "kept_usage": UnitLayout(("tenant", "session_id"), frozenset({"usage_entry"})),
    }
