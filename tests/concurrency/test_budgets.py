"""Workers that spend and hold while others spend and hold, or create and delete budgets."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.db import OperationalError, transaction

from helix_store.exceptions import BudgetExceeded
from helix_store.models import BudgetCounter, Session, UsageEntry
from helix_store.stores import Store
from helix_store.testing.usage.base import custom
from tests.database.separate import beside, execute
from tests.databases import CommittedDatabase
from tests.processes import run_in_threads


def test_a_commit_that_waits_for_the_ledger_holds_no_counter(postgres_db: CommittedDatabase) -> None:
    """Otherwise it deadlocks with `delete_budget`, which locks the ledger and then deletes counters."""
    store = Store(postgres_db.alias, tenant=postgres_db.tenant)
    store.budgets.set_budget("cap", scope="tenant", limit_usd=1)
    session = store.new_session("session", agent_type="agent")

    def take_a_step() -> None:
        with session.turn(estimate_usd="0.2") as turn, turn.step():
            turn.tokens(model="model", prompt=1, cost_usd="0.1")

    with transaction.atomic(using=postgres_db.alias):
        execute(postgres_db.connection, f"LOCK TABLE {UsageEntry._meta.db_table} IN SHARE MODE")
        step = beside(postgres_db, take_a_step)
        counters = BudgetCounter.objects.using(postgres_db.alias).filter(tenant=postgres_db.tenant)
        assert counters.select_for_update(nowait=True).get().holds
    step.result(30)
    status = store.budgets.status("cap")
    assert status.spent_tokens == 1
    assert status.held_usd == 0


def test_a_commit_that_waits_for_the_root_of_its_tree_holds_no_counter(
    postgres_db: CommittedDatabase,
) -> None:
    """Otherwise it deadlocks with a step of the root, which locks its session and then the counter."""
    store = Store(postgres_db.alias, tenant=postgres_db.tenant)
    store.budgets.set_budget("cap", scope="tenant", limit_usd=1)
    store.new_session("root", agent_type="agent")
    child = store.new_session("child", agent_type="agent", parent_session_id="root")

    def ask() -> None:
        with child.turn(estimate_usd="0.2") as turn, turn.step() as step:
            turn.tokens(model="model", prompt=1, cost_usd="0.1")
            step.wait_for({"call": {"tool_name": "ask", "input": {}}})

    with transaction.atomic(using=postgres_db.alias):
        root = Session.objects.using(postgres_db.alias).filter(tenant=postgres_db.tenant, session_id="root")
        root.select_for_update().get()
        step = beside(postgres_db, ask)
        counters = BudgetCounter.objects.using(postgres_db.alias).filter(tenant=postgres_db.tenant)
        assert counters.select_for_update(nowait=True).get().holds
    step.result(30)
    assert store.budgets.status("cap").spent_tokens == 1


def _spend(store: Store) -> None:
    store.usage.record_entry(custom("other", cost_usd="0.5"))


def _hold(store: Store) -> None:
    store.session("other").turn().__enter__().step(estimate_usd="0.5").__enter__()


@pytest.mark.parametrize("intervene", [_spend, _hold])
def test_an_estimate_is_checked_again_if_others_come_before_it_is_held(
    committed_db: CommittedDatabase, intervene: Callable[[Store], None]
) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    store.budgets.set_budget("cap", scope="tenant", limit_usd=1)
    session, other = (store.new_session(name, agent_type="agent") for name in ("session", "other"))
    store.usage.record_entry(custom("session", cost_usd="0.25"))
    is_checked = False

    def come_between(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        nonlocal is_checked
        if "SET holds" in sql and not is_checked:
            is_checked = True
            (outcome,) = run_in_threads(intervene, [(store,)])
            outcome.unwrap()
        return execute(sql, parameters, many, context)

    with session.turn() as turn, committed_db.connection.execute_wrapper(come_between):
        with pytest.raises(BudgetExceeded) as caught, turn.step(estimate_usd="0.5"):
            pass
        assert is_checked
        assert caught.value.spent + caught.value.held == Decimal("0.75")
    store.locks.force_release(other.id)


def test_a_step_is_stored_although_the_check_after_it_fails(
    postgres_db: CommittedDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(postgres_db.alias, tenant=postgres_db.tenant)
    store.budgets.set_budget("cap", scope="tenant", limit_usd=1)
    session = store.new_session("session", agent_type="agent")
    failed: list[str] = []

    def fail_once(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if "moment AS" in sql and not failed:
            failed.append(sql)
            raise OperationalError("planned")
        return execute(sql, parameters, many, context)

    with session.turn() as turn:
        with turn.step() as step:
            step.say({"role": "assistant", "content": "hello"})
            store.usage.record_entry(custom("session", cost_usd="1"))
            postgres_db.connection.execute_wrappers.append(fail_once)
        postgres_db.connection.execute_wrappers.remove(fail_once)
        assert len(failed) == 1
        assert step.commit is not None
        assert "were not checked" in caplog.text
        # The next step checks the budgets itself.
        assert turn.is_active
        with pytest.raises(BudgetExceeded), turn.step():
            pytest.fail("the step began")
    assert session.load().step_count == 1


def test_a_new_budget_counts_what_an_open_transaction_has_recorded(postgres_db: CommittedDatabase) -> None:
    store = Store(postgres_db.alias, tenant=postgres_db.tenant)
    store.new_session("session", agent_type="agent")
    with transaction.atomic(using=postgres_db.alias):
        store.usage.record_entry(custom("session", cost_usd="0.25"))
        setting = beside(postgres_db, lambda: store.budgets.set_budget("cap", scope="tenant", limit_usd=1))
    setting.result(30)
    assert store.budgets.status("cap").spent_usd == Decimal("0.25")
