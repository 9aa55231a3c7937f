"""Value objects of budgets."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import TypeAlias

from helix_store.core.payloads import Serializable

__all__ = ["Budget", "BudgetPeriod", "BudgetScope", "BudgetStatus", "Dollars"]

Dollars: TypeAlias = Decimal | int | float | str
"""An amount that a caller may pass; for a float, its shortest decimal form counts."""


class BudgetScope(StrEnum):
    """The sessions that a budget caps: of one tree, user or agent type, or of the tenant."""

    TREE = "tree"
    USER = "user"
    AGENT_TYPE = "agent_type"
    TENANT = "tenant"


class BudgetPeriod(StrEnum):
    """The period after which a budget starts again, in UTC; a total never does."""

    TOTAL = "total"
    DAY = "day"
    MONTH = "month"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Serializable):
    """A cap on what sessions spend in a period.

    ``value`` is the session id of a root, a user id or an agent type. Without it, each user or each agent
    type has a budget of this size. A limit that is ``None`` caps nothing.

    Example::

        store.budgets.set_budget("free-plan", scope="user", period="day", limit_usd="0.50")
        for budget in store.budgets.list_budgets():
            print(budget.name, budget.scope, budget.limit_usd)
    """

    name: str
    scope: BudgetScope
    value: str | None
    period: BudgetPeriod
    limit_usd: Decimal | None
    limit_tokens: int | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStatus(Serializable):
    """The amounts spent and held in the current period of a budget, all at the same point in time.

    The remainder of a limit is never negative; it is ``None`` if there is no such limit. A total has no
    ``period_start`` and no ``resets_at``.

    Example::

        store.budgets.set_budget("free-plan", scope="user", period="day", limit_tokens=10_000)
        status = store.budgets.status("free-plan", value="ada")
        print(status.remaining_tokens, "tokens are left until", status.resets_at)
    """

    name: str
    value: str | None
    limit_usd: Decimal | None
    limit_tokens: int | None
    spent_usd: Decimal
    spent_tokens: int
    held_usd: Decimal
    held_tokens: int
    remaining_usd: Decimal | None
    remaining_tokens: int | None
    period_start: datetime | None
    resets_at: datetime | None
