"""Fast paths on PostgreSQL: one statement each, and a step with staged changes reads them first."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.db import connections, transaction
from django.test.utils import override_settings

from helix_store.core.types import StepInfo
from helix_store.handles import Turn
from helix_store.models import Checkpoint
from helix_store.sessions import statements as step_sql
from helix_store.sessions.state import WRITTEN_COLUMNS
from helix_store.sessions.statements import MAX_SINGLE_MESSAGES
from helix_store.stores import DatabaseStateStore, Store
from helix_store.testing.usage.base import tokens
from tests.cells import for_each
from tests.database.test_statements import messages, sent_by
from tests.databases import CommittedDatabase


@pytest.fixture
def store(postgres_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)


@pytest.fixture
def statements(postgres_db: CommittedDatabase) -> Callable[[Callable[[], Any]], list[str]]:
    return lambda call: sent_by(postgres_db.alias, call)


@pytest.mark.thorough
@pytest.mark.parametrize("history", [0, 5_000])
def test_a_step_is_one_statement(store: DatabaseStateStore, statements: Any, history: int) -> None:
    state = store.create_session("s", agent_type="t")
    store.append_messages("s", messages(history))
    store.start_run("s", "run-1")
    for number in range(3):
        step = StepInfo(f"step-{number}", number)
        sent = statements(
            lambda step=step: store.save_state_and_promote_staging(
                "s", state, messages(2), step, run_id="run-1", fencing_token=1
            )
        )
        assert len(sent) == 1, sent


@for_each("count", [0, 1, MAX_SINGLE_MESSAGES, MAX_SINGLE_MESSAGES + 1, 50])
def test_a_step_with_any_number_of_messages_is_one_statement(
    store: DatabaseStateStore, statements: Any, count: int
) -> None:
    state = store.create_session("s", agent_type="t")
    hostile = [
        {"role": "user", "content": content} for content in ('it\'s "quoted"', "back\\slash", "{,}", "")
    ]
    said = [*hostile, *messages(50)][:count]
    for number in range(2):
        step = StepInfo(f"step-{number}", number)
        sent = statements(lambda step=step: store.save_state_and_promote_staging("s", state, said, step))
        assert len(sent) == 1, sent
    page = store.get_messages("s", limit=200)
    assert (page.messages, page.total) == ([*said, *said], 2 * count)


@pytest.mark.parametrize("staged", [1, 20])
@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "portable"])
def test_a_step_with_staged_changes_is_two_statements(
    store: DatabaseStateStore, statements: Any, staged: int, is_fast: bool
) -> None:
    state = store.create_session("s", agent_type="t")
    with override_settings(HELIX_STORE={"FAST_PATHS": is_fast}):
        for number in (1, 2):
            for index in range(staged):
                change = {"tool_call_id": f"c-{index}", "merge_changes": {"n": [index]}}
                store.stage_changes("s", f"step-{number}", change)

    def step(number: int) -> Callable[[], Any]:
        info = StepInfo(f"step-{number}", number)
        return lambda: store.save_state_and_promote_staging("s", state, [], info)

    sent = [len(statements(step(number))) for number in range(3)]
    loaded = store.load_state("s")
    assert loaded is not None
    assert loaded.custom_state == {"n": list(range(staged))}
    sent += [len(statements(step(number))) for number in (3, 4)]
    assert sent == [1, 2, 2, 2, 1], "a step after one with staged changes reads what is staged first"


@for_each("spends", [False, True])
@for_each("is_reached", [False, True])
def test_the_statement_of_a_commit_looks_at_the_budgets(
    store: DatabaseStateStore, statements: Any, spends: bool, is_reached: bool
) -> None:
    both = Store(store.alias, tenant=store.tenant)
    both.budgets.set_budget("cap", scope="tenant", limit_usd=10)
    session = both.new_session("s", agent_type="t")

    def take_a_step(turn: Turn) -> None:
        if spends:
            turn.tokens(model="no-such-model", prompt=1, cost_usd=1)
        with turn.step() as step:
            step.say({"role": "assistant", "content": "hello"})

    with session.turn() as turn:
        take_a_step(turn)
        if is_reached:
            both.usage.record_entry(tokens("s", id="entry", total=1, cost_usd=Decimal(10)))
        sent = statements(lambda: take_a_step(turn))
        # They load and store the step, record its usage and, if a limit was reached, read the budgets.
        assert len(sent) == 2 + spends + is_reached, sent
        assert turn.is_active is not is_reached


def test_other_hot_calls_are_one(store: DatabaseStateStore, statements: Any) -> None:
    state = store.create_session("s", agent_type="t")
    store.save_state_and_promote_staging("s", state, messages(20), StepInfo("step-1", 1))
    assert len(statements(lambda: store.load_state("s"))) == 1
    assert len(statements(lambda: store.get_latest_checkpoint("s"))) == 1
    assert len(statements(lambda: store.get_messages("s", offset=3, limit=5))) == 1
    assert len(statements(lambda: store.compare_and_set_status("s", ["active"], "paused"))) == 1


def test_inside_a_callers_transaction_a_step_is_the_same_statement_in_a_savepoint(
    store: DatabaseStateStore, statements: Any, postgres_db: CommittedDatabase
) -> None:
    state = store.create_session("s", agent_type="t")

    def inside() -> None:
        with transaction.atomic(using=postgres_db.alias):
            store.save_state_and_promote_staging("s", state, messages(2), StepInfo("step-1", 1))

    assert len(statements(inside)) == 1


def test_statements_stay_prepared_on_the_server(
    store: DatabaseStateStore, postgres_db: CommittedDatabase
) -> None:
    state = store.create_session("s", agent_type="t")
    for number in range(4):
        store.save_state_and_promote_staging("s", state, messages(2), StepInfo(f"step-{number}", number))
        store.load_state("s")
    with connections[postgres_db.alias].cursor() as cursor:
        cursor.execute(
            "SELECT statement LIKE '%%UPDATE%%', generic_plans + custom_plans FROM pg_prepared_statements"
        )
        used = dict(cursor.fetchall())
    assert used == {True: 4, False: 4}


def test_a_change_that_was_replaced_is_promoted_as_it_is_now(
    store: DatabaseStateStore, statements: Any
) -> None:
    state = store.create_session("s", agent_type="t")
    store.stage_changes("s", "step-1", {"tool_call_id": "c", "merge_changes": {"n": "here"}})
    with override_settings(HELIX_STORE={"FAST_PATHS": False}):
        store.stage_changes("s", "step-1", {"tool_call_id": "c", "merge_changes": {"n": "elsewhere"}})
    step = StepInfo("step-1", 1)
    assert len(statements(lambda: store.save_state_and_promote_staging("s", state, [], step))) == 2
    loaded = store.load_state("s")
    assert loaded is not None
    assert loaded.custom_state == {"n": "elsewhere"}


def test_a_change_whose_staging_was_rolled_back_is_not_merged(
    store: DatabaseStateStore, postgres_db: CommittedDatabase
) -> None:
    state = store.create_session("s", agent_type="t")
    with transaction.atomic(using=postgres_db.alias):
        store.stage_changes("s", "step-1", {"tool_call_id": "c", "merge_changes": {"n": 1}})
        transaction.set_rollback(True, using=postgres_db.alias)
    store.save_state_and_promote_staging("s", state, [], StepInfo("step-1", 1))
    loaded = store.load_state("s")
    assert loaded is not None
    assert loaded.custom_state == {}


def test_a_parameter_of_a_step_has_one_meaning() -> None:
    """A step sends columns of the head and of the checkpoint by their names: only the status is the same."""
    checkpoint = {field.attname for field in Checkpoint._meta.concrete_fields}
    assert checkpoint & set(WRITTEN_COLUMNS) - step_sql._CHECKPOINT_VALUES.keys() == {"status"}
