"""Whichever statement of a write fails, the write leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from django.db import DatabaseError, transaction
from django.test.utils import override_settings

from helix_store.core.types import (
    StagedChanges,
    StepInfo,
    SubSessionRef,
)
from helix_store.exceptions import HelixStoreError
from helix_store.stores import DatabaseStateStore
from helix_store.testing.state_store.samples import (
    contents,
    full_session,
    loaded,
    message,
)
from tests.cells import for_each
from tests.databases import CommittedDatabase


class StatementFailed(DatabaseError):
    """The fault that the test put in."""


class FailingStatement:
    """Lets statements through until the Nth one, which it refuses before the database sees it."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.sent = 0

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        self.sent += 1
        if self.sent == self.nth:
            raise StatementFailed(sql)
        return execute(sql, params, many, context)


def newest_checkpoint(store: DatabaseStateStore) -> str:
    return store.list_checkpoints("s").items[0].checkpoint_id


def oldest_checkpoint(store: DatabaseStateStore) -> str:
    return store.list_checkpoints("s").items[-1].checkpoint_id


ASK = {"tool_name": "ask"}

WRITES: dict[str, Callable[[DatabaseStateStore], Any]] = {
    "create_session": lambda store: store.create_session("new", agent_type="t", parent_session_id="s"),
    "save_state": lambda store: store.save_state("s", loaded(store, "s")),
    "delete_session": lambda store: store.delete_session("s"),
    "delete_session keeping usage": lambda store: store.delete_session("s", keep_usage=True),
    "update_status": lambda store: store.update_status("s", "failed", failure_reason="lost"),
    "compare_and_set_status": lambda store: store.compare_and_set_status("s", ["active"], "paused"),
    "increment_step_count": lambda store: store.increment_step_count("s"),
    "increment_resume_count": lambda store: store.increment_resume_count("s"),
    "merge_custom_state": lambda store: store.merge_custom_state("s", {"list": [1]}),
    "append_messages": lambda store: store.append_messages("s", [message("one"), message("two")]),
    "truncate_messages": lambda store: store.truncate_messages("s", 1),
    "stage_changes": lambda store: store.stage_changes("s", "step-3", StagedChanges(tool_call_id="more")),
    "promote_staging": lambda store: store.promote_staging("s", "step-3"),
    "discard_staging": lambda store: store.discard_staging("s", "step-3"),
    "save_state_and_promote_staging": lambda store: store.save_state_and_promote_staging(
        "s",
        loaded(store, "s"),
        [message("one")],
        StepInfo("step-3", 3),
        run_id="run-1",
        operation_id="operation",
    ),
    "restore_checkpoint": lambda store: store.restore_checkpoint("s", oldest_checkpoint(store)),
    "branch_session": lambda store: store.branch_session("s", new_session_id="new"),
    "delete_checkpoint": lambda store: store.delete_checkpoint("s", newest_checkpoint(store)),
    "prune_checkpoints": lambda store: store.prune_checkpoints("s", keep=0),
    "start_run": lambda store: store.start_run("s", "run-2", supersede=True),
    "update_run": lambda store: store.update_run("s", "run-1", status="failed", error={"a": 1}),
    "add_sub_session_refs": lambda store: store.add_sub_session_refs(
        "s", [SubSessionRef(sub_session_id="new", agent_type="t")]
    ),
    "update_sub_session_ref": lambda store: store.update_sub_session_ref("s", "sub", status="completed"),
    "request_interrupt": lambda store: store.request_interrupt("s", kind="abort"),
    "clear_interrupt": lambda store: store.clear_interrupt("s"),
    "add_pending_tool_calls": lambda store: store.add_pending_tool_calls("child", {"new": ASK}),
    "submit_tool_result": lambda store: store.submit_tool_result("s", "open", result=1),
    "take_tool_results": lambda store: store.take_tool_results("child"),
    "suspend": lambda store: store.suspend(
        "child", kind="suspended_client_tool", context={}, pending={"new": ASK}
    ),
    "resume": lambda store: store.resume("suspended"),
}


def everything(store: DatabaseStateStore) -> list[Any]:
    """All sessions of the tenant, and all there is in the one under test."""
    heads = store.list_sessions(order_by="created_at").sessions
    return [*(contents(store, head.session_id) for head in heads), heads]


@for_each("name", WRITES)
def test_a_failed_statement_of_the_portable_form_leaves_nothing(
    committed_db: CommittedDatabase, name: str
) -> None:
    with override_settings(HELIX_STORE={"FAST_PATHS": False}):
        fail_each_statement(committed_db, name, inside_a_callers_transaction=False)


@for_each("inside_a_callers_transaction", [False, True], ids=["alone", "inside atomic()"])
@for_each("name", WRITES)
def test_a_failed_statement_leaves_nothing(
    committed_db: CommittedDatabase, name: str, inside_a_callers_transaction: bool
) -> None:
    fail_each_statement(committed_db, name, inside_a_callers_transaction=inside_a_callers_transaction)


def fail_each_statement(
    committed_db: CommittedDatabase, name: str, *, inside_a_callers_transaction: bool
) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    full_session(store, "s")
    store.create_session("child", agent_type="t", parent_session_id="s")
    store.start_run("child")
    store.add_pending_tool_calls("child", {"open": ASK, "answered": ASK})
    store.submit_tool_result("s", "answered", result=1)
    store.create_session("suspended", agent_type="t", parent_session_id="s")
    store.suspend("suspended", kind="suspended_client_tool", context={})
    before = everything(store)
    for nth in count(1):
        fault = FailingStatement(nth)
        try:
            with committed_db.connection.execute_wrapper(fault):
                if inside_a_callers_transaction:
                    caught_inside_a_transaction(store, name, committed_db.alias)
                else:
                    WRITES[name](store)
        except StatementFailed:
            assert everything(store) == before, f"statement {nth} of {name}"
            continue
        assert fault.sent < nth
        assert nth > 1, "the fault was never hit"
        return


def caught_inside_a_transaction(store: DatabaseStateStore, name: str, alias: str) -> None:
    """The caller catches the error and commits its own work; ours must not be in it."""
    caught: Exception | None = None
    with transaction.atomic(using=alias):
        try:
            WRITES[name](store)
        except (StatementFailed, HelixStoreError) as exc:
            caught = exc
    if caught is not None:
        raise caught
