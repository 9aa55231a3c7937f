"""Staged changes in the database."""

from __future__ import annotations

from django.utils import timezone

from helix_store.core.guards import Guard
from helix_store.core.merging import promote_staged
from helix_store.core.payloads import decode
from helix_store.core.types import StagedChanges
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    reads,
    writes,
)
from helix_store.models import Session, StagedChange
from helix_store.sessions.database.current_state import read_current
from helix_store.sessions.database.locking import lock_session, session_key
from helix_store.sessions.database.sessions import replace_custom_state

__all__ = ["DatabaseStaging", "staged_from", "take_staged"]


class DatabaseStaging(DatabaseOperations):
    @writes
    def stage(self, session_id: str, step_id: str, tool_call_id: str, text: str) -> None:
        head = lock_session(self.db, session_id)
        # A conflict updates the row where it stands, so a repeated tool call keeps its place in the order.
        StagedChange.objects.using(self.db.alias).bulk_create(
            [
                StagedChange(
                    session_id=head.pk,
                    step_id=step_id,
                    tool_call_id=tool_call_id,
                    payload=text,
                    created_at=timezone.now(),
                )
            ],
            update_conflicts=True,
            unique_fields=["session", "step_id", "tool_call_id"],
            update_fields=["payload", "created_at"],
        )

    @reads
    def staged(self, session_id: str, step_id: str) -> list[StagedChanges]:
        key = session_key(self.db, session_id)
        rows = StagedChange.objects.using(self.db.alias).filter(session_id=key, step_id=step_id)
        return [staged_from(text) for _, text in sorted(rows.values_list("pk", "payload"))]

    @writes
    def promote(self, session_id: str, step_id: str, guard: Guard) -> int:
        head = lock_session(self.db, session_id, guard)
        staged = take_staged(self.db, head, step_id)
        if not staged:
            return head.version
        custom_state, envelope = read_current(self.db, head)
        promoted = promote_staged(custom_state, staged, limits=self.db.limits)
        return replace_custom_state(self.db, head, promoted, envelope)

    @writes
    def discard(self, session_id: str, step_id: str) -> int:
        head = lock_session(self.db, session_id)
        rows = StagedChange.objects.using(self.db.alias).filter(session_id=head.pk, step_id=step_id)
        return rows.delete()[0]


def take_staged(db: Database, head: Session, step_id: str) -> list[StagedChanges]:
    """Remove and return a step's staged changes, in staging order. One statement; the session is locked."""
    connection = db.connection
    table = connection.ops.quote_name(StagedChange._meta.db_table)
    rows = db.execute(
        f"DELETE FROM {table} WHERE session_id = %s AND step_id = %s RETURNING id, payload",
        [head.pk, step_id],
    )
    return [staged_from(payload) for _, payload in sorted(rows)]


def staged_from(text: str) -> StagedChanges:
    return StagedChanges.from_dict(decode(text))
