"""Operations on the rows of all tables when their session is branched or deleted, or when the rows expire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from functools import cache, partial
from typing import Any, NamedTuple

from django.db.models import CASCADE, Model

from helix_store.catalogue.registry import tables
from helix_store.catalogue.table import Branch
from helix_store.engine.database import Database
from helix_store.engine.expressions import for_keys, list_parameter
from helix_store.engine.paging import distinct_values
from helix_store.engine.statement import Statement
from helix_store.engine.statement import table as table_name
from helix_store.models import Session


def branch_rows(branch: Branch) -> None:
    """Create the rows that each table needs in the new session for a branch. Call this in its transaction."""
    filled = {child.related_model for child in children_with_rows(branch.db, [branch.source])}
    for table in tables("session"):
        if table.branch is not None and table.model in filled:
            table.branch(table.model, branch)


def let_go(db: Database, keys: Collection[int], models: Collection[type[Model]]) -> Counter[type[Model]]:
    """Call the tables' ``before_delete`` for rows of these sessions in the tables of ``models``.

    Return how many rows these calls deleted. Call in the transaction of the deletion.
    """
    deleted: Counter[type[Model]] = Counter()
    for table in tables("session"):
        if table.before_delete is not None and table.model in models:
            deleted.update(table.before_delete(db, keys) or {})
    return deleted


class Sweep(NamedTuple):
    """A cleanup of one tenant: ``delete`` deletes the expired rows in the table of ``record``."""

    record: str
    tenant: str
    delete: Callable[[datetime], int]


def sweeps(alias: str, tenant: str | None) -> Iterator[Sweep]:
    """Yield the sweeps of one tenant, or of all tenants that have rows."""
    for table in tables("tenant"):
        if table.sweep is not None:
            for each in tenants_with_rows(table.model, alias) if tenant is None else [tenant]:
                yield Sweep(table.record, each, partial(table.sweep, Database(alias, each)))


def tenants_with_rows(model: type[Model], alias: str) -> Iterator[str]:
    """Yield a table's tenants in order, each by one lookup in the unique index that begins with them."""
    rows = model._base_manager.using(alias)
    return (tenant for (tenant,) in distinct_values(Database(alias, ""), rows, "tenant"))


# --- Cascades ----------------------------------------------------------------------------------------


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
    """The statement is built when it is first needed, because only then are all models known."""

    # EXISTS would be slow: for sessions with many rows, PostgreSQL expects an early hit in a table scan.
    firsts = (
        f"(SELECT {column} FROM {model} WHERE {column} IN %(keys)s ORDER BY {column} LIMIT 1)"
        for column, model in (
            (child.field.column, table_name(child.related_model)) for child in children_of_sessions()
        )
    )
    return for_keys(f"SELECT {', '.join(firsts)}")
