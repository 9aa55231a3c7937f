"""The rows that other apps keep with a session, when it is branched or deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from django.db.models import Model

from helix_store.app_tables import Branch, registered_tables
from helix_store.engine.database import Database
from helix_store.sessions.database.children import children_with_rows

__all__ = ["branch_rows", "foreseen", "let_go"]


def branch_rows(branch: Branch) -> None:
    """Give the new session the rows that each table has for a branch. Call in its transaction."""
    tables = [table for table in registered_tables("session") if table.branch is not None]
    filled = children_with_rows(branch.db, [branch.source]) if tables else []
    models = {child.related_model for child in filled}
    for table in tables:
        if table.branch is not None and table.model in models:
            table.branch(table.model, branch)


def let_go(db: Database, keys: Collection[int], models: Collection[type[Model]]) -> Counter[type[Model]]:
    """Call what tables want called before rows of these sessions in the tables of ``models`` are deleted.

    Returns how many rows it deleted. Call in the transaction of the deletion.
    """
    deleted: Counter[type[Model]] = Counter()
    for table in registered_tables("session"):
        if table.before_delete is not None and table.model in models:
            deleted.update(table.before_delete(db, keys) or {})
    return deleted


def foreseen(db: Database, keys: Collection[int]) -> Counter[type[Model]]:
    """How many rows `let_go` would delete if these sessions were deleted together. Call in a query."""
    counted: Counter[type[Model]] = Counter()
    tables = [table for table in registered_tables("session") if table.foresee is not None]
    filled = children_with_rows(db, keys) if tables and keys else []
    models = {child.related_model for child in filled}
    for table in tables:
        if table.foresee is not None and table.model in models:
            counted.update(table.foresee(db, keys) or {})
    return counted
