"""Plain SQL: a read, or a write that is one statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.connections import given_back
from helix_store.stores.database.errors import mapped_errors
from helix_store.stores.database.scope import Scope

__all__ = ["fetched_rows", "returned_rows"]


def fetched_rows(
    connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


def returned_rows(scope: Scope, sql: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Run a statement that writes and returns rows.

    Inside the caller's atomic block it is a part of that, in a savepoint. Outside it is a transaction by
    itself, which saves the trips for ``BEGIN`` and ``COMMIT``.
    """
    connection = scope.connection
    with mapped_errors(connection):
        # Connects: after that, an error of the connection leaves open whether the statement was committed.
        is_alone = connection.get_autocommit()
    if not is_alone:
        return scope.write(lambda: fetched_rows(connection, sql, parameters))
    with given_back(connection), mapped_errors(connection, committing=True):
        return fetched_rows(connection, sql, parameters)
