"""Look-up of sessions by id, and conversion of rows to value objects: models never leave the back end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

from django.db.models import QuerySet, Subquery

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
)
from helix_store.engine.database import Database
from helix_store.engine.expressions import tenant_parameter
from helix_store.exceptions import IntegrityFault
from helix_store.models import InterruptRequest as InterruptRow
from helix_store.models import Run as RunRow
from helix_store.models import Session
from helix_store.sessions.deltas import Origin, remember_origin
from helix_store.sessions.reading import checkpoint_state, current_state
from helix_store.sessions.sql import CHECKPOINT_COLUMNS

__all__ = [
    "CHECKPOINT_HEAD_COLUMNS",
    "base_of",
    "checkpoint_from",
    "checkpoint_head_from",
    "current_from",
    "first_row",
    "interrupt_from",
    "pk_of",
    "run_from",
    "session_with_id",
    "sessions_with_ids",
]

R = TypeVar("R")

CHECKPOINT_HEAD_COLUMNS: Final = CHECKPOINT_COLUMNS[: CHECKPOINT_COLUMNS.index("version") + 1]
"""The columns of a listed checkpoint."""


def first_row(rows: QuerySet[Any, R]) -> R | None:
    """Return the first row of a query, or ``None``, without the ordering that ``first()`` adds."""
    return next(iter(rows[:1]), None)


def _head_values(row: Mapping[str, Any], session_id: str) -> dict[str, Any]:
    values = {name: row[name] for name in CHECKPOINT_HEAD_COLUMNS if name != "version"}
    try:
        # No constraint of the database restricts the statuses of checkpoints.
        status = SessionStatus(row["status"])
    except ValueError as exc:
        raise IntegrityFault(
            "A stored checkpoint has an unknown status; other rows are not affected."
        ) from exc
    return {**values, "session_id": session_id, "status": status}


def checkpoint_head_from(row: Mapping[str, Any], session_id: str) -> CheckpointHead:
    return CheckpointHead(**_head_values(row, session_id))


def base_of(base_id: int | None, payload: str | None) -> str | None:
    """Return the payload under a delta: an unreadable text if it was deleted, ``None`` without a base."""
    return None if base_id is None else payload or ""


def current_from(row: Mapping[str, Any]) -> SessionState:
    """Return the state in a row of `CURRENT_COLUMNS`; it remembers the base for its next step's delta."""
    base_id, payload = row["current__base_id"], row["current__payload"]
    base = base_of(base_id, row["current__base__payload"])
    state = current_state(row, payload, row["current__envelope"], base)
    if row["base_key"] is not None:
        if base is None:
            origin = Origin(row["base_key"], row["current_id"], row["current__version"], payload)
        else:
            origin = Origin(row["base_key"], base_id, row["current__base__version"], base)
        origin.latest_version = state.version
        remember_origin(state, origin)
    return state


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
        error=None if row.error is None else decode(row.error),
    )


def interrupt_from(row: InterruptRow, session_id: str) -> InterruptRequest:
    return InterruptRequest(
        session_id=session_id,
        kind=InterruptKind(row.kind),
        reason=row.reason,
        run_id=row.run_id,
        requested_at=row.requested_at,
    )


# --- Sessions by id ---------------------------------------------------------------------------------


def session_with_id(db: Database, session_id: str) -> QuerySet[Session]:
    """Return the session with this id."""
    return _of_tenant(db).filter(session_id=session_id)


def sessions_with_ids(db: Database, session_ids: Collection[str]) -> QuerySet[Session]:
    """Return the sessions with these ids."""
    return _of_tenant(db).filter(session_id__in=session_ids)


def pk_of(db: Database, session_id: str) -> Subquery:
    """Return a subquery for ``session_id`` of a child's row; it matches no row if the session does not exist.

    With a join, PostgreSQL would expect few rows and sort a whole history to find its newest page.
    """
    return Subquery(session_with_id(db, session_id).values("pk")[:1])


def _of_tenant(db: Database) -> QuerySet[Session]:
    return Session.objects.using(db.alias).filter(tenant=tenant_parameter(db.tenant))
