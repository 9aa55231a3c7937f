"""The tables of budgets, for the catalogue."""

from typing import Final

from helix_store.catalogue import Table
from helix_store.models import Budget, BudgetCounter

TABLES: Final = (
    Table(Budget, record="budget", order=("name",), parent="tenant"),
    Table(
        BudgetCounter,
        record="budget_counter",
        order=("name", "period", "value"),
        parent="tenant",
        not_exported={"holds": "A hold belongs to a lease, which a process holds in the other database."},
        reads=None,
    ),
)
