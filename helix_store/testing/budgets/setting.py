"""Tests for setting, reading and deleting budgets."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from helix_store.core.usage import BudgetPeriod, BudgetScope
from helix_store.exceptions import InvalidPayload, NotFoundError
from helix_store.testing.budgets.base import BudgetTests, amounts, spent

__all__ = ["BudgetSettingContract"]


class BudgetSettingContract(BudgetTests):
    def test_a_budget_is_what_was_set(self, store: Any) -> None:
        budget = store.budgets.set_budget(
            "daily", scope="user", value="ada", period="day", limit_usd=Decimal("1.50"), limit_tokens=7
        )
        assert (budget.name, budget.scope, budget.value) == ("daily", BudgetScope.USER, "ada")
        assert (budget.period, budget.limit_usd, budget.limit_tokens) == (BudgetPeriod.DAY, Decimal("1.5"), 7)
        assert store.budgets.get_budget("daily") == budget
        assert store.budgets.list_budgets() == [budget]

    def test_unknown_budgets(self, store: Any) -> None:
        assert store.budgets.get_budget("nothing") is None
        assert store.budgets.list_budgets() == []
        assert store.budgets.delete_budget("nothing") is False
        with pytest.raises(NotFoundError):
            store.budgets.status("nothing")

    def test_setting_replaces_all_of_a_budget(self, store: Any, session: Any) -> None:
        first = store.budgets.set_budget("cap", scope="tree", value="session", limit_usd=1)
        store.usage.record_entry(spent(tokens=3))
        second = store.budgets.set_budget("cap", scope="tenant", period="month", limit_tokens=5)
        assert second.created_at == first.created_at
        assert (second.scope, second.value, second.limit_usd, second.limit_tokens) == (
            "tenant",
            None,
            None,
            5,
        )
        assert store.budgets.list_budgets() == [second]
        status = store.budgets.status("cap")
        assert (status.spent_tokens, status.remaining_tokens, status.remaining_usd) == (3, 2, None)

    def test_what_was_spent_before_counts(self, store: Any, session: Any) -> None:
        store.usage.record_entries([spent(usd="0.25"), spent(usd="0.5")])
        for name, given in {
            "tree": {"value": "session"},
            "user": {"value": "ada"},
            "agent_type": {"value": "writer"},
            "tenant": {},
        }.items():
            for period in ("total", "day", "month"):
                store.budgets.set_budget(name, scope=name, period=period, limit_usd=2, **given)
                assert amounts(store.budgets.status(name)) == (Decimal("0.75"), 20, 0, 0)

    def test_a_budget_for_each_value(self, store: Any, session: Any) -> None:
        store.new_session("bob's", agent_type="reader", user_id="bob")
        store.usage.record_entries([spent(usd="1"), spent("bob's", usd="2")])
        store.budgets.set_budget("users", scope="user", limit_usd=5)
        store.budgets.set_budget("agents", scope="agent_type", limit_usd=5)
        store.usage.record_entry(spent("bob's", usd="1"))
        assert store.budgets.status("users", value="ada").spent_usd == 1
        assert store.budgets.status("users", value="bob").remaining_usd == 2
        assert store.budgets.status("users", value="nobody").spent_usd == 0
        assert store.budgets.status("agents", value="reader").spent_usd == 3
        with pytest.raises(InvalidPayload):
            store.budgets.status("users")

    def test_the_status_of_a_period(self, store: Any) -> None:
        store.budgets.set_budget("day", scope="tenant", period="day", limit_tokens=1)
        store.budgets.set_budget("month", scope="tenant", period="month", limit_tokens=1)
        store.budgets.set_budget("total", scope="tenant", limit_tokens=1)
        day, month = store.budgets.status("day"), store.budgets.status("month")
        assert (day.resets_at - day.period_start).total_seconds() == 24 * 60 * 60
        assert (month.period_start.day, month.resets_at.day) == (1, 1)
        assert month.period_start <= day.period_start < day.resets_at <= month.resets_at
        assert store.budgets.status("total").period_start is None
        assert store.budgets.status("total").resets_at is None

    def test_what_remains_is_never_negative(self, store: Any, session: Any) -> None:
        store.budgets.set_budget("cap", scope="user", value="ada", limit_usd="0.5", limit_tokens=100)
        store.usage.record_entry(spent(usd="2"))
        status = store.budgets.status("cap")
        assert (status.remaining_usd, status.remaining_tokens) == (0, 90)

    def test_a_status_as_a_dict_has_plain_dollars(self, store: Any, session: Any) -> None:
        store.budgets.set_budget("cap", scope="user", value="ada", limit_usd="1.50")
        store.usage.record_entry(spent(usd="0.25"))
        status = store.budgets.status("cap").to_dict()
        assert [status[f"{name}_usd"] for name in ("limit", "spent", "held", "remaining")] == [
            "1.5",
            "0.25",
            "0",
            "1.25",
        ]

    def test_a_deleted_budget_is_forgotten(self, store: Any, session: Any) -> None:
        store.budgets.set_budget("cap", scope="tenant", limit_usd=0)
        assert store.budgets.delete_budget("cap") is True
        assert store.budgets.get_budget("cap") is None
        with session.turn() as turn, turn.step() as step:
            step.end_turn()
        assert session.load().step_count == 1

    def test_tenants_do_not_share_budgets(self, store: Any, session: Any) -> None:
        store.budgets.set_budget("cap", scope="tenant", limit_usd=5)
        other = self.make_store(tenant="other")
        assert other.budgets.list_budgets() == []
        other.new_session("session", agent_type="writer", user_id="ada")
        other.usage.record_entry(spent(usd="3"))
        assert store.budgets.status("cap").spent_usd == 0
        assert other.budgets.delete_budget("cap") is False

    async def test_async_twins(self, store: Any) -> None:
        budget = await store.budgets.aset_budget("cap", scope="tenant", limit_usd=5)
        assert await store.budgets.aget_budget("cap") == budget
        assert await store.budgets.alist_budgets() == [budget]
        assert (await store.budgets.astatus("cap")).remaining_usd == 5
        assert await store.budgets.adelete_budget("cap")
