"""What each hot call costs in statements, whatever the history's length, in the portable form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext, override_settings

from helix_store.core.types import StepInfo
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase

TRANSACTION_CONTROL = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE SAVEPOINT")


@pytest.fixture(autouse=True)
def portable_form() -> Iterator[None]:
    with override_settings(HELIX_STORE={"FAST_PATHS": False}):
        yield


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture
def statements(committed_db: CommittedDatabase) -> Callable[[Callable[[], Any]], list[str]]:
    """What a call sends between BEGIN and COMMIT."""

    return lambda call: sent_by(committed_db.alias, call)


def sent_by(alias: str, call: Callable[[], Any]) -> list[str]:
    with CaptureQueriesContext(connections[alias]) as captured:
        call()
    sent = [query["sql"] for query in captured.captured_queries]
    return [sql for sql in sent if not sql.startswith(TRANSACTION_CONTROL)]


def messages(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"message {index}"} for index in range(count)]


class TestStep:
    """Five statements: lock, staging, messages, checkpoint, head. A run or an operation id costs one more."""

    @pytest.mark.thorough
    @for_each("history", [0, 1, 50, 1_200])
    @for_each("staged", [0, 1, 20])
    def test_costs_the_same_whatever_the_history_and_the_staging(
        self, store: DatabaseStateStore, statements: Any, history: int, staged: int
    ) -> None:
        state = store.create_session("s", agent_type="t")
        store.append_messages("s", messages(history))
        for index in range(staged):
            change = {"tool_call_id": f"call-{index}", "merge_changes": {"notes": [index]}}
            store.stage_changes("s", "step-1", change)
        step = StepInfo("step-1", 1)
        sent = statements(lambda: store.save_state_and_promote_staging("s", state, messages(2), step))
        assert len(sent) == 5, sent

    def test_costs_one_more_with_a_run_and_two_with_an_operation_id(
        self, store: DatabaseStateStore, statements: Any
    ) -> None:
        state = store.create_session("s", agent_type="t")
        store.start_run("s", "run-1")

        def step(number: int, **options: Any) -> Callable[[], Any]:
            info = StepInfo(f"step-{number}", number)
            return lambda: store.save_state_and_promote_staging("s", state, messages(2), info, **options)

        assert len(statements(step(1))) == 5
        assert len(statements(step(2, run_id="run-1"))) == 6
        assert len(statements(step(3, run_id="run-1", operation_id="operation-3"))) == 7
        assert len(statements(step(3, run_id="run-1", operation_id="operation-3"))) == 2

    def test_costs_the_same_after_many_steps(self, store: DatabaseStateStore, statements: Any) -> None:
        state = store.create_session("s", agent_type="t")
        costs = set()
        for number in range(30):
            step = StepInfo(f"step-{number}", number)
            sent = statements(
                lambda step=step: store.save_state_and_promote_staging("s", state, messages(1), step)
            )
            costs.add(len(sent))
        assert costs == {5}
