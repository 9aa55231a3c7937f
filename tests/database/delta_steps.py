"""Steps whose states are stored as deltas, written row by row."""

from __future__ import annotations

from typing import Any

from helix_store.core.payloads import encode
from helix_store.engine.database import Database
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Session,
)
from helix_store.sessions.database.bases import bases, new_base_key
from tests.factories import CheckpointFactory

__all__ = ["scope_of", "write_step"]


def scope_of(session: Session) -> Database:
    return Database(session._state.db, session.tenant, None)


def write_step(session: Session, custom_state: dict[str, Any], **columns: Any) -> Checkpoint:
    """The session's next step: a delta when this process knows what the session builds on, else in full."""
    session.refresh_from_db()
    db = scope_of(session)
    known = bases.get(db, session.session_id)
    delta = known.delta_to(encode(custom_state)) if known is not None else None
    if delta is not None and delta.base_key == session.base_key:
        columns |= {"payload": delta.text, "base_id": delta.base_id}
    else:
        session.base_key = new_base_key()
    if not session.current_is_checkpoint:
        session.checkpoints.filter(kind=CheckpointKind.STATE).delete()
    state = {"custom_state": custom_state, "step_count": session.step_count}
    row: Checkpoint = CheckpointFactory.create(session=session, state=state, **columns)
    session.current, session.current_is_checkpoint = row, True
    session.save(update_fields=["current", "current_is_checkpoint", "base_key"])
    if row.base_id is None and session.base_key is not None:
        bases.keep(db, session.session_id, session.base_key, row.pk, row.payload)
    return row
