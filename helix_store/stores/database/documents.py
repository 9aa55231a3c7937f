"""Where the current state is written: once, in the row the head points at."""

from __future__ import annotations

from datetime import datetime

from django.db.models import QuerySet

from helix_store.core.payloads import size_of
from helix_store.core.types import CheckpointSource
from helix_store.exceptions import IntegrityFault
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.stores.database.scope import Scope

__all__ = ["current_key", "drop_checkpoints", "read_current", "write_current"]


def current_key(head: Session) -> int:
    """The row that holds a locked session's current state."""
    if head.current_id is None:
        raise IntegrityFault("A session has no current state.")
    return head.current_id


def read_current(scope: Scope, head: Session) -> tuple[str, str]:
    """Payload and envelope of a locked session's current state."""
    return Checkpoint.objects.using(scope.alias).values_list("payload", "envelope").get(pk=current_key(head))


def write_current(
    scope: Scope, head: Session, *, payload: str, envelope: str, version: int, at: datetime
) -> dict[str, object]:
    """Store a state that no checkpoint records, and return the head columns that point at it.

    A checkpoint is never overwritten; a state of its own is.
    """
    rows = Checkpoint.objects.using(scope.alias)
    columns = {
        "version": version,
        "payload": payload,
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
    return {"current_id": row.pk, "current_is_checkpoint": False}


def drop_checkpoints(scope: Scope, head: Session, doomed: QuerySet[Checkpoint]) -> int:
    """Delete step checkpoints of a locked session and return how many; the current state stays.

    When the newest checkpoint holds the current state, it stops being a checkpoint and stays as the state.
    """
    demoted = 0
    if head.current_is_checkpoint:
        demoted = doomed.filter(pk=current_key(head)).update(kind=CheckpointKind.STATE, checkpoint_id=None)
    if demoted:
        Session.objects.using(scope.alias).filter(pk=head.pk).update(current_is_checkpoint=False)
        head.current_is_checkpoint = False
    deleted, _ = doomed.delete()
    return demoted + deleted
