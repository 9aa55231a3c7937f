"""The contract suite of a budget store: a class for each part, and `BudgetContract` for all."""

from helix_store.testing.budgets.arguments import BudgetArgumentContract
from helix_store.testing.budgets.base import BudgetTests
from helix_store.testing.budgets.holding import BudgetTurnContract
from helix_store.testing.budgets.setting import BudgetSettingContract
from helix_store.testing.budgets.spending import BudgetSpendingContract

__all__ = [
    "BudgetArgumentContract",
    "BudgetContract",
    "BudgetSettingContract",
    "BudgetSpendingContract",
    "BudgetTests",
    "BudgetTurnContract",
]


class BudgetContract(
    BudgetSettingContract, BudgetSpendingContract, BudgetTurnContract, BudgetArgumentContract
):
    """All tests of a budget store."""
