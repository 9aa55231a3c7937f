"""Budgets with the amounts spent and held, read in a constant number of statements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal

from helix_store.budgets import sql
from helix_store.budgets.database import DatabaseBudgets, standing_of
from helix_store.budgets.rules import Standing, status_of
from helix_store.core.budgets import BudgetPeriod, BudgetScope, BudgetStatus
from helix_store.core.usage import rounded_cost
from helix_store.counters.rules import Spender, keys_of
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter, tenant_parameter
from helix_store.exceptions import IntegrityFault
from helix_store.models import Budget

MOST_COUNTERS: Final = sql.MOST_COUNTERS
_COLUMNS: Final = 12
"""The columns of `standing_of`, followed by those of a statement itself."""
_STOPPED: Final = "budget:"
_BUDGETS_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReport:
    """One limit of a budget, in dollars or in tokens."""

    unit: Literal["usd", "tokens"]
    limit: Decimal | int
    spent: Decimal | int
    held: Decimal | int
    remaining: Decimal | int

    @property
    def is_reached(self) -> bool:
        return not self.remaining

    def amount(self, value: Decimal | int) -> str:
        """Return an amount as text, without the name of the unit."""
        return f"${rounded_cost(value)}" if isinstance(value, Decimal) else f"{value:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReport:
    """A budget with one of its counters. For a budget per value, the counter may be the highest one.

    ``value_count`` is then the number of values with a current counter, at most one more than
    `MOST_COUNTERS`, and ``status`` is the highest of at most `MOST_COUNTERS` counters.
    """

    tenant: str
    scope: BudgetScope
    period: BudgetPeriod
    is_for_each: bool
    value_count: int | None
    status: BudgetStatus

    @property
    def limits(self) -> list[LimitReport]:
        status = self.status
        amounts: dict[Literal["usd", "tokens"], Sequence[Any]] = {
            "usd": (status.limit_usd, status.spent_usd, status.held_usd, status.remaining_usd),
            "tokens": (status.limit_tokens, status.spent_tokens, status.held_tokens, status.remaining_tokens),
        }
        return [
            LimitReport(unit=unit, limit=limit, spent=spent, held=held, remaining=remaining)
            for unit, (limit, spent, held, remaining) in amounts.items()
            if limit is not None and remaining is not None
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with exact dollars as text."""
        return {
            "tenant": self.tenant,
            "scope": self.scope.value,
            "period": self.period.value,
            "is_for_each": self.is_for_each,
            "value_count": self.value_count,
            **self.status.to_dict(),
        }


def reports_of_session(db: Database, spender: Spender) -> list[BudgetReport]:
    """Return every budget that applies to a session of the database's tenant, by name. One statement."""
    standings = DatabaseBudgets(db).standings(keys_of(spender))
    return [_report(db.tenant, standing) for standing in standings]


def reports_of_budgets(rows: Sequence[Budget], *, using: str) -> dict[int, BudgetReport]:
    """Return the report of each budget by its key, except for budgets that cannot be read. One statement."""
    if not rows:
        return {}
    db, tenants = Database(using, ""), {row.pk: row.tenant for row in rows}
    reports = {}
    for row in db.read(sql.STANDINGS_OF_ROWS, {"keys": list_parameter(db, list(tenants))}):
        key, value_count = row[_COLUMNS:]
        with suppress(IntegrityFault):
            reports[key] = _report(tenants[key], standing_of(row)[0], value_count)
    return reports


def all_reports(*, using: str, tenant: str | None) -> Iterator[BudgetReport]:
    """Yield the reports of all budgets, or those of one tenant, by tenant and name.

    One statement for 500 budgets, after one that reads them all. Budgets that cannot be read are left out.
    """
    rows = Budget.objects.using(using).order_by("tenant", "name")
    budgets = list(rows if tenant is None else rows.filter(tenant=tenant_parameter(tenant)))
    for start in range(0, len(budgets), _BUDGETS_AT_ONCE):
        batch = budgets[start : start + _BUDGETS_AT_ONCE]
        reports = reports_of_budgets(batch, using=using)
        yield from (reports[budget.pk] for budget in batch if budget.pk in reports)


def reports_of_values(budget: Budget, *, using: str, first: int, limit: int) -> list[BudgetReport]:
    """Return a page of the values of a budget that applies to each value, highest first. One statement.

    An index finds the values of the current period, which are then sorted, because each step would have to
    write to an index on the amounts spent.
    """
    parameters = {"key": budget.pk, "limit": limit, "offset": first}
    rows = Database(using, "").read(sql.STANDINGS_OF_VALUES, parameters)
    return [_report(budget.tenant, standing_of(row)[0]) for row in rows]


def budget_that_stopped(completion_reason: str | None) -> str | None:
    """Return the name of the budget that ended a run, from the run's completion reason."""
    if completion_reason is None or not completion_reason.startswith(_STOPPED):
        return None
    return completion_reason.removeprefix(_STOPPED)


def _report(tenant: str, standing: Standing, value_count: int | None = None) -> BudgetReport:
    return BudgetReport(
        tenant=tenant,
        scope=standing.definition.scope,
        period=standing.definition.period,
        is_for_each=standing.definition.is_for_each,
        value_count=value_count,
        status=status_of(standing),
    )
