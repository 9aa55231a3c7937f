"""Look-up of sessions by id, and conversion of checkpoints' rows: models never leave the back end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from django.db.models import QuerySet, Subquery

from helix_store.core.types import (
    Checkpoint,
    CheckpointHead,
    SessionStatus,
)
from helix_store.engine.database import Database
from helix_store.engine.expressions import tenant_parameter
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.sessions.reading import base_of, checkpoint_state
from helix_store.sessions.sql import CHECKPOINT_HEAD_COLUMNS

R = TypeVar("R")


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
