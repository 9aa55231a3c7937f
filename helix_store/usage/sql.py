"""The SQL that records usage. A row whose id is known is left out of every insertion."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.core import validation
from helix_store.core.usage import UsageEntry, cost_units
from helix_store.engine.expressions import exact_sum
from helix_store.models import Session
from helix_store.models import UsageEntry as UsageRow
from helix_store.sessions.sql import session_by_id

__all__ = [
    "KEPT",
    "OF_SESSION",
    "ROWS_PER_STATEMENT",
    "SESSION_COLUMNS",
    "SUMMED",
    "entry_columns",
    "insert_many",
    "insert_one",
    "keep_sessions",
    "of_sessions",
    "sum_entries",
]

Statement = tuple[str, Any]
"""SQL and its parameters."""

_TABLE: Final = UsageRow._meta.db_table
_SESSIONS: Final = Session._meta.db_table
_TYPES: Final = {
    "BigIntegerField": "bigint",
    "BooleanField": "boolean",
    "CharField": "varchar",
    "DateTimeField": "timestamptz",
    "FloatField": "float8",
    "ForeignKey": "bigint",
}
_POSTGRES_TYPES: Final = {
    field.attname: _TYPES[field.get_internal_type()]
    for field in UsageRow._meta.concrete_fields
    if not field.primary_key
}
_COLUMNS: Final = tuple(_POSTGRES_TYPES)
_OF_SESSION: Final = {
    "tenant": "tenant",
    "session_id": "id",
    "session_agent_type": "agent_type",
    "user_id": "user_id",
}
SESSION_COLUMNS: Final = tuple(_OF_SESSION)
"""What an entry takes over from its session."""

SUMMED: Final = (
    "duration_ms",
    "cost_usd",
    "prompt_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "cached_tokens",
    "total_tokens",
)

# What SQLite allows in one statement since 3.32, unless it was built to allow more.
_SQLITE_PARAMETERS: Final = 32_766
ROWS_PER_STATEMENT: Final = min(1_000, _SQLITE_PARAMETERS // len(_COLUMNS))

_UNLESS_KNOWN: Final = "ON CONFLICT (tenant, entry_id) DO NOTHING"


def entry_columns(connection: BaseDatabaseWrapper, entry: UsageEntry) -> dict[str, Any]:
    """What is stored of an entry, as the driver takes it: without nulls and the columns of its session."""
    tokens = {} if entry.tokens is None else entry.tokens.to_dict()
    columns = {
        "entry_id": entry.id,
        "recorded_for": entry.session_id,
        "run_id": entry.run_id,
        "kind": entry.kind.value,
        "step_count": entry.step_count,
        "timestamp": connection.ops.adapt_datetimefield_value(
            validation.milliseconds_to_datetime(entry.timestamp)
        ),
        "source_type": entry.source.type,
        "source_name": entry.source.name,
        "model": entry.model,
        **{f"{name}_tokens": count for name, count in tokens.items()},
        "tool_name": entry.tool_name,
        "agent_type": entry.agent_type,
        "sub_session_id": entry.sub_session_id,
        "success": entry.success,
        "duration_ms": entry.duration_ms,
        "custom_type": entry.type,
        "custom_name": entry.name,
        "custom_unit": entry.unit,
        "amount": None if entry.amount is None else float(entry.amount),
        "cost_usd": None if entry.cost_usd is None else cost_units(entry.cost_usd),
    }
    return {name: value for name, value in columns.items() if value is not None}


def insert_one(connection: BaseDatabaseWrapper, tenant: str, columns: Mapping[str, Any]) -> Statement:
    """One entry, whose session it finds by itself; nothing is returned when nothing was recorded."""
    return _insert_one(connection.vendor, tuple(columns)), {"tenant": tenant, **columns}


@cache
def _insert_one(vendor: str, columns: tuple[str, ...]) -> str:
    # A statement that is prepared has types before it has values.
    types = _POSTGRES_TYPES if vendor == "postgresql" else {}
    given = {name: f"%({name})s" + (f"::{types[name]}" if types else "") for name in columns}
    values = ", ".join((*_OF_SESSION.values(), *given.values()))
    return f"""
        INSERT INTO "{_TABLE}" ({_quoted([*_OF_SESSION, *columns])}) SELECT {values} FROM "{_SESSIONS}"
        WHERE tenant = (SELECT %(tenant)s) AND session_id = {given["recorded_for"]} {_keep(vendor)}
        {_UNLESS_KNOWN} RETURNING id"""


def insert_many(connection: BaseDatabaseWrapper, rows: Sequence[Mapping[str, Any]]) -> Statement:
    """Rows with the columns of their sessions, in this order; a column that a row does not have is null."""
    insert = f'INSERT INTO "{_TABLE}" ({_quoted(_COLUMNS)})'
    if connection.vendor == "postgresql":
        # A fourth of the time that it takes to write and read every value of every row as SQL.
        arrays = ", ".join(f"%s::{_POSTGRES_TYPES[name]}[]" for name in _COLUMNS)
        given = f"unnest({arrays}) WITH ORDINALITY AS given({_quoted(_COLUMNS)}, place)"
        sql = f"{insert} SELECT {_quoted(_COLUMNS)} FROM {given} ORDER BY place {_UNLESS_KNOWN}"
        return sql, [[row.get(name) for row in rows] for name in _COLUMNS]
    row_of_placeholders = f"({_placeholders(len(_COLUMNS))})"
    sql = f"{insert} VALUES {', '.join([row_of_placeholders] * len(rows))} {_UNLESS_KNOWN}"
    return sql, [row.get(name) for row in rows for name in _COLUMNS]


def keep_sessions(connection: BaseDatabaseWrapper, tenant: str, session_ids: Sequence[str]) -> Statement:
    """Ids of the sessions that exist, with what entries take over; none can be deleted until the commit."""
    # In the order in which whole trees are locked, so that neither waits for the other.
    sql = f"""
        SELECT session_id, {", ".join(_OF_SESSION.values())} FROM "{_SESSIONS}"
        WHERE tenant = (SELECT %s) AND session_id IN ({_placeholders(len(session_ids))})
        ORDER BY id {_keep(connection.vendor)}"""
    return sql, [tenant, *session_ids]


def of_sessions(connection: BaseDatabaseWrapper, keys: Sequence[int]) -> Statement:
    """The condition for entries of these sessions, however many: all keys are one parameter."""
    if connection.vendor == "postgresql":
        return "session_id = ANY(%(keys)s::bigint[])", {"keys": keys}
    return "session_id IN (SELECT value FROM json_each(%(keys)s))", {"keys": json.dumps(keys)}


def sum_entries(connection: BaseDatabaseWrapper, condition: str) -> str:
    """Entries that meet a condition, added up by kind, name and custom name.

    The columns after those three are the count, that of successes, the sum of amounts, and the sums of
    `SUMMED` for `summed`.
    """
    return _sum_entries(connection.vendor, condition)


@lru_cache(64)
def _sum_entries(vendor: str, condition: str) -> str:
    # All names in one column: PostgreSQL takes every further one for many more groups, and sorts where it
    # could hash. To tell groups apart takes it longer than to add up: nothing is a key that can be counted.
    sums = ", ".join(exact_sum(vendor, name) for name in SUMMED)
    return f"""
        SELECT kind, COALESCE(model, tool_name, agent_type, custom_type), custom_name,
            count(*), count(*) FILTER (WHERE success), SUM(amount), {sums}
        FROM "{_TABLE}" WHERE {condition} GROUP BY 1, 2, 3"""


OF_SESSION: Final = f"""
    session_id = (SELECT id FROM "{_SESSIONS}" WHERE {session_by_id()})"""


KEPT: Final = "tenant = (SELECT %(tenant)s) AND recorded_for = %(session_id)s AND session_id IS NULL"
"""Entries that have outlived a session of this id."""


def _keep(vendor: str) -> str:
    # Without it a deletion meanwhile would only be noticed at the commit, as a broken foreign key. It does
    # not wait for steps: those lock the row in a way that allows for this.
    return "FOR KEY SHARE" if vendor == "postgresql" else ""


def _quoted(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _placeholders(count: int) -> str:
    return ", ".join(["%s"] * count)
