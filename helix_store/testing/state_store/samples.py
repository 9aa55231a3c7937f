"""Sample values, and calls that most tests make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from helix_store.core.contracts import StateStore
from helix_store.core.types import (
    SUSPENDED_STATUSES,
    Message,
    SessionMode,
    SessionState,
    SessionStatus,
    StagedChanges,
    StepCommit,
    StepInfo,
    SubSessionRef,
)

__all__ = [
    "FIELD_ROUNDS",
    "FIELD_VALUES",
    "commit_step",
    "contents",
    "full_session",
    "loaded",
    "message",
    "messages",
    "shown",
    "stage",
    "step",
    "touch_after",
]

_CALL: Final = {
    "tool_name": "ask",
    "input": {"question": "Go?", "options": []},
    "run_id": "run-1",
    "requested_at": 1_900_000_000_000,
    "deadline": 1_900_000_060_000,
    "approval_id": None,
}

_NEARLY_NOTHING: Final[list[Any]] = [None, {}, [], "", 0, False]

FIELD_VALUES: Final[list[tuple[str, Any]]] = [
    ("agent_type", "another agent"),
    *(("status", status) for status in SessionStatus),
    ("step_count", 7),
    ("resume_count", 3),
    ("mode", SessionMode.STANDARD),
    ("mode", SessionMode.PERSISTENT),
    ("custom_state", {"notes": ["a", {"b": None}], "count": 1, "ratio": 1.0}),
    *((field, value) for field in ("output", "error") for value in _NEARLY_NOTHING),
    ("output", {"answer": [1, 2.0]}),
    ("error", {"type": "Boom", "retryable": True}),
    ("failure_reason", None),
    ("failure_reason", ""),
    ("failure_reason", "the model gave up"),
    ("user_id", None),
    ("user_id", "user@example.com"),
    ("tags", []),
    ("tags", ["b", "a", "ä", ""]),
    ("metadata", {}),
    ("metadata", {"": ""}),
    ("metadata", {"plan": "pro"}),
    ("title", None),
    ("title", ""),
    ("title", "A trip to Łódź 🚂"),
    ("workspace_id", None),
    ("workspace_id", ""),
    ("workspace_id", "workspace"),
    ("directory", ""),
    ("directory", "/srv/project"),
    ("parent_session_id", None),
    ("parent_session_id", "parent"),
    ("root_session_id", "parent"),
    ("stream_id", None),
    ("stream_id", "stream"),
    ("pending_client_tool_calls", {}),
    ("pending_client_tool_calls", {"call-2": _CALL, "call-1": {**_CALL, "deadline": None}}),
    ("completed_client_tool_calls", {}),
    ("completed_client_tool_calls", {"call-0": {"result": [1, 2], "submitted_at": 1_900_000_000_001}}),
    ("client_tool_call_ownership", {}),
    ("client_tool_call_ownership", {"call-2": "child"}),
    ("suspension_kind", None),
    *(("suspension_kind", kind) for kind in SUSPENDED_STATUSES),
    ("suspension_context", None),
    ("suspension_context", {}),
    ("suspension_context", {"kind": "suspended_client_tool", "resume": {"at": 3}}),
    ("suspended_awaiting_children", None),
    ("suspended_awaiting_children", []),
    ("suspended_awaiting_children", [{"sub_session_id": "child"}]),
    ("suspended_step_id", None),
    ("suspended_step_id", "step-7"),
    ("tracing_context", None),
    ("tracing_context", {}),
    ("tracing_context", {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}),
    ("expires_at", None),
    ("expires_at", 0),
    ("expires_at", 1_900_000_000_123),
    ("workspace_refs", {}),
    ("workspace_refs", {"main": {"provider": "disk", "snapshot": "s-1"}}),
]
"""Every field that a caller may write, with values that must be read back unchanged."""


def _rounds() -> list[dict[str, Any]]:
    values: dict[str, list[Any]] = {}
    for field, value in FIELD_VALUES:
        values.setdefault(field, []).append(value)
    most = max(map(len, values.values()))
    return [
        {field: given[number] for field, given in values.items() if number < len(given)}
        for number in range(most)
    ]


FIELD_ROUNDS: Final = _rounds()
"""The same values, in as few states as possible: first each field's first value, then the second ones, …"""


def message(content: Any, role: str = "user") -> Message:
    return {"role": role, "content": content}


def messages(count: int, *, first: int = 1) -> list[Message]:
    return [message(f"message {number}") for number in range(first, first + count)]


def shown(state: SessionState, fields: Iterable[str]) -> dict[str, str]:
    """Return some fields as ``repr``, which tells ``1``, ``1.0`` and ``True`` apart."""
    return {field: repr(getattr(state, field)) for field in fields}


def step(number: int) -> StepInfo:
    return StepInfo(step_id=f"step-{number}", step_count=number, stream_sequence=number * 10)


def loaded(store: StateStore, session_id: str) -> SessionState:
    """Return the state of a session that must exist."""
    state = store.load_state(session_id)
    assert state is not None, f"the session {session_id!r} is gone"
    return state


def stage(
    store: StateStore, session_id: str, tool_call_id: str, *, step_id: str = "step-1", **changes: Any
) -> None:
    store.stage_changes(session_id, step_id, StagedChanges(tool_call_id=tool_call_id, **changes))


def commit_step(
    store: StateStore,
    session_id: str,
    number: int,
    *,
    append: Sequence[Message] = (),
    **changes: Any,
) -> StepCommit:
    """Commit one step of an agent: load, change, commit."""
    state = loaded(store, session_id)
    for name, value in changes.items():
        setattr(state, name, value)
    return store.save_state_and_promote_staging(session_id, state, list(append), step(number))


def full_session(store: StateStore, session_id: str) -> str:
    """Create a session that has every kind of data."""
    store.create_session(
        session_id, agent_type="agent", user_id="user", tags=["t"], metadata={"m": "1"}, custom_state={"n": 0}
    )
    store.start_run(session_id, "run-1")
    commit_step(store, session_id, 1, append=messages(2), custom_state={"n": 1})
    commit_step(store, session_id, 2, append=messages(2, first=3), custom_state={"n": 2})
    stage(store, session_id, "call-1", step_id="step-3", merge_changes={"n": 3})
    store.add_sub_session_refs(session_id, [SubSessionRef(sub_session_id="sub", agent_type="helper")])
    store.request_interrupt(session_id, reason="lunch")
    return session_id


def contents(store: StateStore, session_id: str) -> dict[str, str]:
    """Return everything stored for a session, as ``repr``, which tells ``1``, ``1.0`` and ``True`` apart."""
    heads = store.list_checkpoints(session_id, limit=200).items
    steps = ["step-1", "step-2", "step-3"]
    seen: dict[str, Any] = {
        "state": store.load_state(session_id),
        "messages": store.get_messages(session_id),
        "staged": [store.get_staged_changes(session_id, step_id) for step_id in steps],
        "checkpoints": [store.get_checkpoint(session_id, head.checkpoint_id) for head in heads],
        "runs": store.list_runs(session_id),
        "sub_sessions": store.get_sub_session_refs(session_id),
        "interrupt": store.check_interrupt(session_id),
    }
    return {name: repr(value) for name, value in seen.items()}


def touch_after(store: StateStore, session_id: str, time: datetime | None) -> None:
    """Write to a session until its update time is later than ``time``, even if the clock is coarse."""
    assert time is not None
    updated_at = time
    while updated_at <= time:
        store.update_status(session_id, SessionStatus.ACTIVE)
        updated_at = loaded(store, session_id).updated_at or time
