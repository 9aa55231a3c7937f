"""Storage of the current state: once, in the row that the head points at."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet, Subquery

from helix_store.core.payloads import size_of
from helix_store.core.types import CheckpointSource
from helix_store.engine.database import Database
from helix_store.exceptions import IntegrityFault
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Session,
)
from helix_store.sessions.deltas import apply_delta
from helix_store.sessions.reading import base_of, custom_state_of


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
