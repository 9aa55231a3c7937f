"""The tables whose rows are deleted with their session, in this app and in others."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from django.db.models import CASCADE, Model

from helix_store.engine.database import Database
from helix_store.engine.expressions import is_in_list, list_parameter
from helix_store.engine.statement import Statement, table
from helix_store.models import Session

__all__ = ["cascades_of", "children_of_sessions", "children_with_rows"]


def children_of_sessions() -> list[Any]:
    """Return every table whose rows are deleted with their session, by searching all models."""
    return cascades_of(Session)


def cascades_of(model: type[Model]) -> list[Any]:
    """Return the relations to a model whose rows are deleted with its rows."""
    # Hidden fields also count: with related_name="+", no attribute of the model leads to the rows.
    fields: list[Any] = model._meta.get_fields(include_hidden=True)
    relations = (field for field in fields if field.auto_created and not field.concrete)
    return [relation for relation in relations if relation.on_delete is CASCADE]


def children_with_rows(db: Database, keys: Collection[int]) -> list[Any]:
    """Return the tables of `children_of_sessions` that have a row of one of these sessions.

    This takes one statement: most tables have no such rows, and each installed app may add tables.
    """
    (found,) = db.execute(_children_with_rows(), {"keys": list_parameter(db, list(keys))})
    return [child for child, key in zip(children_of_sessions(), found, strict=True) if key is not None]


@cache
def _children_with_rows() -> Statement:
    """Build the statement when it is first needed: only then are all models known."""

    def form(in_keys: str) -> str:
        # EXISTS would be slow: for sessions with many rows, PostgreSQL expects an early hit in a table scan.
        firsts = (
            f"(SELECT c.{child.field.column} FROM {table(child.related_model)} AS c "
            f"WHERE {in_keys.replace('key_of_session', f'c.{child.field.column}')} "
            f"ORDER BY c.{child.field.column} LIMIT 1)"
            for child in children_of_sessions()
        )
        return f"SELECT {', '.join(firsts)}"

    return Statement(*map(form, is_in_list("key_of_session", "keys", "bigint")))
