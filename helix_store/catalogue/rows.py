"""Operations on the rows of all tables when their session is branched or deleted, or when they expire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from functools import partial
from typing import NamedTuple

from django.db.models import Min, Model

from helix_store.catalogue.cascades import children_with_rows
from helix_store.catalogue.registry import tables
from helix_store.catalogue.table import Branch
from helix_store.engine.database import Database

__all__ = ["Sweep", "branch_rows", "let_go", "sweeps", "tenants_with_rows"]


def branch_rows(branch: Branch) -> None:
    """Create the rows that each table has for a branch in the new session. Call in its transaction."""
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
    """A clean-up of one tenant: ``delete`` deletes the expired rows of the table with this record name."""

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
    """Yield a table's tenants in order, each by one look-up in the unique index, which begins with them."""
    tenant = _first_tenant(model, alias)
    while tenant is not None:
        yield tenant
        tenant = _first_tenant(model, alias, tenant__gt=tenant)


def _first_tenant(model: type[Model], alias: str, **after: str) -> str | None:
    rows = model._base_manager.using(alias).filter(**after)
    first: str | None = Database(alias, "").query(lambda: rows.aggregate(first=Min("tenant"))["first"])
    return first
