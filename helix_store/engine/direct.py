"""Statements on SQLite by Python's own driver, on the connection and in the transaction that Django holds.

SQLite runs a small statement in less time than Django takes to make a cursor for it and to write its
placeholders in SQLite's form. ``HELIX_STORE["FAST_PATHS"] = False`` switches this off too.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.asyncio import async_unsafe

from helix_store import conf

__all__ = ["is_direct", "run_directly"]

_PLACEHOLDER: Final = re.compile(r"(?<!%)%(?:s|\((\w+)\)s)")


def is_direct(connection: BaseDatabaseWrapper) -> bool:
    """Whether there is nothing for Django to do: no wrapper, no log, and a connection of that driver."""
    return (
        connection.vendor == "sqlite"
        and isinstance(connection.connection, sqlite3.Connection)
        and not (connection.execute_wrappers or connection.queries_logged)
        and bool(conf.get("FAST_PATHS"))
    )


@async_unsafe
def run_directly(
    connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any] | Sequence[Any]
) -> list[tuple[Any, ...]]:
    """Run a statement as Django's own cursor does, and return its rows. Raises Django's errors."""
    connection.validate_thread_sharing()
    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors:
        cursor = connection.connection.execute(_in_the_form_of_sqlite(sql), parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


@lru_cache(maxsize=512)
def _in_the_form_of_sqlite(sql: str) -> str:
    return _PLACEHOLDER.sub(lambda match: f":{match[1]}" if match[1] else "?", sql).replace("%%", "%")
