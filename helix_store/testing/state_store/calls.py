"""A table of all calls on one session, with valid arguments, for rules that hold for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from helix_store.core.contracts import StateStore
from helix_store.core.types import (
    SessionState,
    StagedChanges,
    SubSessionRef,
)
from helix_store.exceptions import ConflictError, NotFoundError
from helix_store.testing.state_store.samples import message, step

__all__ = ["ANSWERING_READS", "CALLS", "RAISING_READS", "WRITES", "Call", "outcome"]

ASKED_CALL: Final = {"tool_name": "ask", "requested_at": 1_900_000_000_000}
UNKNOWN_CHECKPOINT: Final = "cpv1-nobody-s1-t1900000000000-abcdef"


@dataclass(frozen=True)
class Call:
    """A method, and a function that calls it for a session."""

    method: str
    invoke: Callable[[StateStore, str], Any]

    def __str__(self) -> str:
        return self.method


ANSWERING_READS: Final = [
    Call("session_exists", lambda store, session_id: store.session_exists(session_id)),
    Call("load_state", lambda store, session_id: store.load_state(session_id)),
    Call("get_checkpoint", lambda store, session_id: store.get_checkpoint(session_id, UNKNOWN_CHECKPOINT)),
    Call("get_latest_checkpoint", lambda store, session_id: store.get_latest_checkpoint(session_id)),
]
"""Reads that return ``None`` or ``False`` for an unknown session."""

RAISING_READS: Final = [
    Call("get_messages", lambda store, session_id: store.get_messages(session_id)),
    Call("iter_messages", lambda store, session_id: list(store.iter_messages(session_id))),
    Call("get_message_count", lambda store, session_id: store.get_message_count(session_id)),
    Call("get_staged_changes", lambda store, session_id: store.get_staged_changes(session_id, "step-1")),
    Call("list_checkpoints", lambda store, session_id: store.list_checkpoints(session_id)),
    Call("get_current_run", lambda store, session_id: store.get_current_run(session_id)),
    Call("list_runs", lambda store, session_id: store.list_runs(session_id)),
    Call("get_sub_session_refs", lambda store, session_id: store.get_sub_session_refs(session_id)),
    Call("check_interrupt", lambda store, session_id: store.check_interrupt(session_id)),
]
"""Reads that raise `SessionNotFound` for an unknown session."""


def _state(session_id: str) -> SessionState:
    return SessionState(session_id=session_id, agent_type="agent")


def _resume_if_suspended(store: StateStore, session_id: str) -> SessionState | None:
    try:
        return store.resume(session_id)
    except ConflictError:
        return None


WRITES: Final = [
    Call("save_state", lambda store, session_id: store.save_state(session_id, _state(session_id))),
    Call("update_status", lambda store, session_id: store.update_status(session_id, "paused")),
    Call(
        "compare_and_set_status",
        lambda store, session_id: store.compare_and_set_status(session_id, ["active"], "running"),
    ),
    Call("increment_step_count", lambda store, session_id: store.increment_step_count(session_id)),
    Call("increment_resume_count", lambda store, session_id: store.increment_resume_count(session_id)),
    Call("merge_custom_state", lambda store, session_id: store.merge_custom_state(session_id, {"a": 1})),
    Call("append_messages", lambda store, session_id: store.append_messages(session_id, [message("hi")])),
    Call("truncate_messages", lambda store, session_id: store.truncate_messages(session_id, 0)),
    Call(
        "stage_changes",
        lambda store, session_id: store.stage_changes(
            session_id, "step-1", StagedChanges(tool_call_id="call", merge_changes={"a": 1})
        ),
    ),
    Call("promote_staging", lambda store, session_id: store.promote_staging(session_id, "step-1")),
    Call("discard_staging", lambda store, session_id: store.discard_staging(session_id, "step-1")),
    Call(
        "save_state_and_promote_staging",
        lambda store, session_id: store.save_state_and_promote_staging(
            session_id, _state(session_id), [message("hi")], step(1)
        ),
    ),
    Call(
        "restore_checkpoint",
        lambda store, session_id: store.restore_checkpoint(session_id, UNKNOWN_CHECKPOINT),
    ),
    Call("branch_session", lambda store, session_id: store.branch_session(session_id)),
    Call(
        "delete_checkpoint",
        lambda store, session_id: store.delete_checkpoint(session_id, UNKNOWN_CHECKPOINT),
    ),
    Call("prune_checkpoints", lambda store, session_id: store.prune_checkpoints(session_id, keep=0)),
    Call("start_run", lambda store, session_id: store.start_run(session_id, "run", supersede=True)),
    Call("update_run", lambda store, session_id: store.update_run(session_id, "run-1", status="completed")),
    Call(
        "add_sub_session_refs",
        lambda store, session_id: store.add_sub_session_refs(
            session_id, [SubSessionRef(sub_session_id="new", agent_type="helper")]
        ),
    ),
    Call(
        "update_sub_session_ref",
        lambda store, session_id: store.update_sub_session_ref(session_id, "sub", status="completed"),
    ),
    Call("request_interrupt", lambda store, session_id: store.request_interrupt(session_id)),
    Call("clear_interrupt", lambda store, session_id: store.clear_interrupt(session_id)),
    Call(
        "add_pending_tool_calls",
        lambda store, session_id: store.add_pending_tool_calls(session_id, {"call-1": ASKED_CALL}),
    ),
    Call(
        "submit_tool_result",
        lambda store, session_id: store.submit_tool_result(session_id, "call-1", result=1),
    ),
    Call("take_tool_results", lambda store, session_id: store.take_tool_results(session_id)),
    Call(
        "suspend",
        lambda store, session_id: store.suspend(session_id, kind="suspended_step_partial", context={}),
    ),
    Call("resume", _resume_if_suspended),
]
"""Writes that raise `SessionNotFound` for an unknown session. `delete_session` returns 0 instead."""

DELETE: Final = Call("delete_session", lambda store, session_id: store.delete_session(session_id))

CALLS: Final = [*ANSWERING_READS, *RAISING_READS, *WRITES, DELETE]
"""Every method whose first argument is a session id."""


def outcome(call: Call, store: StateStore, session_id: str) -> Any:
    """Return the result of a call, or the class of the not-found error that it raises."""
    try:
        return call.invoke(store, session_id)
    except NotFoundError as exc:
        return type(exc)
