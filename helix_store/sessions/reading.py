"""Reading a stored state, and finding the newest one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from django.db.models import Exists, OuterRef, QuerySet, Subquery

from helix_store.core import validation
from helix_store.core.moments import as_utc
from helix_store.core.payloads import decode, decode_object, decode_optional, size_of
from helix_store.core.types import (
    CheckpointSource,
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
from helix_store.engine.database import Database
from helix_store.exceptions import IntegrityFault, InvalidPayload
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.sessions.deltas import apply_delta, decode_with_delta
from helix_store.sessions.state import (
    ENVELOPE,
    HEAD_FIELDS,
    JSON_COLUMNS,
    KEPT_IN_ENVELOPE_ONLY,
    remember_full,
    set_loaded,
    suspension_kind,
)
from helix_store.sessions.tool_calls import LiveDecisions, current_calls


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
        live = LiveDecisions(columns.get("live_decisions"))
        fields["pending_client_tool_calls"] = current_calls(fields["pending_client_tool_calls"], live)
    state = SessionState(custom_state=custom_state_of(payload, base), **fields, **head_values(columns))
    set_loaded(state, has_posts=columns.get("next_post_at") is not None)
    return state


def require_readable(columns: Mapping[str, Any]) -> None:
    """Raise `IntegrityFault` unless the columns of a head have values that `current_state` can read."""
    fields = {name: decode(columns[name]) for name in JSON_COLUMNS if columns.get(name) is not None}
    _require_shapes(fields)
    if "pending_client_tool_calls" in fields:
        current_calls(fields["pending_client_tool_calls"], LiveDecisions(columns.get("live_decisions")))
    decode_optional(columns.get("typed_metadata"))


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


def step_checkpoints(db: Database, key: int | Subquery) -> QuerySet[Checkpoint]:
    """Return the checkpoints that a session's steps have made; ``key`` is the session's key."""
    return Checkpoint.objects.using(db.alias).filter(session_id=key, kind=CheckpointKind.STEP, namespace="")


def current_key(head: Session) -> int:
    """Return the key of the row that holds a locked session's current state."""
    if head.current_id is None:
        raise IntegrityFault("A session has no current state.")
    return head.current_id


def read_current(db: Database, head: Session) -> tuple[dict[str, Any], str]:
    """Return the custom state and envelope of a locked session's current state."""
    payload, envelope, base_id, base = (
        Checkpoint.objects.using(db.alias)
        .filter(session_id=head.pk)
        .values_list("payload", "envelope", "base_id", "base__payload")
        .get(pk=current_key(head))
    )
    return custom_state_of(payload, base_of(base_id, base)), envelope


def write_current(
    db: Database, head: Session, *, payload: str, envelope: str, version: int, at: datetime
) -> dict[str, object]:
    """Store a state that no checkpoint records, and return the head columns that point to it.

    A checkpoint is never overwritten. A row of kind ``state`` is overwritten, so it must not be the base of a
    delta.
    """
    rows = Checkpoint.objects.using(db.alias).filter(session_id=head.pk)
    columns = {
        "version": version,
        "payload": payload,
        "base_id": None,
        "envelope": envelope,
        "size_bytes": size_of(payload) + size_of(envelope),
        "created_at": at,
    }
    if head.current_id is not None and not head.current_is_checkpoint:
        rows.filter(pk=head.current_id).update(**columns)
        return {}
    row = rows.create(
        session_id=head.pk, kind=CheckpointKind.STATE, source=CheckpointSource.INPUT.value, **columns
    )
    return {"current_id": row.pk, "current_is_checkpoint": False, "base_key": None}


def drop_checkpoints(db: Database, head: Session, doomed: QuerySet[Checkpoint]) -> int:
    """Delete step checkpoints of a locked session and return their number; the current state is kept.

    If the newest checkpoint holds the current state, it is converted from a checkpoint to a plain state
    stored in full. Bases that remaining checkpoints need for their deltas are kept as bases.
    """
    demoted = 0
    if head.current_is_checkpoint:
        demoted = doomed.filter(pk=current_key(head)).update(kind=CheckpointKind.STATE, checkpoint_id=None)
    if demoted:
        row = Checkpoint.objects.using(db.alias).filter(session_id=head.pk, pk=current_key(head))
        payload, base_id, base = row.values_list("payload", "base_id", "base__payload").get()
        if base_id is not None:
            row.update(payload=apply_delta(base_of(base_id, base) or "", payload), base_id=None)
        Session.objects.using(db.alias).filter(pk=head.pk).update(current_is_checkpoint=False, base_key=None)
        head.current_is_checkpoint, head.base_key = False, None
    # This includes bases that only the deleted checkpoints need; `drop_unneeded_bases` removes them.
    deltas = Checkpoint.objects.using(db.alias).filter(session_id=head.pk, base__isnull=False)
    needed = doomed.filter(pk__in=deltas.values("base_id"))
    demoted += needed.update(kind=CheckpointKind.BASE, checkpoint_id=None)
    deleted, _ = doomed.delete()
    drop_unneeded_bases(db, head)
    return demoted + deleted


def keep_checkpoints(db: Database, head: Session, keep: int, before: datetime | None = None) -> int:
    """Delete the step checkpoints beyond the newest ``keep``, or of these only those made before a time.

    Return their number.
    """
    checkpoints = step_checkpoints(db, head.pk)
    versions = checkpoints.order_by("-version").values_list("version", flat=True)
    newest_to_go = next(iter(versions[keep : keep + 1]), None)
    if newest_to_go is None:
        return 0
    doomed = checkpoints.filter(version__lte=newest_to_go)
    if before is not None:
        doomed = doomed.filter(created_at__lt=before)
    return drop_checkpoints(db, head, doomed)


def drop_unneeded_bases(db: Database, head: Session) -> None:
    """Delete the bases of a locked session that no remaining delta refers to."""
    rows = Checkpoint.objects.using(db.alias).filter(session_id=head.pk)
    needed = rows.filter(base_id=OuterRef("pk"))
    rows.filter(~Exists(needed), kind=CheckpointKind.BASE).delete()
