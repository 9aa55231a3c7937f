"""A budget over 100,000 entries costs what it costs over ten: counters are read, and no entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.db import transaction

from helix_store.budgets import count_again
from helix_store.engine.database import Database
from helix_store.models import UsageEntry
from helix_store.stores import Store
from helix_store.testing.usage.base import custom
from tests.database.separate import execute
from tests.databases import CommittedDatabase, delete_all_rows
from tests.plans.conftest import forget_statistics
from tests.plans.explained import Plan, plans_of

_FEW, _MANY = 10, 100_000


def _step(store: Store) -> None:
    with store.session("session").turn() as turn, turn.step(estimate_usd=1) as step:
        turn.tokens(model="model", prompt=1, cost_usd="0.5")
        step.say({"role": "assistant", "content": "answer"})


_CALLS: dict[str, Callable[[Store], Any]] = {
    "a step": _step,
    "record_entry": lambda store: store.usage.record_entry(custom("session", cost_usd="1")),
    "status": lambda store: store.budgets.status("tenant"),
}


@pytest.fixture
def store(committed_db: CommittedDatabase) -> Iterator[Store]:
    delete_all_rows(committed_db.alias)
    forget_statistics(committed_db.alias)
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    store.new_session("session", agent_type="agent", user_id="user")
    places: dict[str, dict[str, Any]] = {
        "tree": {"scope": "tree", "value": "session"},
        "user": {"scope": "user"},
        "agent type": {"scope": "agent_type", "period": "month"},
        "tenant": {"scope": "tenant", "period": "day"},
    }
    for name, place in places.items():
        store.budgets.set_budget(name, limit_usd=1_000_000, **place)
    store.usage.record_entries([custom("session", cost_usd="1")] * _FEW)
    _step(store)
    yield store
    delete_all_rows(committed_db.alias)
    forget_statistics(committed_db.alias)


def _plans(database: CommittedDatabase, store: Store) -> dict[str, list[Plan]]:
    # The rows of calls that were undone would make small tables large, and the planner goes by their size.
    execute(database.connection, "ANALYZE" if database.vendor == "sqlite" else "VACUUM ANALYZE")
    return {name: plans_of(database, partial(call, store)) for name, call in _CALLS.items()}


def _texts(plans: list[Plan]) -> list[str]:
    """The plans that could depend on the ledger. The test also adds runs, which can change other plans."""
    return [plan.text for plan in plans if "usage" in plan.text or "budget" in plan.text]


def _copy_entries(database: CommittedDatabase) -> None:
    columns = [str(field.column) for field in UsageEntry._meta.concrete_fields if not field.primary_key]
    values = ", ".join("entry_id || '-' || n" if each == "entry_id" else each for each in columns)
    table = UsageEntry._meta.db_table
    execute(
        database.connection,
        f"""
        WITH RECURSIVE numbers(n) AS (
            SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {_MANY // _FEW})
        INSERT INTO {table} ({", ".join(columns)})
        SELECT {values} FROM {table} CROSS JOIN numbers WHERE tenant = '{database.tenant}'""",
    )


def test_many_entries_are_not_read(committed_db: CommittedDatabase, store: Store) -> None:
    few = _plans(committed_db, store)
    _copy_entries(committed_db)
    with transaction.atomic(using=store.alias):
        for budget in store.budgets.list_budgets():
            count_again(Database(store.alias, store.tenant), budget.name)
    assert store.budgets.status("tree").spent_usd > _MANY
    many = _plans(committed_db, store)
    for name, plans in few.items():
        assert _texts(many[name]) == _texts(plans) != [], name
        assert sum(plan.rows_read for plan in many[name]) <= sum(plan.rows_read for plan in plans) + 20, name
        assert not any("usage" in place for plan in many[name] for place in plan.read_whole), name
