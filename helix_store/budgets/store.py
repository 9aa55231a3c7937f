"""The budget stores: they check arguments, then call a back end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from helix_store import conf
from helix_store.budgets.database import DatabaseBudgets
from helix_store.budgets.memory import MemoryBudgets
from helix_store.budgets.rules import Amounts, Hold, checked_definition, status_of
from helix_store.core import validation
from helix_store.core.budgets import Budget, BudgetPeriod, BudgetScope, BudgetStatus, Dollars
from helix_store.core.types import UserId
from helix_store.counters.rules import Spender, keys_of
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database
from helix_store.engine.memory import MemoryWorld
from helix_store.sessions.memory.scope import TenantScope


class BudgetStoreBase:
    """The budget store of the contract; subclasses provide the back end."""

    def __init__(self, backend: DatabaseBudgets | MemoryBudgets, *, tenant: str) -> None:
        self._backend = backend
        self.tenant: Final = tenant

    def set_budget(
        self,
        name: str,
        *,
        scope: BudgetScope | str,
        value: UserId | None = None,
        period: BudgetPeriod | str = "total",
        limit_usd: Dollars | None = None,
        limit_tokens: int | None = None,
    ) -> Budget:
        """Create a budget, or replace all of its fields, and return it. One transaction; safe to repeat.

        ``scope`` is ``tree`` (``value`` is the session id of the root), ``user`` or ``agent_type`` (``value``
        names one; without it, each has a budget of this size), or ``tenant`` (without a value). ``period`` is
        ``total``, ``day`` or ``month``, in UTC. Set at least one limit. Usage that the ledger already holds
        for the current period counts. While the ledger is being added up, nobody else can record usage in
        this database. Raises `InvalidPayload`.
        """
        definition = checked_definition(
            name, scope=scope, value=value, period=period, limit_usd=limit_usd, limit_tokens=limit_tokens
        )
        return self._backend.set(definition)

    def get_budget(self, name: str) -> Budget | None:
        """Return a budget, or ``None`` if it is unknown."""
        return self._backend.get(validation.identifier(name, "name"))

    def list_budgets(self) -> list[Budget]:
        """Return all budgets of the tenant, ordered by name."""
        return self._backend.select()

    def delete_budget(self, name: str) -> bool:
        """Delete a budget, and return whether it existed. Safe to repeat."""
        return self._backend.delete(validation.identifier(name, "name"))

    def status(self, name: str, *, value: UserId | None = None) -> BudgetStatus:
        """Return the amounts spent, held and left in the current period, all at the same point in time.

        For a budget per user or agent type, ``value`` names the user or the agent type. Raises
        `NotFoundError`, and `InvalidPayload` if such a budget has no ``value``.
        """
        name, chosen = validation.identifier(name, "name"), validation.user_id(value, "value")
        return status_of(self._backend.standing(name, chosen))

    aset_budget = async_twin(set_budget)
    aget_budget = async_twin(get_budget)
    alist_budgets = async_twin(list_budgets)
    adelete_budget = async_twin(delete_budget)
    astatus = async_twin(status)

    # For turns

    def _applies(self, spender: Spender) -> bool:
        """Return whether any budget applies to a session. One statement."""
        return bool(self._backend.standings(keys_of(spender)))

    def _begin_step(
        self, spender: Spender, session_id: str, fencing_token: int, estimate: Amounts
    ) -> Hold | None:
        """Check every budget that applies to a session, and hold an estimate. Raises `BudgetExceeded`."""
        return self._backend.hold(keys_of(spender), session_id, fencing_token, estimate)

    def _settle(self, hold: Hold, record: Callable[[], object] | None) -> None:
        self._backend.settle(hold, record)


class DatabaseBudgetStore(BudgetStoreBase):
    """Budgets in a Django database, for the sessions and the ledger of the same database and tenant."""

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), None)
        super().__init__(DatabaseBudgets(db), tenant=db.tenant)


class InMemoryBudgetStore(BudgetStoreBase):
    """Budgets in one process, for tests and experiments; pass the ``world`` of the stores that they limit."""

    def __init__(self, *, tenant: str = "", world: MemoryWorld | None = None) -> None:
        tenant = validation.tenant(tenant)
        scope = TenantScope(MemoryWorld() if world is None else world, tenant=tenant, limits=None)
        super().__init__(MemoryBudgets(scope), tenant=tenant)
