"""The rules that decide for which budgets and periods a ledger entry counts. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from helix_store.core import validation
from helix_store.core.budgets import BudgetPeriod, BudgetScope
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.usage import UsageEntry, cost_units

_LENGTHS: Final = {BudgetPeriod.TOTAL: 0, BudgetPeriod.MONTH: 7, BudgetPeriod.DAY: 10}


class Spender(NamedTuple):
    """The values that determine the budgets of a session: its tree, its user and its agent type."""

    root_id: str | None
    user_id: str | None
    agent_type: str | None


class Spent(NamedTuple):
    """The usage of a spender on a day, written ``2026-11-20``. Dollars are whole units (see `cost_units`)."""

    spender: Spender
    day: str
    usd: int
    tokens: int


class Key(NamedTuple):
    """The scope and the value of budgets that apply, and the value of the counter to use."""

    scope: BudgetScope
    value: str
    counted: str


def keys_of(spender: Spender) -> list[Key]:
    """Return the keys of every budget that may cap a session."""
    keys = [Key(BudgetScope.TENANT, "", "")]
    if spender.root_id:
        keys.append(Key(BudgetScope.TREE, spender.root_id, spender.root_id))
    for scope, value in ((BudgetScope.USER, spender.user_id), (BudgetScope.AGENT_TYPE, spender.agent_type)):
        if value is not None:
            keys += [Key(scope, value, value), Key(scope, "", value)]
    return keys


def spent_on(entry: UsageEntry, spender: Spender) -> Spent:
    """Return the usage of one entry."""
    return Spent(
        spender,
        period_of(BudgetPeriod.DAY, validation.milliseconds_to_datetime(entry.timestamp)),
        0 if entry.cost_usd is None else cost_units(entry.cost_usd),
        0 if entry.tokens is None else entry.tokens.total,
    )


def amounts_by_key(spent: Iterable[Spent]) -> list[list[str | int]]:
    """Return the sums for each key and day as (scope, value, counted value, day, dollars, tokens)."""
    sums: dict[tuple[Key, str], tuple[int, int]] = {}
    for each in spent:
        for key in keys_of(each.spender):
            usd, tokens = sums.get((key, each.day), (0, 0))
            sums[key, each.day] = usd + each.usd, tokens + each.tokens
    return [
        [key.scope.value, key.value, key.counted, day, bounded(usd), bounded(tokens)]
        for (key, day), (usd, tokens) in sums.items()
        if usd or tokens
    ]


def bounded(amount: int) -> int:
    """Return the amount, limited to what a column can hold."""
    return max(-MAX_BIGINT, min(MAX_BIGINT, amount))


def period_of(period: BudgetPeriod, at: datetime) -> str:
    """Return the period of a moment in the form that counters use: a day, a month, or empty for a total."""
    return at.astimezone(UTC).date().isoformat()[: _LENGTHS[period]]


def start_of(period: BudgetPeriod, at: datetime) -> tuple[datetime, datetime] | None:
    """Return the start and the end of the period that contains a moment, or ``None`` for a total."""
    if period is BudgetPeriod.TOTAL:
        return None
    start = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period is BudgetPeriod.DAY:
        return start, start + timedelta(days=1)
    start = start.replace(day=1)
    return start, (start + timedelta(days=31)).replace(day=1)
