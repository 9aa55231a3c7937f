"""Tests for the amount spent, which is always the sum of the ledger."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from helix_store.testing.budgets.base import BudgetTests, amounts, now_ms, spent

__all__ = ["BudgetSpendingContract"]

_DAY = 24 * 60 * 60 * 1_000


class BudgetSpendingContract(BudgetTests):
    @pytest.fixture
    def budgeted(self, store: Any, session: Any) -> Any:
        """Return the store, with four budgets that apply to the session."""
        for name, given in {
            "tree": {"value": "session"},
            "user": {"value": "ada"},
            "agent_type": {"value": "writer"},
            "tenant": {},
        }.items():
            store.budgets.set_budget(name, scope=name, limit_usd=10, limit_tokens=1_000, **given)
        return store

    def spent_of(self, budgeted: Any) -> dict[str, Any]:
        return {
            each.name: amounts(budgeted.budgets.status(each.name))[:2]
            for each in budgeted.budgets.list_budgets()
        }

    def test_recorded_usage_counts_once(self, budgeted: Any) -> None:
        entry = spent(usd="0.000000000001", tokens=3, id="entry")
        budgeted.usage.record_entry(entry)
        budgeted.usage.record_entry(entry)
        budgeted.usage.record_entries([entry, spent(usd=None, tokens=4), spent(usd="2", tokens=0)])
        expected = (Decimal("2.000000000001"), 7)
        assert self.spent_of(budgeted) == dict.fromkeys(("agent_type", "tenant", "tree", "user"), expected)

    def test_an_id_that_occurs_twice_in_one_call_counts_once(self, budgeted: Any) -> None:
        first, other = spent(usd="2", tokens=3, id="twice"), spent(usd="4", tokens=5, id="once")
        apart = [spent(usd=None, tokens=0, id=f"between-{number}") for number in range(1_100)]
        budgeted.usage.record_entries([first, other, first, *apart, {**first, "cost_usd": Decimal(32)}])
        assert self.spent_of(budgeted) == dict.fromkeys(("agent_type", "tenant", "tree", "user"), (6, 8))
        # Of copies that differ, the first one is stored.
        assert budgeted.usage.get_rollup("session").cost_usd == 6

    def test_an_entry_counts_for_its_tree_user_agent_type_and_tenant(self, budgeted: Any) -> None:
        budgeted.new_session("child", agent_type="helper", parent_session_id="session")
        budgeted.new_session("other", agent_type="writer", user_id="bob")
        budgeted.usage.record_entries([spent("child", usd="1"), spent("other", usd="2"), spent(usd="4")])
        spent_usd = {name: int(usd) for name, (usd, _) in self.spent_of(budgeted).items()}
        assert spent_usd == {"tree": 5, "user": 4, "agent_type": 6, "tenant": 7}

    def test_an_entry_counts_in_the_period_of_its_timestamp(self, budgeted: Any) -> None:
        budgeted.budgets.set_budget("day", scope="tenant", period="day", limit_usd=10)
        budgeted.usage.record_entries(
            [spent(usd="1"), spent(usd="2", timestamp=now_ms() - 2 * _DAY), spent(usd="4", timestamp=0)]
        )
        assert budgeted.budgets.status("day").spent_usd == 1
        assert budgeted.budgets.status("tenant").spent_usd == 7
        budgeted.budgets.set_budget("later", scope="tenant", period="day", limit_usd=10)
        assert budgeted.budgets.status("later").spent_usd == 1

    def test_deleted_usage_no_longer_counts(self, budgeted: Any) -> None:
        budgeted.new_session("other", agent_type="writer", user_id="ada")
        budgeted.usage.record_entries([spent(usd="1"), spent("other", usd="2")])
        budgeted.usage.delete("session")
        assert {name: int(usd) for name, (usd, _) in self.spent_of(budgeted).items()} == {
            "tree": 0,
            "user": 2,
            "agent_type": 2,
            "tenant": 2,
        }
        budgeted.sessions.delete_session("other")
        assert self.spent_of(budgeted) == dict.fromkeys(("agent_type", "tenant", "tree", "user"), (0, 0))

    def test_usage_that_outlives_its_session_still_counts(self, budgeted: Any) -> None:
        budgeted.new_session("child", agent_type="helper", parent_session_id="session")
        budgeted.usage.record_entries([spent(usd="1"), spent("child", usd="2")])
        before = self.spent_of(budgeted)
        budgeted.sessions.delete_session("session", keep_usage=True)
        assert self.spent_of(budgeted) == before
        budgeted.budgets.set_budget("again", scope="tree", value="session", limit_usd=10)
        assert budgeted.budgets.status("again").spent_usd == 3
        budgeted.usage.delete("child")
        assert budgeted.budgets.status("tree").spent_usd == 1
        budgeted.usage.delete("session")
        assert budgeted.budgets.status("again").spent_usd == 0

    def test_the_largest_amounts_do_not_fail(self, budgeted: Any) -> None:
        most: dict[str, Any] = {"usd": "9223372.036854775807", "tokens": 2**63 - 1}
        for _ in range(3):
            budgeted.usage.record_entry(spent(**most))
        status = budgeted.budgets.status("tenant")
        assert (status.remaining_usd, status.remaining_tokens) == (0, 0)
        assert status.spent_usd >= Decimal("9223372.036854775807")
