"""Budgets in memory. There are no stored counters: each check adds up the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from helix_store.budgets.rules import (
    NOTHING,
    Amounts,
    Definition,
    Hold,
    Standing,
    require_allowed,
    unknown_budget,
)
from helix_store.core import moments
from helix_store.core.budgets import Budget
from helix_store.core.guards import Guard
from helix_store.counters.rules import Key, keys_of, period_of, spent_on
from helix_store.engine.memory import MemoryTable
from helix_store.locks.memory import LockTable
from helix_store.sessions.memory.scope import TenantScope
from helix_store.usage.memory import UsageLedger

_Counter = tuple[str, str, str]
"""The name of a budget, the value that is counted, and the period."""


class StoredBudget(NamedTuple):
    definition: Definition
    value: Budget


@dataclass(slots=True)
class BudgetTable(MemoryTable):
    """The budgets of one tenant by name, and the fencing tokens and amounts that sessions hold."""

    budgets: dict[str, StoredBudget] = field(default_factory=dict)
    holds: dict[_Counter, dict[str, tuple[int, Amounts]]] = field(default_factory=dict)

    def session_is_gone(self, session_id: str, *, keep_usage: bool) -> None:
        for held in self.holds.values():
            held.pop(session_id, None)


class MemoryBudgets:
    """The in-memory back end; see `DatabaseBudgets` for its operations."""

    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope
        self._table = scope.table(BudgetTable)
        self._ledger = scope.table(UsageLedger)
        self._locks = scope.table(LockTable)

    def set(self, definition: Definition) -> Budget:
        at = moments.now()
        with self._scope.lock:
            earlier = self._table.budgets.get(definition.name)
            created_at = at if earlier is None else earlier.value.created_at
            value = definition.as_value(created_at=created_at, updated_at=at)
            self._table.budgets[definition.name] = StoredBudget(definition, value)
        return value

    def get(self, name: str) -> Budget | None:
        stored = self._table.budgets.get(name)
        return None if stored is None else stored.value

    def select(self) -> list[Budget]:
        with self._scope.lock:
            return [stored.value for _, stored in sorted(self._table.budgets.items())]

    def delete(self, name: str) -> bool:
        with self._scope.lock:
            return self._table.budgets.pop(name, None) is not None

    def standing(self, name: str, value: str | None) -> Standing:
        with self._scope.lock:
            stored = self._table.budgets.get(name)
            if stored is None:
                raise unknown_budget(name)
            return self._standing(stored.definition, stored.definition.counted(value), None)

    def standings(self, keys: Sequence[Key], own: str | None = None) -> list[Standing]:
        with self._scope.lock:
            return [
                self._standing(stored.definition, key.counted, own)
                for _, stored in sorted(self._table.budgets.items())
                for key in keys
                if (key.scope, key.value) == (stored.definition.scope, stored.definition.value)
            ]

    def hold(
        self, keys: Sequence[Key], session_id: str, fencing_token: int, estimate: Amounts
    ) -> Hold | None:
        with self._scope.lock:
            found = self.standings(keys, session_id)
            for standing in found:
                require_allowed(standing, estimate)
            if not any(estimate):
                return None
            self._scope.check_guard(self._scope.require(session_id), Guard(fencing_token=fencing_token))
            counters = [_counter(standing) for standing in found]
            for counter in counters:
                self._table.holds.setdefault(counter, {})[session_id] = fencing_token, estimate
        return Hold(session_id, fencing_token, counters)

    def settle(self, hold: Hold, record: Callable[[], object] | None) -> None:
        with self._scope.lock:
            if record is not None:
                record()
            for counter in hold.counters:
                held = self._table.holds.get(counter, {})
                if hold.owner in held and held[hold.owner][0] == hold.fencing_token:
                    del held[hold.owner]

    def _standing(self, definition: Definition, counted: str, own: str | None) -> Standing:
        standing = Standing(definition, counted, NOTHING, NOTHING, moments.now())
        key = Key(definition.scope, definition.value, counted)
        period = period_of(definition.period, standing.at)
        entries = (spent_on(stored.entry, stored.spender) for stored in self._ledger.all())
        spent = (
            Amounts(each.usd, each.tokens)
            for each in entries
            if key in keys_of(each.spender) and each.day.startswith(period)
        )
        holds = self._table.holds.get(_counter(standing), {}).items()
        held = (
            amounts
            for session_id, (token, amounts) in holds
            if session_id != own and self._is_live(session_id, token)
        )
        return standing._replace(spent=sum(spent, NOTHING), held=sum(held, NOTHING))

    def _is_live(self, session_id: str, token: int) -> bool:
        lock = self._locks.get(session_id)
        return lock is not None and lock.lasts and lock.token == token


def _counter(standing: Standing) -> _Counter:
    of = standing.definition
    return of.name, standing.value, period_of(of.period, standing.at)
