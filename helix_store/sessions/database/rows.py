"""Rows as value objects. Models never leave the back end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from django.db.models import QuerySet

from helix_store.core.payloads import decode
from helix_store.core.types import (
    Checkpoint,
    CheckpointHead,
    InterruptKind,
    InterruptRequest,
    Run,
    RunStatus,
    SessionState,
    SessionStatus,
    SubSessionRef,
)
from helix_store.models import InterruptRequest as InterruptRow
from helix_store.models import Run as RunRow
from helix_store.models import SubSessionRef as SubSessionRow
from helix_store.sessions.layout import (
    STATE_COLUMNS,
    checkpoint_state,
    current_state,
)

__all__ = [
    "CHECKPOINT_COLUMNS",
    "CHECKPOINT_HEAD_COLUMNS",
    "CURRENT_COLUMNS",
    "base_of",
    "checkpoint_from",
    "checkpoint_head_from",
    "current_from",
    "first_row",
    "interrupt_from",
    "run_from",
    "sub_session_ref_from",
]

R = TypeVar("R")

CHECKPOINT_HEAD_COLUMNS = (
    "checkpoint_id",
    "run_id",
    "step_id",
    "step_count",
    "status",
    "message_count",
    "stream_sequence",
    "created_at",
    "version",
)
CHECKPOINT_COLUMNS = (
    *CHECKPOINT_HEAD_COLUMNS,
    "payload",
    "envelope",
    "base_id",
    "base__payload",
    "session__created_at",
)
CURRENT_COLUMNS = (
    *STATE_COLUMNS,
    "base_key",
    "current_id",
    "current__payload",
    "current__envelope",
    "current__base_id",
    "current__base__payload",
)
"""What the current state is read from, by the names of a session's row."""


def first_row(rows: QuerySet[Any, R]) -> R | None:
    """The first row of a query, or ``None``, without the ordering that ``first()`` adds."""
    return next(iter(rows[:1]), None)


def _head_values(row: Mapping[str, Any], session_id: str) -> dict[str, Any]:
    values = {name: row[name] for name in CHECKPOINT_HEAD_COLUMNS if name != "version"}
    return {**values, "session_id": session_id, "status": SessionStatus(row["status"])}


def checkpoint_head_from(row: Mapping[str, Any], session_id: str) -> CheckpointHead:
    return CheckpointHead(**_head_values(row, session_id))


def base_of(base_id: int | None, payload: str | None) -> str | None:
    """The payload that another one is a delta to; unreadable when it is gone, and ``None`` for no delta."""
    return None if base_id is None else payload or ""


def current_from(row: Mapping[str, Any]) -> SessionState:
    base = base_of(row["current__base_id"], row["current__base__payload"])
    return current_state(row, row["current__payload"], row["current__envelope"], base)


def checkpoint_from(row: Mapping[str, Any], session_id: str) -> Checkpoint:
    state = checkpoint_state(
        row["payload"],
        row["envelope"],
        base_of(row["base_id"], row["base__payload"]),
        session_id=session_id,
        version=row["version"],
        message_count=row["message_count"],
        created_at=row["session__created_at"],
        updated_at=row["created_at"],
    )
    return Checkpoint(state=state, **_head_values(row, session_id))


def run_from(row: RunRow, session_id: str) -> Run:
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
        error=_decoded(row.error),
    )


def sub_session_ref_from(row: SubSessionRow) -> SubSessionRef:
    return SubSessionRef(
        sub_session_id=row.sub_session_id,
        agent_type=row.agent_type,
        parent_tool_call_id=row.parent_tool_call_id,
        status=row.status,
        location="remote" if row.location == "remote" else "local",
        remote=_decoded(row.remote),
        output=_decoded(row.output),
        error=_decoded(row.error),
    )


def interrupt_from(row: InterruptRow, session_id: str) -> InterruptRequest:
    return InterruptRequest(
        session_id=session_id,
        kind=InterruptKind(row.kind),
        reason=row.reason,
        run_id=row.run_id,
        requested_at=row.requested_at,
    )


def _decoded(text: str | None) -> Any:
    return None if text is None else decode(text)
