"""The layout of an export: the records of each table, and the units that are exported together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from helix_store.catalogue import Part, Table, declared, tables
from helix_store.models import Lock, UsageEntry
from helix_store.transfer.columns import RecordFormat


@dataclass(frozen=True, slots=True, eq=False)
class ExportedPart:
    """The rows of a table that belong to one parent, in an order in which no two rows are equal."""

    format: RecordFormat
    order: tuple[str, ...]
    only: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """A record and its parts, which are exported and imported together.

    ``identity`` names the two columns that together are unique to a unit.
    """

    identity: tuple[str, str | None]
    records: frozenset[str]


@cache
def format_of(table: Table) -> RecordFormat:
    """Return the record format of a table. Raises `TypeError` if the table cannot be exported."""
    return RecordFormat(table)


def formats() -> dict[str, RecordFormat]:
    """Return the formats of all tables by the name of their records."""
    return {table.record: format_of(table) for table in tables()}


@cache
def parts_of(*of: Table) -> tuple[ExportedPart, ...]:
    """Return the parts of these tables, in the order of an export."""
    return tuple(
        ExportedPart(format_of(table), part.order, part.only)
        for table in of
        for part in table.parts or (Part(table.order),)
    )


def units() -> dict[str, UnitLayout]:
    """Return the units by the name of their first record, in the order of an export.

    Locks come first: a session must not be imported before the token from which its fences start. Rows that
    several sessions share come next.
    """

    def records(*of: Table) -> frozenset[str]:
        return frozenset(table.record for table in of)

    return {
        "locks": UnitLayout(("tenant", None), records(declared(Lock))),
        "tenant_rows": UnitLayout(("tenant", "of"), records(*tables("tenant"))),
        "session": UnitLayout(("tenant", "session_id"), records(*tables("session"))),
        "stream": UnitLayout(("tenant", "stream_id"), records(*tables("stream"))),
        "kept_usage": UnitLayout(("tenant", "session_id"), records(declared(UsageEntry))),
    }
