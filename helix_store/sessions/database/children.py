"""The tables whose rows go with their session, of this app and of others."""

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
    """Every table whose rows go with their session; read off the models so that none can be forgotten."""
    return cascades_of(Session)


def cascades_of(model: type[Model]) -> list[Any]:
    """The relations to a model whose rows go with its rows."""
    # Hidden ones too: with related_name="+" no attribute of the model leads to the rows.
    fields: list[Any] = model._meta.get_fields(include_hidden=True)
    relations = (field for field in fields if field.auto_created and not field.concrete)
    return [relation for relation in relations if relation.on_delete is CASCADE]


def children_with_rows(db: Database, keys: Collection[int]) -> list[Any]:
    """Those of `children_of_sessions` that have a row of one of these sessions.

    One statement: most tables have none, and each installed app may add some.
    """
    (found,) = db.execute(_children_with_rows(), {"keys": list_parameter(db, list(keys))})
    return [child for child, key in zip(children_of_sessions(), found, strict=True) if key is not None]


@cache
def _children_with_rows() -> Statement:
    """Made when it is first needed: only then every model is known."""

    def form(in_keys: str) -> str:
        # Not EXISTS: for sessions with many rows, PostgreSQL expects to meet one soon in the whole table.
        firsts = (
            f"(SELECT c.{child.field.column} FROM {table(child.related_model)} AS c "
            f"WHERE {in_keys.replace('key_of_session', f'c.{child.field.column}')} "
            f"ORDER BY c.{child.field.column} LIMIT 1)"
            for child in children_of_sessions()
        )
        return f"SELECT {', '.join(firsts)}"

    return Statement(*map(form, is_in_list("key_of_session", "keys", "bigint")))
