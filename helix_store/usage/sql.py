"""The SQL of the usage ledger. An insertion leaves out every entry whose id is known.

An entry takes its columns from the locked row of its session, and the unique constraint decides on its id.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from helix_store.engine.expressions import exact_sum, is_in_list
from helix_store.engine.statement import Statement, table
from helix_store.models import Session
from helix_store.models import UsageEntry as UsageRow
from helix_store.sessions.sql import SESSION_BY_ID

__all__ = [
    "COLUMNS",
    "KEEP_SESSIONS",
    "ROWS_PER_STATEMENT",
    "SESSION_COLUMNS",
    "SUMMED",
    "SUMS_OF_KEPT",
    "SUMS_OF_SESSION",
    "SUMS_OF_SESSIONS",
    "insert_entries",
    "insert_entry",
]

_TYPES: Final = {
    "BigIntegerField": "bigint",
    "BooleanField": "boolean",
    "CharField": "varchar",
    "DateTimeField": "timestamptz",
    "FloatField": "float8",
    "ForeignKey": "bigint",
}
_COLUMN_TYPES: Final = {
    field.attname: _TYPES[field.get_internal_type()]
    for field in UsageRow._meta.concrete_fields
    if not field.primary_key
}
"""PostgreSQL's type of each column: parameters of a prepared statement have types before they have values."""

COLUMNS: Final = tuple(_COLUMN_TYPES)
SESSION_COLUMNS: Final = {
    "tenant": "tenant",
    "session_id": "id",
    "session_agent_type": "agent_type",
    "user_id": "user_id",
}
"""Columns that an entry copies from its session, and their names there."""

SUMMED: Final = (
    "duration_ms",
    "cost_usd",
    "prompt_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "cached_tokens",
    "total_tokens",
)

# What SQLite allows in one statement since 3.32, unless it is built with another limit.
_SQLITE_PARAMETERS: Final = 32_766
ROWS_PER_STATEMENT: Final = min(1_000, _SQLITE_PARAMETERS // len(COLUMNS))

# Prevents the deletion of a session until the commit, and does not wait for a step of it. Without this lock
# a concurrent deletion would fail the commit with a broken foreign key.
_KEEP: Final = "FOR KEY SHARE"
_UNLESS_KNOWN: Final = "ON CONFLICT (tenant, entry_id) DO NOTHING"


def _names(columns: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


@lru_cache(512)
def insert_entry(columns: tuple[str, ...]) -> Statement:
    """One entry of the session ``recorded_for``; returns no row for a known id or an unknown session."""
    insert = f"INSERT INTO {table(UsageRow)} ({_names((*SESSION_COLUMNS, *columns))})"
    copied = ", ".join(SESSION_COLUMNS.values())
    typed = ", ".join(f"%({name})s::{_COLUMN_TYPES[name]}" for name in columns)
    plain = ", ".join(f"%({name})s" for name in columns)
    return Statement(
        postgresql=f"""
            {insert} SELECT {copied}, {typed} FROM {table(Session)}
            WHERE tenant = (SELECT %(tenant)s) AND session_id = %(recorded_for)s::varchar {_KEEP}
            {_UNLESS_KNOWN} RETURNING id""",
        sqlite=f"""
            {insert} SELECT {copied}, {plain} FROM {table(Session)}
            WHERE tenant = (SELECT %(tenant)s) AND session_id = %(recorded_for)s
            {_UNLESS_KNOWN} RETURNING id""",
    )


@lru_cache(16)
def insert_entries(rows: int) -> Statement:
    """Entries in their order with all `COLUMNS`; the parameters are those of `rows_parameter`.

    Arrays take PostgreSQL a quarter of the time that placeholders for every value take.
    """
    insert = f"INSERT INTO {table(UsageRow)} ({_names(COLUMNS)})"
    arrays = ", ".join(f"%s::{column_type}[]" for column_type in _COLUMN_TYPES.values())
    row = f"({', '.join(['%s'] * len(COLUMNS))})"
    return Statement(
        postgresql=f"""
            {insert} SELECT {_names(COLUMNS)}
            FROM unnest({arrays}) WITH ORDINALITY AS given({_names(COLUMNS)}, ordinal)
            ORDER BY ordinal {_UNLESS_KNOWN}""",
        sqlite=f"{insert} VALUES {', '.join([row] * rows)} {_UNLESS_KNOWN}",
    )


def _keep_sessions() -> Statement:
    # In the order in which whole trees are locked, so that the two cannot deadlock.
    read = f"""
        SELECT session_id, {", ".join(SESSION_COLUMNS.values())} FROM {table(Session)}
        WHERE tenant = (SELECT %(tenant)s) AND {{}} ORDER BY id"""
    postgresql, sqlite = map(read.format, is_in_list("session_id", "session_ids", "text"))
    return Statement(postgresql=f"{postgresql} {_KEEP}", sqlite=sqlite)


def _sums(postgresql: str, sqlite: str | None = None) -> Statement:
    """Entries that meet a condition, summed by kind, name and custom name.

    These three columns are followed by the number of entries, the number of successes, the sum of amounts,
    and the sums of `SUMMED`, for `summed`.
    """
    # All names in one column: with more grouping columns PostgreSQL estimates too many groups, and sorts
    # where it could hash.
    of_postgresql, of_sqlite = zip(*map(exact_sum, SUMMED), strict=True)

    def text(sums: Iterable[str], condition: str) -> str:
        return f"""
            SELECT kind, COALESCE(model, tool_name, agent_type, custom_type), custom_name,
                count(*), count(*) FILTER (WHERE success), SUM(amount), {", ".join(sums)}
            FROM {table(UsageRow)} WHERE {condition} GROUP BY 1, 2, 3"""

    return Statement(text(of_postgresql, postgresql), text(of_sqlite, sqlite or postgresql))


KEEP_SESSIONS: Final = _keep_sessions()
"""The id and the `SESSION_COLUMNS` of each session; none of them can be deleted until the commit."""

SUMS_OF_SESSION: Final = _sums(f"session_id = (SELECT id FROM {table(Session)} WHERE {SESSION_BY_ID})")
SUMS_OF_SESSIONS: Final = _sums(*is_in_list("session_id", "keys", "bigint"))
SUMS_OF_KEPT: Final = _sums(
    "tenant = (SELECT %(tenant)s) AND recorded_for = %(session_id)s AND session_id IS NULL"
)
"""Entries of deleted sessions with this id."""
