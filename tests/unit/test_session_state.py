"""How a state is laid out: each field as deep as it may be by itself, and read back as it was."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from helix_store.core.limits import MAX_DEPTH, Limits
from helix_store.core.session_state import checkpoint_state, current_state, encode_state
from helix_store.core.types import SessionState
from helix_store.exceptions import LimitExceeded

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


@pytest.mark.parametrize("field", ["custom_state", *PAYLOAD_FIELDS])
def test_a_field_may_be_as_deep_as_a_document(field: str) -> None:
    state = a_state(**{field: nested(MAX_DEPTH)})
    assert read_back(state) == state
    with pytest.raises(LimitExceeded):
        encode_state(a_state(**{field: nested(MAX_DEPTH + 1)}), Limits())


@pytest.mark.parametrize("field", PAYLOAD_FIELDS)
@pytest.mark.parametrize("text", ["\ud83d\ude00", "~", "\x00", '"', "\\", "é"])
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


def test_the_head_decides_about_the_current_state() -> None:
    encoded = encode_state(a_state(title="then"), Limits())
    head = {"session_id": "s", "version": 2, "message_count": 0, "created_at": NOW, "updated_at": NOW}
    state = current_state({**encoded.columns, **head, "title": "now"}, encoded.payload, encoded.envelope)
    assert state.title == "now"
