"""Prepared statements on PostgreSQL: each a transaction by itself, or a savepoint of the caller's.

That saves the trips for ``BEGIN`` and ``COMMIT``, or those for the savepoint, and the planning, which costs
more than the work of a small statement. ``HELIX_STORE["FAST_PATHS"] = False`` switches all of this off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final
from weakref import WeakSet

from django.db import Error, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.engine.connections import given_back
from helix_store.engine.errors import (
    is_prepared_in_vain,
    is_retryable_transaction,
    mapped_errors,
)
from helix_store.exceptions import StoreBusy

__all__ = ["Rows", "is_fast", "is_fast_write", "read_prepared", "try_prepared", "write_prepared"]

Rows = list[tuple[Any, ...]]


def is_fast(connection: BaseDatabaseWrapper) -> bool:
    return connection.vendor == "postgresql" and bool(conf.get("FAST_PATHS"))


def is_fast_write(connection: BaseDatabaseWrapper) -> bool:
    """Whether a statement commits by itself, or is part of a transaction that Django knows of."""
    if not is_fast(connection):
        return False
    if connection.in_atomic_block:
        return True
    if connection.connection is not None:
        return bool(connection.autocommit)
    with mapped_errors(connection):
        # Connects: after that, an error of the connection leaves open whether the statement was committed.
        return connection.get_autocommit()


def read_prepared(connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any]) -> Rows:
    """Run a read where `is_fast`."""
    with given_back(connection), mapped_errors(connection):
        return fetch_prepared(connection, sql, parameters, in_savepoint=connection.in_atomic_block)


def write_prepared(connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any]) -> Rows:
    """Run a write where `is_fast_write`.

    Inside the caller's atomic block it is a savepoint of that: the caller owns the commit and any retry.
    """
    if connection.in_atomic_block:
        with mapped_errors(connection):
            return fetch_prepared(connection, sql, parameters, in_savepoint=True)
    with given_back(connection), mapped_errors(connection, committing=True):
        return fetch_prepared(connection, sql, parameters)


def try_prepared(connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any]) -> Rows:
    """The same, but nothing is returned when the database gave it up for another transaction's sake."""
    try:
        return write_prepared(connection, sql, parameters)
    except StoreBusy as exc:
        if connection.in_atomic_block or not is_retryable_transaction(exc):
            raise
        return []


def fetch_prepared(
    connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any], *, in_savepoint: bool = False
) -> Rows:
    """Run a statement with named placeholders, prepared where that is possible.

    ``in_savepoint`` is for a transaction that must survive a failure of the statement.

    Behind a pooler that hands out another server connection per transaction, a prepared statement may be
    gone the next time. Django's setting for such poolers, ``DISABLE_SERVER_SIDE_CURSORS``, switches preparing
    off, and so does the first statement that is gone.
    """
    if connection.connection is None:
        connection.ensure_connection()
    if _may_prepare(connection):
        statement = _numbered(sql)
        cursor = _prepared_cursor_class()(connection.connection, in_savepoint=in_savepoint)
        # Django's private method, for what its own cursors are: checked for their thread, logged and wrapped.
        wrapped = connection._prepare_cursor(cursor)  # type: ignore[attr-defined]
        try:
            wrapped.execute(statement.text, statement.arguments(parameters))
        except Error as exc:
            if not is_prepared_in_vain(exc):
                raise
            _never_prepare_on.add(connection.connection)
        else:
            rows: Rows = cursor.rows
            return rows
    return _fetched_unprepared(connection, sql, parameters, in_savepoint=in_savepoint)


def _fetched_unprepared(
    connection: BaseDatabaseWrapper, sql: str, parameters: Mapping[str, Any], *, in_savepoint: bool
) -> Rows:
    savepoint = transaction.atomic(using=connection.alias) if in_savepoint else nullcontext()
    with savepoint, connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        rows: Rows = cursor.fetchall()
        return rows


_never_prepare_on: Final[WeakSet[Any]] = WeakSet()
"""Connections of the driver on which a prepared statement was lost."""


def _may_prepare(connection: BaseDatabaseWrapper) -> bool:
    if connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS") or _prepared_cursor_class() is None:
        return False
    # Django cannot log a statement of another form than its own when the server binds the parameters.
    is_loggable = not (connection.queries_logged and connection.features.uses_server_side_binding)  # type: ignore[attr-defined]
    return is_loggable and connection.connection not in _never_prepare_on


@lru_cache(maxsize=1)
def _prepared_cursor_class() -> Any:
    """The cursor for prepared statements; ``None`` with a driver that cannot do it."""
    try:
        from helix_store.engine.prepared_cursor import PreparedCursor
    except ImportError:
        return None
    return PreparedCursor


@dataclass(frozen=True, slots=True)
class _Numbered:
    """SQL with ``$1``, ``$2``… and the names of its parameters in that order.

    Values are sent as the text that the server reads them from. As text without a type, a parameter has the
    type of its place in the statement. The driver would pick one by the value, and numbers of different sizes
    would be prepared as different statements.
    """

    text: str
    names: tuple[str, ...]

    def arguments(self, parameters: Mapping[str, Any]) -> list[str | None]:
        return [
            value if value is None or type(value) is str else _WRITERS[type(value)](value)
            for value in map(parameters.__getitem__, self.names)
        ]


@lru_cache(maxsize=256)
def _numbered(sql: str) -> _Numbered:
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f"${numbers.setdefault(match[1], len(numbers) + 1)}"

    text = re.sub(r"%\((\w+)\)s", number, sql).replace("%%", "%")
    return _Numbered(text, tuple(numbers))


def _array(values: list[Any]) -> str:
    return "{" + ",".join(_element(value) for value in values) + "}"


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    text = value if type(value) is str else _WRITERS[type(value)](value)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_WRITERS: Final[dict[type, Callable[[Any], str]]] = {
    bool: str,
    int: str,
    float: repr,
    datetime: datetime.isoformat,
    list: _array,
}
