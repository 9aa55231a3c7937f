"""Functions that read a session's state in the form that `helix_store.sessions.layout` wrote, and runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from helix_store.core import validation
from helix_store.core.moments import as_utc
from helix_store.core.payloads import decode, decode_object, decode_optional
from helix_store.core.types import (
    InterruptKind,
    InterruptRequest,
    Run,
    RunStatus,
    SessionHead,
    SessionMode,
    SessionState,
    SessionStatus,
    SubSessionRef,
)
from helix_store.exceptions import IntegrityFault, InvalidPayload
from helix_store.sessions.approvals import current_calls
from helix_store.sessions.deltas import decode_with_delta, remember_full
from helix_store.sessions.layout import (
    ENVELOPE,
    HEAD_FIELDS,
    JSON_COLUMNS,
    KEPT_IN_ENVELOPE_ONLY,
    suspension_kind,
)


def _stored_types(hint: Any) -> tuple[type, ...]:
    """Return the types of a stored field, in which enumeration members are text."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    types = [get_origin(option) or option for option in options]
    return tuple(str if issubclass(kind, str) else kind for kind in types)


# These are not the rules for writing, because those rules may change, but stored rows do not.
_STORED_TYPES: Final = {
    name: _stored_types(hint) for name, hint in get_type_hints(SessionState).items() if hint is not Any
}


_MOMENTS: Final = (
    "created_at",
    "updated_at",
    "expires_at",
    "started_at",
    "ended_at",
    "requested_at",
    "session__created_at",
)


def current_state(
    columns: Mapping[str, Any], payload: str, envelope: str, base: str | None = None
) -> SessionState:
    """Return the current state; ``columns`` holds every name of `STATE_COLUMNS` as stored.

    With a ``base``, the payload is a delta from that full payload.
    """
    kept = decode_object(envelope)
    fields: dict[str, Any] = {name: kept[name] for name in KEPT_IN_ENVELOPE_ONLY if name in kept}
    fields |= {name: decode(columns[name]) for name in JSON_COLUMNS if columns[name] is not None}
    _require_shapes({**fields, "tags": columns["tags"], "metadata": columns["metadata"]})
    if "pending_client_tool_calls" in fields:
        fields["pending_client_tool_calls"] = current_calls(fields["pending_client_tool_calls"])
    state = SessionState(custom_state=custom_state_of(payload, base), **fields, **head_values(columns))
    state._has_posts = columns.get("next_post_at") is not None
    return state


def by_column(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return a statement's row by column. Moments, which SQLite returns as naive or as text, are aware."""
    row = dict(zip(names, values, strict=True))
    for name in _MOMENTS:
        value = row.get(name)
        if value is not None and getattr(value, "tzinfo", None) is None:
            row[name] = as_utc(value)
    return row


def base_of(base_id: int | None, payload: str | None) -> str | None:
    """Return the payload under a delta: unreadable text if it was deleted, ``None`` without a base."""
    return None if base_id is None else payload or ""


def current_from(row: Mapping[str, Any]) -> SessionState:
    """Return the state in a row of `CURRENT_COLUMNS`; it remembers the base for its next step's delta."""
    base_id, payload = row["current__base_id"], row["current__payload"]
    base = base_of(base_id, row["current__base__payload"])
    state = current_state(row, payload, row["current__envelope"], base)
    if row["base_key"] is not None:
        if base is None:
            remember_full(state, row["base_key"], row["current_id"], row["current__version"], payload)
        else:
            remember_full(state, row["base_key"], base_id, row["current__base__version"], base)
    return state


def stored_state(names: Sequence[str], values: Sequence[Any]) -> SessionState:
    """Return the state in the columns of a row, in which tags and metadata are text."""
    row = by_column(names, values)
    row["tags"], row["metadata"] = _from_jsonb(row["tags"]), _from_jsonb(row["metadata"])
    return current_from(row)


def _from_jsonb(text: str) -> Any:
    # Most values are empty, and starting the decoder takes longer than decoding.
    return [] if text == "[]" else {} if text == "{}" else json.loads(text)


def _require_shapes(fields: Mapping[str, Any]) -> None:
    """Raise `IntegrityFault` unless each stored field has a type that a state may have."""
    for name, value in fields.items():
        types = _STORED_TYPES.get(name)
        if types is not None and type(value) not in types:
            raise IntegrityFault(
                f"The stored {name} of a session has another type; other rows are unaffected."
            )
    if not _has_texts(fields.get("tags", ())) or not _has_texts(fields.get("metadata", {}).values()):
        raise IntegrityFault("Stored tags or metadata are not text; other rows are not affected.")


def _has_texts(values: Iterable[Any]) -> bool:
    return all(type(value) is str for value in values)


def listed_head(columns: Mapping[str, Any]) -> SessionHead:
    """Return the session for a list, which must not fail: omit tags and metadata if their shape is wrong."""
    values = head_values(columns)
    try:
        _require_shapes({"tags": values["tags"], "metadata": values["metadata"]})
    except IntegrityFault:
        values |= {"tags": [], "metadata": {}}
    return SessionHead(**values)


def head_values(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return head columns as values of `SessionHead` and `SessionState`."""
    values = {name: columns[name] for name in HEAD_FIELDS}
    values["status"] = SessionStatus(values["status"])
    values["mode"] = None if values["mode"] is None else SessionMode(values["mode"])
    kind = values["suspension_kind"]
    values["suspension_kind"] = None if kind is None else RunStatus(kind)
    if values["expires_at"] is not None:
        values["expires_at"] = validation.datetime_to_milliseconds(values["expires_at"])
    return values


def checkpoint_state(
    payload: str,
    envelope: str,
    base: str | None = None,
    *,
    session_id: str,
    version: int,
    message_count: int,
    created_at: datetime,
    updated_at: datetime,
) -> SessionState:
    """Return the state that a checkpoint recorded; with a ``base``, the payload is a delta from it."""
    fields = decode_object(envelope)
    _require_shapes(fields)
    try:
        return SessionState(
            session_id=session_id,
            version=version,
            message_count=message_count,
            created_at=created_at,
            updated_at=updated_at,
            custom_state=custom_state_of(payload, base),
            **_with_enums({name: fields[name] for name in ENVELOPE if name in fields}),
        )
    except (KeyError, TypeError, ValueError, InvalidPayload) as exc:
        raise IntegrityFault("A stored checkpoint does not hold a session state.") from exc


def _with_enums(fields: dict[str, Any]) -> dict[str, Any]:
    fields["status"] = SessionStatus(fields["status"])
    fields["mode"] = None if fields.get("mode") is None else SessionMode(fields["mode"])
    kind = fields.get("suspension_kind")
    fields["suspension_kind"] = None if kind is None else RunStatus(suspension_kind(kind))
    return fields


def custom_state_of(payload: str, base: str | None = None) -> dict[str, Any]:
    """Return the custom state in a payload, or in a payload that is a delta from a base."""
    return decode_object(payload) if base is None else decode_with_delta(base, payload)


def sub_session_ref_from(stored: Any) -> SubSessionRef:
    """Return the value object for a row or an `EncodedRef`."""
    return SubSessionRef(
        sub_session_id=stored.sub_session_id,
        agent_type=stored.agent_type,
        parent_tool_call_id=stored.parent_tool_call_id,
        status=stored.status,
        location="remote" if stored.location == "remote" else "local",
        remote=decode_optional(stored.remote),
        output=decode_optional(stored.output),
        error=decode_optional(stored.error),
    )


def run_from(row: Any, session_id: str) -> Run:
    return Run(
        run_id=row.run_id,
        session_id=session_id,
        turn=row.turn,
        status=RunStatus(row.status),
        step_count=row.step_count,
        start_sequence=row.start_sequence,
        started_at=row.started_at,
        ended_at=row.ended_at,
        completion_reason=row.completion_reason,
        error=None if row.error is None else decode(row.error),
    )


def stored_run(session_id: str, names: Sequence[str], values: Sequence[Any]) -> Run:
    """Return the run in the columns of a row."""
    return run_from(SimpleNamespace(**by_column(names, values)), session_id)


def stored_interrupt(session_id: str, names: Sequence[str], values: Sequence[Any]) -> InterruptRequest:
    """Return the interrupt request in the columns of a row."""
    return interrupt_from(SimpleNamespace(**by_column(names, values)), session_id)


def interrupt_from(row: Any, session_id: str) -> InterruptRequest:
    return InterruptRequest(
        session_id=session_id,
        kind=InterruptKind(row.kind),
        reason=row.reason,
        run_id=row.run_id,
        requested_at=row.requested_at,
    )
