"""Budgets with what was spent and is held, added up from the ledger and the locks of one moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connections

from helix_store.budgets import NOTHING, Amounts
from helix_store.core.usage import cost_units
from helix_store.engine.database import Database
from helix_store.engine.expressions import ExactSum
from helix_store.models import Budget, BudgetCounter, Lock, Session, UsageEntry
from helix_store.stores import Store
from tests.faults.spenders import SESSIONS, Told, tokens_of

__all__ = ["Account", "accounts_of", "faults_of"]


class Account(NamedTuple):
    """One counter. ``spent`` and ``held`` are what the store says, ``recorded`` is the sum of the ledger.

    ``held_before`` and ``held_after`` are the holds of locks that lasted before and after the store was
    asked: a term may end in between.
    """

    name: str
    value: str
    limit_usd: int | None
    limit_tokens: int | None
    spent: Amounts
    held: Amounts
    recorded: Amounts
    held_before: Amounts
    held_after: Amounts

    @property
    def excess(self) -> int:
        """By how many tokens the limit is exceeded; negative if something remains."""
        used = self.spent + self.held
        excesses = [
            *([] if self.limit_tokens is None else [used.tokens - self.limit_tokens]),
            *([] if self.limit_usd is None else [tokens_of(used.usd - self.limit_usd)]),
        ]
        return max(excesses)


def faults_of(account: Account) -> Iterator[Told]:
    if account.excess > 0:
        yield Told(f"over its limit: {account}", account.excess)
    if account.spent != account.recorded:
        yield Told(f"not the sum of the ledger: {account}")
    for of in range(2):
        if not account.held_after[of] <= account.held[of] <= account.held_before[of]:
            yield Told(f"not the holds of locks that last: {account}")


def accounts_of(alias: str, tenant: str) -> list[Account]:
    """Return the account of every budget and value, all from one moment."""
    store, db = Store(alias, tenant=tenant), Database(alias, tenant)
    with _one_moment(alias):
        budgets = list(Budget.objects.using(alias).filter(tenant=tenant).order_by("name"))
        rows = BudgetCounter.objects.using(alias).filter(tenant=tenant)
        holds = {(row.name, row.value): row.holds for row in rows}
        recorded = _recorded(alias, tenant)
        terms = _terms(alias, tenant)
        before = db.now()
        statuses = {
            (budget.name, value): store.budgets.status(budget.name, value=value or None)
            for budget in budgets
            for value in _values_of(budget)
        }
        after = db.now()
    return [
        Account(
            budget.name,
            value,
            None if budget.limit_usd is None else cost_units(budget.limit_usd),
            budget.limit_tokens,
            Amounts(cost_units(status.spent_usd), status.spent_tokens),
            Amounts(cost_units(status.held_usd), status.held_tokens),
            recorded.get((budget.scope, value), NOTHING),
            *(_held(holds.get((budget.name, value), {}), terms, at) for at in (before, after)),
        )
        for budget in budgets
        for value in _values_of(budget)
        for status in [statuses[budget.name, value]]
    ]


@contextmanager
def _one_moment(alias: str) -> Iterator[None]:
    is_sqlite = connections[alias].vendor == "sqlite"
    with connections[alias].cursor() as cursor:
        # Not `atomic`, which would wait for the writers of SQLite.
        cursor.execute("BEGIN" if is_sqlite else "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        try:
            yield
        finally:
            cursor.execute("COMMIT")


def _values_of(budget: Budget) -> list[str]:
    if budget.scope == "tenant" or budget.value:
        return [budget.value]
    column = "user_id" if budget.scope == "user" else budget.scope
    return sorted({columns[column] for columns in SESSIONS.values()})


def _recorded(alias: str, tenant: str) -> dict[tuple[str, str], Amounts]:
    """Return the sums of the ledger by scope and value."""
    entries = UsageEntry.objects.using(alias).filter(tenant=tenant)
    sums = entries.values_list("session__root_session_id", "user_id", "session_agent_type").annotate(
        usd=ExactSum("cost_usd"), tokens=ExactSum("total_tokens")
    )
    found: dict[tuple[str, str], Amounts] = {}
    for root, user, agent_type, usd, tokens in sums.order_by():
        for key in (("tree", root), ("user", user), ("agent_type", agent_type), ("tenant", "")):
            found[key] = found.get(key, NOTHING) + Amounts(usd, tokens)
    return found


_Terms = dict[str, tuple[int, datetime | None]]


def _terms(alias: str, tenant: str) -> _Terms:
    """Return the token and the end of each session's lock, by the key of the session."""
    keys = dict(Session.objects.using(alias).filter(tenant=tenant).values_list("session_id", "pk"))
    locks = Lock.objects.using(alias).filter(tenant=tenant)
    return {
        str(keys[name]): (token, end) for name, token, end in locks.values_list("name", "token", "expires_at")
    }


def _held(holds: dict[str, Any], terms: _Terms, at: datetime) -> Amounts:
    held = NOTHING
    for key, (token, *amounts) in holds.items():
        newest, end = terms[key]
        if token == newest and end is not None and end > at:
            held += Amounts(*amounts)
    return held
