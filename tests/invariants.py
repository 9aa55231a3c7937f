"""What must hold for every session, read straight from the tables."""

from __future__ import annotations

from django.db.models import Count, Exists, F, Max, Min, OuterRef, Q

from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Message,
    Session,
)
from tests.databases import CommittedDatabase

__all__ = ["broken_invariants"]


def broken_invariants(database: CommittedDatabase) -> list[str]:
    """One line per fault in the sessions of the test's tenant; empty when all is well."""
    sessions = Session.objects.using(database.alias).filter(tenant=database.tenant)
    return [f"{session.session_id}: {fault}" for session in sessions for fault in _faults(database, session)]


def _faults(database: CommittedDatabase, session: Session) -> list[str]:
    faults = []
    messages = Message.objects.using(database.alias).filter(session_id=session.pk)
    numbers = messages.aggregate(count=Count("pk"), first=Min("sequence"), last=Max("sequence"))
    if numbers["count"] != session.message_count:
        faults.append(f"counts {session.message_count} messages but has {numbers['count']}")
    if numbers["count"] and (numbers["first"], numbers["last"]) != (1, session.message_count):
        faults.append(f"messages run from {numbers['first']} to {numbers['last']}")
    checkpoints = Checkpoint.objects.using(database.alias).filter(session_id=session.pk)
    current_key = session.current_id or 0
    current = checkpoints.filter(pk=current_key).first()
    if current is None:
        faults.append("has no current state")
    elif (current.kind == CheckpointKind.STEP) != session.current_is_checkpoint:
        faults.append(f"takes its state of kind {current.kind} for something else")
    if checkpoints.filter(kind=CheckpointKind.STATE).exclude(pk=current_key).exists():
        faults.append("keeps a state nobody points at")
    # Graphs and snapshots number their checkpoints themselves.
    of_states = checkpoints.filter(kind__in=[CheckpointKind.STATE, CheckpointKind.STEP])
    if of_states.filter(version__gt=session.version).exists():
        faults.append("has a checkpoint from the future")
    if checkpoints.filter(kind=CheckpointKind.STEP, message_count__gt=session.message_count).exists():
        faults.append("has a checkpoint beyond its history")
    if session.base_key is not None and not session.current_is_checkpoint:
        faults.append("would take a state that is overwritten for the base of its next step")
    deltas = checkpoints.filter(base__isnull=False)
    if checkpoints.filter(kind=CheckpointKind.BASE, checkpoint_id__isnull=False).exists():
        faults.append("keeps a base that still has the name of a checkpoint")
    if checkpoints.filter(~Exists(deltas.filter(base_id=OuterRef("pk"))), kind=CheckpointKind.BASE).exists():
        faults.append("keeps a base that nothing is a delta from")
    if deltas.exclude(kind__in=[CheckpointKind.STATE, CheckpointKind.STEP]).exists():
        faults.append("stores as a delta what is no state of a session")
    sound = Q(
        base__session=session.pk,
        base__base__isnull=True,
        base__kind__in=[CheckpointKind.STEP, CheckpointKind.BASE],
        base__version__lt=F("version"),
    )
    faults += [f"has no sound base for version {row.version}" for row in deltas.exclude(sound)]
    return faults
