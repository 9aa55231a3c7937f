"""Changes to counters, each in the transaction that changes the ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from django.db.models import QuerySet
from django.db.models.sql import DeleteQuery

from helix_store.counters.rules import Spender, Spent, amounts_by_key
from helix_store.counters.sql import CHANGE_COUNTERS, deletion, has_budgets, sums_of_entries
from helix_store.engine.database import Database
from helix_store.engine.expressions import summed
from helix_store.engine.statement import Statement
from helix_store.models import UsageEntry

R = TypeVar("R")

_HAS_BUDGETS: Final = Statement(f"SELECT {has_budgets('%(tenant)s')}")


def change_counters(db: Database, spent: Iterable[Spent]) -> None:
    """Add usage to the counters of all budgets to which it applies. Call this in a transaction."""
    if given := amounts_by_key(spent):
        db.execute(CHANGE_COUNTERS, {"tenant": db.tenant, "given": json.dumps(given, ensure_ascii=False)})


def _subtracted(spent: Iterable[Spent]) -> list[Spent]:
    return [each._replace(usd=-each.usd, tokens=-each.tokens) for each in spent]


def delete_usage(db: Database, entries: QuerySet[UsageEntry]) -> int:
    """Delete entries of a tenant, subtract them from its counters, and return their number.

    Call this in a transaction.
    """
    if db.is_postgresql:
        text, parameters = entries.query.chain(DeleteQuery).get_compiler(using=db.alias).as_sql()
        rows = db.execute(deletion(text), parameters)
        spent = _spent_of(row for row in rows if row[0])
        deleted: int = sum(row[1] for row in rows)
    else:
        # Nobody else records entries in the meantime; such entries would be deleted without being counted.
        spent = _spent_by(db, entries) if db.execute(_HAS_BUDGETS, {"tenant": db.tenant})[0][0] else []
        deleted, _ = entries.delete()
    change_counters(db, _subtracted(spent))
    return deleted


def add_usage(db: Database, keys: Sequence[int]) -> None:
    """Count entries that were just inserted. Call this in the transaction that inserted them."""
    if db.execute(_HAS_BUDGETS, {"tenant": db.tenant})[0][0]:
        change_counters(db, _spent_by(db, UsageEntry.objects.using(db.alias).filter(pk__in=keys)))


def change_usage(db: Database, keys: Sequence[int], change: Callable[[], R]) -> R:
    """Change entries of a tenant in a way that may move them to other scopes. Call this in a transaction."""
    entries = UsageEntry.objects.using(db.alias).filter(pk__in=keys)
    if db.has_row_locks:
        list(entries.select_for_update().order_by("pk").values_list("pk"))
    before = _spent_by(db, entries)
    changed = change()
    change_counters(db, [*_subtracted(before), *_spent_by(db, entries)])
    return changed


def _spent_by(db: Database, entries: QuerySet[UsageEntry]) -> list[Spent]:
    """Return the sums of entries by spender and day."""
    columns = [field.attname for field in UsageEntry._meta.concrete_fields]
    text, parameters = entries.order_by().values(*columns).query.get_compiler(using=db.alias).as_sql()
    statement = Statement(sums_of_entries(f"({text})", is_postgresql=db.is_postgresql))
    return _spent_of(db.execute(statement, parameters))


def _spent_of(rows: Iterable[tuple[Any, ...]]) -> list[Spent]:
    return [
        Spent(Spender(root_id, user_id, agent_type), str(day), summed(usd), summed(tokens))
        for _, _, user_id, agent_type, root_id, day, usd, tokens in rows
    ]
