"""What each hot call costs in statements, whatever the history's length, in the portable form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext, override_settings

from helix_store.core.types import SessionState, StepInfo
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase

ASK = {"tool_name": "ask"}
SAVED = SessionState(session_id="s", agent_type="t")
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

    @pytest.mark.parametrize("history", [0, 1, 50, 5_000])
    @pytest.mark.parametrize("staged", [0, 1, 20])
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


@pytest.mark.parametrize(
    ("name", "expected", "call"),
    [
        ("create_session", 3, lambda store: store.create_session("new", agent_type="t")),
        (
            "create_session of a child",
            4,
            lambda store: store.create_session("c", agent_type="t", parent_session_id="s"),
        ),
        ("session_exists", 1, lambda store: store.session_exists("s")),
        ("load_state", 1, lambda store: store.load_state("s")),
        ("save_state", 3, lambda store: store.save_state("s", SAVED)),
        ("update_status", 2, lambda store: store.update_status("s", "running")),
        ("compare_and_set_status", 2, lambda store: store.compare_and_set_status("s", ["active"], "paused")),
        (
            "a lost compare_and_set_status",
            1,
            lambda store: store.compare_and_set_status("s", ["failed"], "paused"),
        ),
        ("increment_step_count", 2, lambda store: store.increment_step_count("s")),
        ("append_messages", 3, lambda store: store.append_messages("s", messages(9))),
        ("get_messages", 1, lambda store: store.get_messages("s", offset=3, limit=5)),
        ("get_messages from the end", 1, lambda store: store.get_messages("s", limit=5, order="desc")),
        ("get_message_count", 1, lambda store: store.get_message_count("s")),
        ("stage_changes", 2, lambda store: store.stage_changes("s", "x", {"tool_call_id": "c"})),
        ("get_staged_changes", 1, lambda store: store.get_staged_changes("s", "x")),
        ("get_latest_checkpoint", 1, lambda store: store.get_latest_checkpoint("s")),
        ("list_checkpoints", 3, lambda store: store.list_checkpoints("s")),
        ("list_sessions", 2, lambda store: store.list_sessions(tags=["a"], metadata={"k": "v"})),
        ("list_sessions without a count", 1, lambda store: store.list_sessions(count=False)),
        ("branch_session", 7, lambda store: store.branch_session("s")),
        ("get_current_run", 2, lambda store: store.get_current_run("s")),
        ("check_interrupt", 1, lambda store: store.check_interrupt("s")),
        ("add_pending_tool_calls", 3, lambda store: store.add_pending_tool_calls("s", {"new": ASK})),
        (
            "add_pending_tool_calls in a child",
            4,
            lambda store: store.add_pending_tool_calls("child", {"new": ASK}),
        ),
        ("submit_tool_result", 3, lambda store: store.submit_tool_result("s", "open", result=1)),
        (
            "submit_tool_result through a child",
            4,
            lambda store: store.submit_tool_result("child", "open", result=1),
        ),
        ("a late submit_tool_result", 2, lambda store: store.submit_tool_result("s", "answered", result=1)),
        ("take_tool_results", 2, lambda store: store.take_tool_results("s")),
        ("find_expired_pending", 2, lambda store: store.find_expired_pending()),
        (
            "suspend",
            3,
            lambda store: store.suspend("s", kind="suspended_step_partial", context={}),
        ),
        ("resume", 3, lambda store: store.resume("suspended")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_statements_of(
    store: DatabaseStateStore, statements: Any, name: str, expected: int, call: Callable[[Any], Any]
) -> None:
    state = store.create_session("s", agent_type="t")
    store.save_state_and_promote_staging("s", state, messages(20), StepInfo("step-1", 1))
    store.add_pending_tool_calls("s", {"open": ASK, "answered": ASK})
    store.submit_tool_result("s", "answered", result=1)
    store.create_session("child", agent_type="t", parent_session_id="s")
    store.create_session("suspended", agent_type="t")
    store.suspend("suspended", kind="suspended_client_tool", context={})
    sent = statements(lambda: call(store))
    assert len(sent) == expected, sent
