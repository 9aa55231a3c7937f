"""Budgets: their checks, their counters and their list."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from helix_store.budgets import _OWN, BALANCES_OF_KEYS, Amounts, reserve
from helix_store.counters import Spender, Spent, change_counters, keys_of
from helix_store.engine.database import Database
from helix_store.stores import Store
from tests.plans.calls import Call
from tests.plans.rows import World

__all__ = ["BUDGET_CALLS"]

_SPENDER: Final = Spender("session-7", "capped-7", "agent")


def _of_budgets(method: str, *arguments: Any, **options: Any) -> Callable[[World], Callable[[], object]]:
    return lambda world: partial(getattr(world.budgets, method), *arguments, **options)


def _change_of_counters(world: World) -> Callable[[], object]:
    db = Database(world.database.alias, world.budgets.tenant)
    return partial(change_counters, db, [Spent(_SPENDER, "2026-11-20", 1, 1)])


def _lock_of_counters(world: World) -> Callable[[], object]:
    backend: Any = world.budgets._backend
    return partial(backend._locked_rows, backend._given(keys_of(_SPENDER), "session-7"))


def _hold(world: World) -> Callable[[], object]:
    backend: Any = world.budgets._backend
    rows = backend.db.read(BALANCES_OF_KEYS, backend._given(keys_of(_SPENDER), "session-7"))
    # The check does not look at the session again.
    of_a_session = [(*row[:_OWN], 1, *row[_OWN + 1 :]) for row in rows]
    return partial(backend._hold_as_read, of_a_session, 1, Amounts(1, 1))


def _opening(world: World) -> Callable[[], object]:
    store = Store(world.database.alias, tenant=world.budgets.tenant)

    def call() -> None:
        store.new_session("opened", agent_type="agent", user_id="capped-7")
        store.open_step("opened", None, None, is_capped=True)

    return call


def _commit(world: World) -> Callable[[], object]:
    store = Store(world.database.alias, tenant=world.budgets.tenant)

    def call() -> None:
        session = store.new_session("committed", agent_type="agent", user_id="capped-7")
        with session.turn() as turn:
            for _ in range(2):
                with turn.step() as step:
                    step.say({"role": "assistant", "content": "hello"})

    return call


_OF_THE_TENANT: Final = 320
"""Most tenants have one budget, so PostgreSQL may take any index that begins with the tenant."""

_CALLS: Final[dict[str, Callable[[World], Callable[[], object]]]] = {
    "budget status": _of_budgets("status", "budget-7"),
    "get_budget": _of_budgets("get_budget", "budget-7"),
    "check of budgets": lambda world: partial(reserve, world.budgets, _SPENDER, "session-7", 1, Amounts()),
    "opening of a step with budgets": _opening,
    "commits of steps with budgets": _commit,
    "lock of counters": _lock_of_counters,
    "hold of an estimate": _hold,
    "change of counters": _change_of_counters,
    "set_budget of a tree": _of_budgets("set_budget", "tree", scope="tree", value="root", limit_tokens=1),
    "delete_budget": _of_budgets("delete_budget", "budget-7"),
}

# A merge join of a budget and its counter sorts a row of each.
BUDGET_CALLS: Final = [Call(name, make, reads=_OF_THE_TENANT, sorts=2) for name, make in _CALLS.items()]
