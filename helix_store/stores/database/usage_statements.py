"""The SQL that records usage, for both databases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Field

from helix_store.core import validation
from helix_store.core.usage import UsageEntry
from helix_store.models import Session
from helix_store.models import UsageEntry as UsageRow

__all__ = ["ROWS_PER_STATEMENT", "UsageStatements", "entry_values", "usage_statements"]

_OF_SESSION: Final = ("tenant", "session_id", "session_agent_type", "user_id")
_COLUMNS: Final[dict[str, Field[Any, Any]]] = {
    field.attname: field
    for field in UsageRow._meta.concrete_fields
    if not field.primary_key and field.attname not in _OF_SESSION
}

# What SQLite allows in one statement since 3.32, unless it was built to allow more.
_SQLITE_PARAMETERS: Final = 32_766
ROWS_PER_STATEMENT: Final = min(1_000, _SQLITE_PARAMETERS // (len(_OF_SESSION) + len(_COLUMNS)))


@dataclass(frozen=True, slots=True)
class UsageStatements:
    """A row whose id is known is left out. The lists of placeholders are repeated by the methods."""

    insert_one: str
    """Takes named parameters and finds the session by itself; returns nothing when it recorded nothing."""
    insert_head: str
    insert_tail: str
    sessions_head: str
    sessions_tail: str

    def insert(self, count: int) -> str:
        """Takes the columns of the session and of the entry, row after row."""
        row = f"({_placeholders(len(_OF_SESSION) + len(_COLUMNS))})"
        return f"{self.insert_head} {', '.join([row] * count)} {self.insert_tail}"

    def sessions(self, count: int) -> str:
        """Takes the tenant and names; returns those that exist with the columns that an entry takes over."""
        return f"{self.sessions_head} ({_placeholders(count)}) {self.sessions_tail}"


def usage_statements(connection: BaseDatabaseWrapper) -> UsageStatements:
    quote = connection.ops.quote_name
    return _statements(connection.vendor, quote(UsageRow._meta.db_table), quote(Session._meta.db_table))


@cache
def _statements(vendor: str, table: str, sessions: str) -> UsageStatements:
    columns = ", ".join(f'"{name}"' for name in (*_OF_SESSION, *_COLUMNS))
    own_values = ", ".join(f"%({name})s" for name in _COLUMNS)
    # Against a deletion of the session, which would otherwise only be noticed when the transaction ends. It
    # does not wait for a step: that takes a lock which allows for this one.
    keep = "FOR KEY SHARE" if vendor == "postgresql" else ""
    unless_known = "ON CONFLICT (tenant, entry_id) DO NOTHING"
    return UsageStatements(
        insert_one=f"""
            INSERT INTO {table} ({columns})
            SELECT tenant, id, agent_type, user_id, {own_values} FROM {sessions}
            WHERE tenant = %(tenant)s AND session_id = %(recorded_for)s {keep}
            {unless_known} RETURNING id""",  # noqa: S608  own tables and columns
        insert_head=f"INSERT INTO {table} ({columns}) VALUES",
        insert_tail=unless_known,
        sessions_head=f"""
            SELECT session_id, id, agent_type, user_id FROM {sessions}
            WHERE tenant = %s AND session_id IN""",  # noqa: S608
        # The order in which whole trees are locked, so that neither can wait for the other.
        sessions_tail=f"ORDER BY id {keep}",
    )


def _placeholders(count: int) -> str:
    return ", ".join(["%s"] * count)


def entry_values(connection: BaseDatabaseWrapper, entry: UsageEntry) -> Mapping[str, Any]:
    """What is stored of an entry, by column, as the driver takes it; the session's part is not in it."""
    values: dict[str, Any] = {
        "entry_id": entry.id,
        "recorded_for": entry.session_id,
        "timestamp": validation.milliseconds_to_datetime(entry.timestamp),
        "source_type": entry.source.type,
        "source_name": entry.source.name,
        "custom_type": entry.type,
        "custom_name": entry.name,
        "custom_unit": entry.unit,
    }
    if entry.tokens is not None:
        values |= {f"{name}_tokens": count for name, count in entry.tokens.to_dict().items()}
    return {
        name: field.get_db_prep_save(values.get(name, getattr(entry, name, None)), connection)
        for name, field in _COLUMNS.items()
    }
