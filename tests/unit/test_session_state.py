"""How a state is laid out: each field as deep as it may be by itself, and read back as it was."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from helix_store.core.limits import MAX_DEPTH, Limits
from helix_store.core.payloads import decode, encode
from helix_store.core.types import (
    RunStatus,
    SessionMode,
    SessionState,
    SessionStatus,
)
from helix_store.exceptions import (
    IntegrityFault,
    InvalidPayload,
    LimitExceeded,
)
from helix_store.sessions.state import (
    WRITTEN_COLUMNS,
    checkpoint_state,
    current_state,
    delta_between,
    encode_state,
    split,
)
from tests.cells import for_each

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PAYLOAD_FIELDS = ["output", "error", "workspace_refs", "suspension_context", "pending_client_tool_calls"]


def nested(depth: int) -> dict[str, Any]:
    value: Any = "leaf"
    for _ in range(depth):
        value = {"in": value}
    return value  # type: ignore[no-any-return]


def read_back(state: SessionState) -> SessionState:
    encoded = encode_state(state, Limits())
    return checkpoint_state(
        encoded.payload,
        encoded.envelope,
        session_id=state.session_id,
        version=state.version,
        message_count=state.message_count,
        created_at=NOW,
        updated_at=NOW,
    )


def a_state(**fields: Any) -> SessionState:
    return SessionState(session_id="s", agent_type="t", created_at=NOW, updated_at=NOW, **fields)


@for_each("field", ["custom_state", *PAYLOAD_FIELDS])
def test_a_field_may_be_as_deep_as_a_document(field: str) -> None:
    state = a_state(**{field: nested(MAX_DEPTH)})
    assert read_back(state) == state
    with pytest.raises(LimitExceeded):
        encode_state(a_state(**{field: nested(MAX_DEPTH + 1)}), Limits())


@for_each("field", PAYLOAD_FIELDS)
@for_each("text", ["\ud83d\ude00", "~", "\x00", '"', "\\", "é"])
def test_a_field_keeps_every_text(field: str, text: str) -> None:
    state = a_state(**{field: {text: [text, {"deep": text}]}}, title="é~")
    assert read_back(state) == state


def test_empty_fields_take_no_room_and_stay_apart_from_none() -> None:
    empty = a_state(suspension_context={}, suspended_awaiting_children=[])
    columns = encode_state(empty, Limits()).columns
    assert (columns["suspension_context"], columns["suspended_awaiting_children"]) == ("{}", "[]")
    assert columns["pending_client_tool_calls"] is None
    assert read_back(empty) == empty
    none = a_state()
    assert encode_state(none, Limits()).columns["suspension_context"] is None
    assert read_back(none) == none


def test_an_envelope_holds_what_differs_from_the_default() -> None:
    given = {
        "status": SessionStatus.COMPLETED,
        "step_count": 1,
        "resume_count": 2,
        "mode": SessionMode.STANDARD,
        "output": [],
        "error": {},
        "failure_reason": "f",
        "user_id": "u",
        "tags": ["t"],
        "metadata": {"k": "v"},
        "title": "t",
        "workspace_id": "w",
        "directory": "d",
        "parent_session_id": "p",
        "root_session_id": "r",
        "stream_id": "s",
        "pending_client_tool_calls": {"c": {}},
        "completed_client_tool_calls": {"c": {}},
        "client_tool_call_ownership": {"c": "s"},
        "suspension_kind": RunStatus.SUSPENDED_CLIENT_TOOL,
        "suspension_context": {},
        "suspended_awaiting_children": [],
        "suspended_step_id": "s",
        "tracing_context": {},
        "expires_at": 0,
        "workspace_refs": {"w": {}},
    }
    bare = encode_state(a_state(), Limits()).envelope
    assert bare == '{"agent_type":"t","status":"active"}'
    full = a_state(**given)
    assert set(decode(encode_state(full, Limits()).envelope)) == {"agent_type", *given}
    assert read_back(full) == full
    for name, value in given.items():
        one = a_state(**{name: value})
        assert set(decode(encode_state(one, Limits()).envelope)) == {"agent_type", "status", name}
        assert read_back(one) == one


@pytest.mark.parametrize("field", ["failure_reason", "title", "workspace_id"])
def test_an_empty_text_stays_apart_from_none(field: str) -> None:
    assert getattr(read_back(a_state(**{field: ""})), field) == ""


@for_each("field", ["output", "error"])
@for_each("value", [0, 0.0, -0.0, False, "", [], {}, [{}], {"": None}])
def test_an_outcome_keeps_every_kind_of_nothing(field: str, value: Any) -> None:
    assert repr(getattr(read_back(a_state(**{field: value})), field)) == repr(value)


@for_each("field", ["workspace_refs", "pending_client_tool_calls"])
@for_each("value", [None, [], (), 0, "", False])
def test_a_field_of_names_takes_only_a_dict(field: str, value: Any) -> None:
    with pytest.raises(InvalidPayload):
        encode_state(a_state(**{field: value}), Limits())


def test_every_column_that_a_state_brings_along_is_named() -> None:
    columns = encode_state(a_state(), Limits()).columns
    assert sorted(columns) == sorted(WRITTEN_COLUMNS)


def test_a_state_is_read_from_a_delta_and_its_base() -> None:
    before = encode_state(a_state(custom_state={"kept": "x" * 200, "gone": 1}), Limits())
    state = a_state(custom_state={"kept": "x" * 200, "new": 1.0})
    after = encode_state(state, Limits())
    old, new = split(before.payload), split(after.payload)
    assert old is not None
    assert new is not None
    delta = delta_between(old, new)
    assert delta is not None
    head = {"session_id": "s", "version": 0, "message_count": 0, "created_at": NOW, "updated_at": NOW}
    assert current_state({**after.columns, **head}, delta, after.envelope, before.payload) == state
    assert checkpoint_state(delta, after.envelope, before.payload, **head) == state  # type: ignore[arg-type]


@pytest.mark.parametrize("base", ["", "[]", "{}", "~"])
def test_a_delta_without_its_base_is_no_state(base: str) -> None:
    columns = encode_state(a_state(), Limits()).columns
    head = {"session_id": "s", "version": 0, "message_count": 0, "created_at": NOW, "updated_at": NOW}
    delta = encode({"removed": ["gone"], "set": {}})
    with pytest.raises(IntegrityFault):
        current_state({**columns, **head}, delta, "{}", base)


def test_the_head_decides_about_the_current_state() -> None:
    encoded = encode_state(a_state(title="then"), Limits())
    head = {"session_id": "s", "version": 2, "message_count": 0, "created_at": NOW, "updated_at": NOW}
    state = current_state({**encoded.columns, **head, "title": "now"}, encoded.payload, encoded.envelope)
    assert state.title == "now"
