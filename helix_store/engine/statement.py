"""Names of tables in plain SQL."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import JSONField, Model

from helix_store.engine.connections import given_back
from helix_store.engine.database import Scope
from helix_store.engine.direct import is_direct, run_directly
from helix_store.engine.errors import mapped_errors
from helix_store.engine.prepared import (
    is_fast,
    is_fast_write,
    read_prepared,
    write_prepared,
)

__all__ = [
    "fetched_rows",
    "insert_row",
    "insert_rows",
    "locked_row",
    "read_rows",
    "returned_rows",
    "table",
    "update_row",
]


def table(model: type[Model]) -> str:
    # PostgreSQL alone comes here, and table prefixes are plain names.
    return f'"{model._meta.db_table}"'


_AS_THEY_ARE: Final = frozenset({str, int, type(None)})
_TEXTS: Final = 512
"""How many different statements are remembered: one for each set of columns that is written together."""


def fetched_rows(
    connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any] | Sequence[Any]
) -> list[tuple[Any, ...]]:
    if is_direct(connection):
        return run_directly(connection, sql, parameters)
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        rows: list[tuple[Any, ...]] = [] if cursor.description is None else cursor.fetchall()
        return rows


def read_rows(scope: Scope, sql: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Run a statement that only reads."""
    connection = scope.connection
    if is_fast(connection):
        return read_prepared(connection, sql, parameters)
    return scope.read(lambda: fetched_rows(connection, sql, parameters))


def returned_rows(scope: Scope, sql: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Run a statement that writes and returns rows.

    Inside the caller's atomic block it is a part of that, in a savepoint. Outside it is a transaction by
    itself, which saves the trips for ``BEGIN`` and ``COMMIT``.
    """
    connection = scope.connection
    if is_fast_write(connection):
        return write_prepared(connection, sql, parameters)
    with mapped_errors(connection):
        # Connects: after that, an error of the connection leaves open whether the statement was committed.
        is_alone = connection.get_autocommit()
    if not is_alone:
        return scope.write(lambda: fetched_rows(connection, sql, parameters))
    with given_back(connection), mapped_errors(connection, committing=True):
        return fetched_rows(connection, sql, parameters)


def insert_row(scope: Scope, model: type[Model], columns: Mapping[str, Any]) -> int:
    """Insert one row and return its key. Columns are named as in the table."""
    names, connection = tuple(columns), scope.connection
    sql = _insertion(model, names, connection.vendor, 1) + " RETURNING id"
    ((key,),) = fetched_rows(connection, sql, _stored(connection, columns.values()))
    return int(key)


def insert_rows(
    scope: Scope, model: type[Model], names: tuple[str, ...], rows: Sequence[Sequence[Any]]
) -> None:
    """Insert rows of the same columns, as many as one statement takes; the caller keeps to that."""
    connection = scope.connection
    fetched_rows(
        connection,
        _insertion(model, names, connection.vendor, len(rows)),
        [value for row in rows for value in _stored(connection, row)],
    )


def update_row(scope: Scope, model: type[Model], key: int, columns: Mapping[str, Any]) -> None:
    """Write columns of the row with this key."""
    connection = scope.connection
    fetched_rows(
        connection,
        _update(model, tuple(columns), connection.vendor),
        [*_stored(connection, columns.values()), key],
    )


def locked_row(
    scope: Scope, model: type[Model], names: tuple[str, ...], condition: str, parameters: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Read columns of the one row that meets a condition, locked as by ``select_for_update(no_key=True)``."""
    connection = scope.connection
    rows = fetched_rows(connection, _locking_read(model, names, condition, connection.vendor), parameters)
    return rows[0] if rows else None


def _stored(connection: BaseDatabaseWrapper, values: Any) -> list[Any]:
    return [value if type(value) in _AS_THEY_ARE else _adapted(connection, value) for value in values]


def _adapted(connection: BaseDatabaseWrapper, value: Any) -> Any:
    if type(value) in (list, dict):
        return json.dumps(value)
    if type(value) is not datetime:
        return value
    if connection.vendor == "sqlite" and value.tzinfo is connection.timezone is UTC:
        # What Django makes of it, a few times faster.
        return str(value.replace(tzinfo=None))
    return connection.ops.adapt_datetimefield_value(value)


@lru_cache(_TEXTS)
def _insertion(model: type[Model], names: tuple[str, ...], vendor: str, rows: int) -> str:
    row = ", ".join(_placeholder(model, name, vendor) for name in names)
    columns = ", ".join(f'"{name}"' for name in names)
    return f'INSERT INTO "{model._meta.db_table}" ({columns}) VALUES {", ".join([f"({row})"] * rows)}'


@lru_cache(_TEXTS)
def _update(model: type[Model], names: tuple[str, ...], vendor: str) -> str:
    columns = ", ".join(f'"{name}" = {_placeholder(model, name, vendor)}' for name in names)
    return f'UPDATE "{model._meta.db_table}" SET {columns} WHERE id = %s'


@lru_cache(_TEXTS)
def _locking_read(model: type[Model], names: tuple[str, ...], condition: str, vendor: str) -> str:
    columns = ", ".join(f'"{name}"' for name in names)
    lock = "FOR NO KEY UPDATE" if vendor == "postgresql" else ""
    return f'SELECT {columns} FROM "{model._meta.db_table}" WHERE {condition} {lock}'


def _placeholder(model: type[Model], name: str, vendor: str) -> str:
    is_json = name in _json_columns(model)
    return "%s::jsonb" if is_json and vendor == "postgresql" else "%s"


@cache
def _json_columns(model: type[Model]) -> frozenset[str]:
    return frozenset(field.attname for field in model._meta.concrete_fields if isinstance(field, JSONField))
