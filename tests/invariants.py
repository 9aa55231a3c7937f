"""What must hold for every session, read straight from the tables."""

from __future__ import annotations

from django.db.models import Count, Max, Min

from helix_store.models import Checkpoint, CheckpointKind, Message, Session
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
    return faults
