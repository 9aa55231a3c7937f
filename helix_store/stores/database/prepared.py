"""Prepared statements on PostgreSQL, each a transaction by itself.

That saves the trips for ``BEGIN`` and ``COMMIT`` and the planning, which costs more than the work of a small
statement. ``HELIX_STORE["FAST_PATHS"] = False`` switches all of this off.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.connections import given_back
from helix_store.exceptions import StoreBusy
from helix_store.stores.database.errors import is_retryable_transaction, mapped_errors
from helix_store.stores.database.scope import Scope

__all__ = ["Rows", "is_fast", "read_prepared", "write_prepared", "writes_alone"]

Rows = list[tuple[Any, ...]]


def is_fast(scope: Scope) -> bool:
    return scope.connection.vendor == "postgresql" and bool(conf.get("FAST_PATHS"))


def writes_alone(scope: Scope) -> bool:
    """Whether a statement commits by itself: outside of the caller's atomic block."""
    if not is_fast(scope):
        return False
    connection = scope.connection
    if connection.in_atomic_block:
        return False
    with mapped_errors(connection):
        # Connects: after that, an error of the connection leaves open whether the statement was committed.
        return connection.get_autocommit()


def read_prepared(scope: Scope, sql: str, parameters: Mapping[str, Any]) -> Rows:
    connection = scope.connection
    with given_back(connection), mapped_errors(connection):
        return _fetch(connection, sql, parameters)


def write_prepared(scope: Scope, sql: str, parameters: Mapping[str, Any]) -> Rows:
    """Run a write, and return nothing when the database gave it up for another transaction's sake."""
    connection = scope.connection
    try:
        with given_back(connection), mapped_errors(connection, committing=True):
            return _fetch(connection, sql, parameters)
    except StoreBusy as exc:
        if is_retryable_transaction(exc):
            return []
        raise


def _fetch(connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any]) -> Rows:
    with _cursor(connection) as cursor:
        cursor.execute(sql, parameters)
        rows: Rows = cursor.fetchall()
        return rows


def _cursor(connection: BaseDatabaseWrapper) -> Any:
    """A cursor of Django, or around one of psycopg that binds on the server and prepares at once.

    Behind a pooler that hands out another server connection per transaction, a prepared statement may not be
    there the next time; Django's setting for such poolers switches preparing off.
    """
    if connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
        return connection.cursor()
    connection.ensure_connection()
    return connection._prepare_cursor(_prepared_cursor_class()(connection.connection))  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _prepared_cursor_class() -> type[Any]:
    from psycopg import Cursor

    class PreparedCursor(Cursor[Any]):
        """Prepares every statement, and not only after some executions."""

        def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
            return super().execute(query, params, prepare=True, **options)

    return PreparedCursor
