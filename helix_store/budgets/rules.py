"""The rules of budgets. Pure Python; dollars are whole units (see `cost_units`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

from helix_store.core import validation
from helix_store.core.budgets import Budget, BudgetPeriod, BudgetScope, BudgetStatus
from helix_store.core.usage import cost_from_units, cost_units
from helix_store.counters.rules import start_of
from helix_store.exceptions import BudgetExceeded, InvalidPayload, NotFoundError, shown_id
from helix_store.usage.entries import checked_cost

_EACH = frozenset({BudgetScope.USER, BudgetScope.AGENT_TYPE})
"""The scopes whose budgets may have no value: each user or agent type then has its own counter."""


class Amounts(NamedTuple):
    usd: int = 0
    tokens: int = 0

    def __add__(self, other: Any) -> Amounts:
        return Amounts(self.usd + other.usd, self.tokens + other.tokens)


NOTHING = Amounts()


@dataclass(frozen=True, slots=True)
class Definition:
    """A checked budget. ``value`` is empty for a tenant, and for each user or agent type."""

    name: str
    scope: BudgetScope
    value: str
    period: BudgetPeriod
    limit_usd: int | None
    limit_tokens: int | None

    @property
    def is_for_each(self) -> bool:
        return self.scope in _EACH and not self.value

    def counted(self, value: str | None) -> str:
        """Return the value whose counter a caller requests. Raises `InvalidPayload`."""
        if self.is_for_each:
            if value is None:
                raise InvalidPayload(path="value", reason=f"the budget is for each {self.scope}; name one")
            return value
        if value not in (None, self.value or None):
            raise InvalidPayload(path="value", reason="the budget has another value")
        return self.value

    def as_value(self, *, created_at: datetime, updated_at: datetime) -> Budget:
        return Budget(
            name=self.name,
            scope=self.scope,
            value=self.value or None,
            period=self.period,
            limit_usd=_dollars(self.limit_usd),
            limit_tokens=self.limit_tokens,
            created_at=created_at,
            updated_at=updated_at,
        )


class Standing(NamedTuple):
    """A budget with one of its counters at one moment, and the total that other sessions hold."""

    definition: Definition
    value: str
    spent: Amounts
    held: Amounts
    at: datetime


class Hold(NamedTuple):
    """The hold of a step; only the back end interprets ``owner`` and ``counters``."""

    owner: Any
    fencing_token: int
    counters: Sequence[Any]


def checked_definition(
    name: Any, *, scope: Any, value: Any, period: Any, limit_usd: Any, limit_tokens: Any
) -> Definition:
    """Return the definition of a budget. Raises `InvalidPayload`."""
    scope = validation.enum(BudgetScope, scope, "scope")
    check = validation.user_id if scope is BudgetScope.USER else validation.optional_identifier
    value = check(value, "value")
    if scope is BudgetScope.TENANT and value is not None:
        raise InvalidPayload(path="value", reason="a budget of the tenant has no value")
    if scope is BudgetScope.TREE and value is None:
        raise InvalidPayload(path="value", reason="a budget of a tree needs the session id of its root")
    limits = checked_amounts(limit_usd, limit_tokens, "limit")
    if limits == (None, None):
        raise InvalidPayload(path="limit_usd", reason="a budget needs a limit in dollars, tokens or both")
    return Definition(
        name=validation.identifier(name, "name"),
        scope=scope,
        value=value or "",
        period=validation.enum(BudgetPeriod, period, "period"),
        limit_usd=limits[0],
        limit_tokens=limits[1],
    )


def checked_amounts(usd: Any, tokens: Any, name: str) -> tuple[int | None, int | None]:
    """Return dollars as whole units, and tokens; either may be ``None``. Raises `InvalidPayload`."""
    cost = checked_cost(usd, f"{name}_usd")
    count = validation.optional(validation.whole_number)(tokens, f"{name}_tokens")
    return None if cost is None else cost_units(cost), count


def checked_estimate(usd: Any, tokens: Any, default: Amounts) -> Amounts:
    """Return an estimate, with the default for each amount of ``None``. Raises `InvalidPayload`."""
    given = checked_amounts(usd, tokens, "estimate")
    return Amounts(*(amount if each is None else each for each, amount in zip(given, default, strict=True)))


def require_allowed(standing: Standing, estimate: Amounts) -> None:
    """Raise `BudgetExceeded` if a limit has been reached, or if the estimate does not fit."""
    of, spent, held = standing.definition, standing.spent, standing.held
    if of.limit_usd is not None and _is_exceeded(of.limit_usd, spent.usd + held.usd, estimate.usd):
        amounts = map(cost_from_units, (of.limit_usd, spent.usd, held.usd))
        raise BudgetExceeded(of.name, *amounts)
    if of.limit_tokens is not None and _is_exceeded(
        of.limit_tokens, spent.tokens + held.tokens, estimate.tokens
    ):
        raise BudgetExceeded(of.name, of.limit_tokens, spent.tokens, held.tokens)


def _is_exceeded(limit: int, used: int, estimate: int) -> bool:
    return used >= limit or used + estimate > limit


def status_of(standing: Standing) -> BudgetStatus:
    of, spent, held = standing.definition, standing.spent, standing.held
    term = start_of(of.period, standing.at)
    return BudgetStatus(
        name=of.name,
        value=standing.value or None,
        limit_usd=_dollars(of.limit_usd),
        limit_tokens=of.limit_tokens,
        spent_usd=cost_from_units(spent.usd),
        spent_tokens=spent.tokens,
        held_usd=cost_from_units(held.usd),
        held_tokens=held.tokens,
        remaining_usd=_dollars(_remaining(of.limit_usd, spent.usd + held.usd)),
        remaining_tokens=_remaining(of.limit_tokens, spent.tokens + held.tokens),
        period_start=term and term[0],
        resets_at=term and term[1],
    )


def _remaining(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)


def _dollars(units: int | None) -> Decimal | None:
    return None if units is None else cost_from_units(units)


def unknown_budget(name: str) -> NotFoundError:
    return NotFoundError(f"There is no budget {shown_id(name)}.", name=name)
