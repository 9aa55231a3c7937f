"""Statements that write or lock single rows, built once per set of columns.

Django's ORM takes several times as long to build the statement of a hot write as the database takes to run
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Final

from django.db.models import JSONField, Model

from helix_store.engine.database import Database
from helix_store.engine.statement import Statement, table

_DOCUMENTS: Final = frozenset({dict, list})
_STATEMENTS: Final = 512
"""The number of statements that are kept, one for each set of columns that is written together."""


def insert_row(db: Database, model: type[Model], columns: Mapping[str, Any]) -> int:
    """Insert one row and return its key. Columns are named as in the table."""
    ((key,),) = db.execute(_insertion(model, tuple(columns)), _stored(columns))
    return int(key)


def insert_rows(
    db: Database, model: type[Model], names: tuple[str, ...], rows: Sequence[Sequence[Any]]
) -> None:
    """Insert rows with the same columns. The caller limits the number of rows in one statement."""
    parameters = [value for row in rows for value in row]
    db.execute(
        _insertions(model, names, len(rows)), dict(zip(_numbered(len(parameters)), parameters, strict=True))
    )


def update_row(db: Database, model: type[Model], key: int, columns: Mapping[str, Any]) -> None:
    """Write columns of the row with this key."""
    db.execute(_update(model, tuple(columns)), {"key": key, **_stored(columns)})


def lock_row(
    db: Database, model: type[Model], names: tuple[str, ...], condition: str, parameters: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Read columns of the one row that meets a condition, locked as by ``select_for_update(no_key=True)``.

    SQLite has no row locks: there the immediate write transaction is the lock.
    """
    rows = db.execute(_locking_read(model, names, condition), parameters)
    return rows[0] if rows else None


def _stored(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns as they are sent, with documents as JSON text."""
    return {
        name: json.dumps(value) if type(value) in _DOCUMENTS else value for name, value in columns.items()
    }


@lru_cache(_STATEMENTS)
def _insertion(model: type[Model], names: tuple[str, ...]) -> Statement:
    head = f"INSERT INTO {table(model)} ({_quoted(names)}) VALUES"
    typed = ", ".join(_typed_placeholder(model, name) for name in names)
    plain = ", ".join(f"%({name})s" for name in names)
    return Statement(postgresql=f"{head} ({typed}) RETURNING id", sqlite=f"{head} ({plain}) RETURNING id")


@lru_cache(_STATEMENTS)
def _insertions(model: type[Model], names: tuple[str, ...], rows: int) -> Statement:
    placeholders = iter(_numbered(rows * len(names)))
    values = ", ".join(f"({', '.join(f'%({next(placeholders)})s' for _ in names)})" for _ in range(rows))
    return Statement(f"INSERT INTO {table(model)} ({_quoted(names)}) VALUES {values}")


@lru_cache(_STATEMENTS)
def _numbered(count: int) -> list[str]:
    """Return numbered parameter names; Django handles named placeholders faster than others."""
    return [f"p{number}" for number in range(count)]


@lru_cache(_STATEMENTS)
def _update(model: type[Model], names: tuple[str, ...]) -> Statement:
    typed = ", ".join(f'"{name}" = {_typed_placeholder(model, name)}' for name in names)
    plain = ", ".join(f'"{name}" = %({name})s' for name in names)
    update = f"UPDATE {table(model)} SET {{}} WHERE id = %(key)s"
    return Statement(postgresql=update.format(typed), sqlite=update.format(plain))


@lru_cache(_STATEMENTS)
def _locking_read(model: type[Model], names: tuple[str, ...], condition: str) -> Statement:
    read = f"SELECT {_quoted(names)} FROM {table(model)} WHERE {condition}"
    return Statement(postgresql=f"{read} FOR NO KEY UPDATE", sqlite=read)


def _typed_placeholder(model: type[Model], name: str) -> str:
    return f"%({name})s::jsonb" if name in _json_columns(model) else f"%({name})s"


@cache
def _json_columns(model: type[Model]) -> frozenset[str]:
    return frozenset(field.attname for field in model._meta.concrete_fields if isinstance(field, JSONField))


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)
