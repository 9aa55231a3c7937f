"""The layout of a session's state at rest; `helix_store.sessions.reading` reads it back.

``custom_state`` is the payload, and the rest of the state is the envelope; both are exact JSON text in the
row that holds a state. Fields that lists, filters and single writes need are also columns of the session's
head. The columns are authoritative for the *current* state, and the envelope for a checkpoint. An envelope
omits fields that have the default value of `SessionState`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

from helix_store.core import validation
from helix_store.core.limits import AS_STORED, Limits
from helix_store.core.payloads import (
    encode,
    join_fields,
    size_of,
    write_json,
)
from helix_store.core.types import RunStatus, SessionHead, SessionMode, SessionState, SessionStatus
from helix_store.exceptions import InvalidPayload, LimitExceeded
from helix_store.sessions.deltas import (
    Entries,
    encode_changed,
    encode_payload,
)
from helix_store.sessions.tool_calls import earliest_deadline

STORE_OWNED: Final = frozenset({"session_id", "version", "message_count", "created_at", "updated_at"})

HEAD_FIELDS: Final = tuple(field.name for field in fields(SessionHead))
"""The fields of a listed session; each is a column of the head."""

JSON_COLUMNS: Final = (
    "pending_client_tool_calls",
    "completed_client_tool_calls",
    "client_tool_call_ownership",
    "suspension_context",
    "suspended_awaiting_children",
    "tracing_context",
)
"""Payload text in columns of the head, because single writes for pending calls change only that."""

STATE_COLUMNS: Final = HEAD_FIELDS + JSON_COLUMNS

_CONTINUATION: Final = ("suspension_context", "suspended_awaiting_children", "suspended_step_id")

SUSPENSION_FIELDS: Final = ("suspension_kind", *_CONTINUATION, "tracing_context")
"""The fields that a suspension stores and a resume clears."""

WRITTEN_COLUMNS: Final = (
    *(name for name in STATE_COLUMNS if name not in STORE_OWNED),
    "pending_deadline",
)
"""The columns that are written when a state is saved."""

_CUSTOM_STATE_PATH: Final = "/custom_state"

_NEVER_NONE: Final = frozenset(
    {
        "pending_client_tool_calls",
        "completed_client_tool_calls",
        "client_tool_call_ownership",
        "workspace_refs",
    }
)
KEPT_IN_ENVELOPE_ONLY: Final = ("output", "error", "workspace_refs")
_TEXT_FIELDS: Final = (*JSON_COLUMNS, *KEPT_IN_ENVELOPE_ONLY)
_DEFAULT_TEXTS: Final = {name: "{}" if name in _NEVER_NONE else "null" for name in _TEXT_FIELDS}
_EMPTY_TEXTS: Final[dict[type, str]] = {dict: "{}", list: "[]"}
_SHAPES: Final[dict[str, type]] = {
    **dict.fromkeys((*JSON_COLUMNS, "workspace_refs"), dict),
    "suspended_awaiting_children": list,
}


ENVELOPE: Final = tuple(name for name in (*HEAD_FIELDS, *_TEXT_FIELDS) if name not in STORE_OWNED)
_ALWAYS_IN_ENVELOPE: Final = frozenset({"agent_type", "status"})
_DEFAULTS: Final = SessionState(session_id="any", agent_type="any")
_HEAD_DEFAULTS: Final = {
    name: getattr(_DEFAULTS, name) for name in HEAD_FIELDS if name not in STORE_OWNED | _ALWAYS_IN_ENVELOPE
}


@dataclass(frozen=True, slots=True)
class EncodedState:
    """A state that has passed the gate, ready to be written: its text, and values by head column."""

    payload: str
    envelope: str
    columns: dict[str, Any]
    size_bytes: int
    entries: Entries | None = None
    """The payload's entries, if they were needed to write it."""


def encode_state(
    state: SessionState,
    limits: Limits,
    session_id: str | None = None,
    *,
    step_count: int | None = None,
    reuse_texts: bool = False,
) -> EncodedState:
    """Check every field of a state and lay it out; ``step_count`` replaces that of the state.

    With ``reuse_texts``, unchanged entries of the payload take their text from the state that was loaded.
    Raises `InvalidPayload`, also if the state belongs to a session other than ``session_id``, and
    `LimitExceeded`: ``max_state_bytes`` counts payload and envelope together.
    """
    if not isinstance(state, SessionState):
        raise InvalidPayload(path="", reason=f"expected a SessionState, got {type(state).__name__}")
    state = _without_cleared(state)
    head = validation.fields(state, _STORED_HEAD_RULES if limits is AS_STORED else _HEAD_RULES)
    if step_count is not None:
        head["step_count"] = step_count
    if type(state.custom_state) is not dict:
        raise InvalidPayload(path=_CUSTOM_STATE_PATH, reason="expected a dict")
    payload, entries = encode_payload(
        state, limit=limits.max_state_bytes, path=_CUSTOM_STATE_PATH, reuse_texts=reuse_texts
    )
    texts = {}
    for name in _TEXT_FIELDS:
        text = _encoded_field(state, name, limits)
        if text != _DEFAULT_TEXTS[name]:
            texts[name] = text
    envelope = _envelope(head, texts)
    if session_id is not None and state.session_id != session_id:
        raise InvalidPayload(path="/session_id", reason="the state belongs to another session")
    return EncodedState(
        payload, envelope, _columns(head, texts, state), _checked_size(payload, envelope, limits), entries
    )


def _without_cleared(state: SessionState) -> SessionState:
    """Return the state to store, without fields that a resume cleared and that nobody has assigned since.

    Fields are compared by identity, because a reader may modify the returned context.
    """
    cleared = getattr(state, "_cleared", None)
    if cleared is None:
        return state
    stored = copy.copy(state)
    for name, value in cleared.items():
        if getattr(state, name) is value:
            setattr(stored, name, None)
    # There are few kinds, so assigning a kind may leave it unchanged: compare the other fields instead.
    if any(getattr(stored, name) is not None for name in _CONTINUATION):
        stored.suspension_kind = state.suspension_kind
    return stored


def encode_custom_state(custom_state: dict[str, Any], envelope: str, limits: Limits) -> str:
    """Encode a changed custom state for an envelope; ``max_state_bytes`` limits both together."""
    payload = encode(custom_state, limit=limits.max_state_bytes, path=_CUSTOM_STATE_PATH)
    _checked_size(payload, envelope, limits)
    return payload


def with_custom_state(
    encoded: EncodedState, before: dict[str, Any], custom_state: dict[str, Any], limits: Limits
) -> EncodedState:
    """Return an encoded state with a different custom state, which may share values with the previous one.

    Raises the errors of `encode_state`.
    """
    limit = limits.max_state_bytes
    entries: Entries | None = None
    if encoded.entries is None:
        payload = encode(custom_state, limit=limit, path=_CUSTOM_STATE_PATH)
    else:
        payload, entries = encode_changed(
            encoded.entries, before, custom_state, limit=limit, path=_CUSTOM_STATE_PATH
        )
    size_bytes = _checked_size(payload, encoded.envelope, limits)
    return replace(encoded, payload=payload, size_bytes=size_bytes, entries=entries)


def _checked_size(payload: str, envelope: str, limits: Limits) -> int:
    """Return the size of both together in bytes. Raises `LimitExceeded`."""
    size_bytes = size_of(payload, envelope)
    if size_bytes > limits.max_state_bytes:
        raise LimitExceeded(name="max_state_bytes", limit=limits.max_state_bytes, actual=size_bytes)
    return size_bytes


def _columns(head: dict[str, Any], texts: Mapping[str, str], state: SessionState) -> dict[str, Any]:
    """Return the values of the head's columns."""
    columns = dict(head)
    if head["expires_at"] is not None:
        columns["expires_at"] = validation.milliseconds_to_datetime(head["expires_at"])
    for name in JSON_COLUMNS:
        columns[name] = texts.get(name)
    pending = state.pending_client_tool_calls
    columns["pending_deadline"] = earliest_deadline(pending) if pending else None
    return columns


def _encoded_field(state: SessionState, name: str, limits: Limits) -> str:
    value = getattr(state, name)
    if value is None and name not in _NEVER_NONE:
        return "null"
    shape = _SHAPES.get(name)
    if shape is not None and type(value) is not shape:
        raise InvalidPayload(path=f"/{name}", reason=f"expected a {shape.__name__}")
    if type(value) in _EMPTY_TEXTS and not value:
        return _EMPTY_TEXTS[type(value)]
    return encode(value, limit=limits.max_state_bytes, path=f"/{name}")


def _envelope(head: dict[str, Any], texts: Mapping[str, str]) -> str:
    """Return the JSON object of the fields that differ from their default.

    It is joined from strings, because each of them may be nested as deeply as a whole document.
    """
    head = {
        name: value
        for name, value in head.items()
        if name in _ALWAYS_IN_ENVELOPE or value != _HEAD_DEFAULTS[name]
    }
    # The values in the head have been checked and hold no surrogates.
    return join_fields(write_json(head), texts)


def suspension_kind(value: Any, path: str = "suspension_kind") -> str:
    """Return the status of a waiting run, as text."""
    kind = validation.enum(RunStatus, value, path)
    if not kind.is_suspended:
        raise InvalidPayload(path=path, reason="expected one of the suspended statuses of a run")
    return kind.value


# The fields of the head that a caller may write; ``expires_at`` stays in milliseconds.
_HEAD_RULES: Final[dict[str, validation.Rule]] = {
    "agent_type": validation.identifier,
    "status": validation.enum_text(SessionStatus),
    "step_count": validation.whole_number,
    "resume_count": validation.whole_number,
    "mode": validation.optional(validation.enum_text(SessionMode)),
    "failure_reason": validation.failure_reason,
    "user_id": validation.user_id,
    "tags": validation.tags,
    "metadata": validation.metadata,
    "title": validation.title,
    "workspace_id": partial(validation.optional_identifier, empty=True),
    "directory": validation.directory,
    "parent_session_id": validation.optional_identifier,
    "root_session_id": validation.optional_identifier,
    "stream_id": validation.optional_identifier,
    "suspension_kind": validation.optional(suspension_kind),
    "suspended_step_id": validation.optional_identifier,
    "expires_at": validation.optional(validation.epoch_milliseconds),
}
_STORED_HEAD_RULES: Final[dict[str, validation.Rule]] = {
    **_HEAD_RULES,
    # The session is already stored, and the length of text was not always limited.
    **dict.fromkeys(("title", "directory", "tags", "metadata"), lambda value, _: value),
}
