"""Steps whose states are stored as deltas, written row by row."""

from __future__ import annotations

from typing import Any

from helix_store.core.payloads import encode
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.sessions.state import Origin, loaded_of, stored_payload
from helix_store.stores import DatabaseStateStore
from tests.factories import CheckpointFactory

__all__ = ["forget_origin", "learn_origin", "write_step"]

_origins: dict[int, Origin | None] = {}
"""What a worker that makes all steps of a session would remember, by the session's key."""


def forget_origin(session: Session) -> None:
    _origins.pop(session.pk, None)


def learn_origin(store: DatabaseStateStore, session: Session) -> Origin | None:
    """What a worker knows that has loaded the state."""
    state = store.load_state(session.session_id)
    assert state is not None
    _origins[session.pk] = loaded_of(state).origin
    return _origins[session.pk]


def write_step(session: Session, custom_state: dict[str, Any], **columns: Any) -> Checkpoint:
    """The session's next step: a delta from what is known if the head still has its key, else in full."""
    session.refresh_from_db()
    origin = _origins.get(session.pk)
    if origin is not None and origin.key != session.base_key:
        origin = None
    stored = stored_payload(origin, encode(custom_state), None, version=session.version + 1)
    if stored.is_delta:
        columns |= {"payload": stored.text, "base_id": stored.base_id}
    session.base_key = stored.base_key
    if not session.current_is_checkpoint:
        session.checkpoints.filter(kind=CheckpointKind.STATE).delete()
    state = {"custom_state": custom_state, "step_count": session.step_count}
    row: Checkpoint = CheckpointFactory.create(session=session, state=state, **columns)
    session.current, session.current_is_checkpoint = row, True
    session.save(update_fields=["current", "current_is_checkpoint", "base_key"])
    if row.base_id is None:
        _origins[session.pk] = Origin(stored.base_key, row.pk, row.version, row.payload)
    return row
