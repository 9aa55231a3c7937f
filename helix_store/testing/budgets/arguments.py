"""Tests that wrong arguments are refused before storage is used."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from helix_store.exceptions import InvalidPayload
from helix_store.testing.budgets.base import BudgetTests
from helix_store.testing.cells import table

__all__ = ["BudgetArgumentContract"]

_WRONG: dict[str, dict[str, Any]] = {
    "no limit": {"scope": "tenant"},
    "a negative limit": {"scope": "tenant", "limit_usd": Decimal("-0.01")},
    "no number": {"scope": "tenant", "limit_usd": Decimal("NaN")},
    "an infinite limit": {"scope": "tenant", "limit_usd": Decimal("Infinity")},
    "a bool": {"scope": "tenant", "limit_usd": True},
    "negative tokens": {"scope": "tenant", "limit_tokens": -1},
    "a fraction of tokens": {"scope": "tenant", "limit_tokens": 1.5},
    "too many tokens": {"scope": "tenant", "limit_tokens": 2**63},
    "an unknown scope": {"scope": "team", "limit_usd": 1},
    "an unknown period": {"scope": "tenant", "period": "week", "limit_usd": 1},
    "a tenant with a value": {"scope": "tenant", "value": "x", "limit_usd": 1},
    "a tree without a root": {"scope": "tree", "limit_usd": 1},
    "an empty value": {"scope": "user", "value": "", "limit_usd": 1},
    "a control character": {"scope": "agent_type", "value": "a\x00", "limit_usd": 1},
}
_NAMES: tuple[Any, ...] = ("", "x" * 256, "a\x00", None, 1)


class BudgetArgumentContract(BudgetTests):
    @table("case", _WRONG, shared=True)
    def test_a_wrong_budget(self, store: Any, case: str) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.budgets.set_budget("cap", **_WRONG[case])

    @table("name", _NAMES, shared=True)
    def test_a_wrong_name(self, store: Any, name: Any) -> None:
        budgets = store.budgets
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            budgets.set_budget(name, scope="tenant", limit_usd=1)
        for call in (budgets.get_budget, budgets.delete_budget, budgets.status):
            with self.storage_untouched(), pytest.raises(InvalidPayload):
                call(name)

    def test_a_wrong_value_of_a_status(self, store: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.budgets.status("cap", value="")
        store.budgets.set_budget("cap", scope="user", value="ada", limit_usd=1)
        with pytest.raises(InvalidPayload):
            store.budgets.status("cap", value="bob")

    def test_a_user_may_be_a_number(self, store: Any) -> None:
        store.budgets.set_budget("cap", scope="user", value=7, limit_usd=1)
        assert store.budgets.get_budget("cap").value == "7"
        assert store.budgets.status("cap", value=7).value == "7"
