"""The atomic step: the canonical write of every agent loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Exists, FilteredRelation, OuterRef, Q
from django.utils import timezone

from helix_store.core.ids import checkpoint_id
from helix_store.core.merging import with_staged
from helix_store.core.types import (
    CheckpointSource,
    StagedChanges,
    StepCommit,
)
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    writes,
)
from helix_store.engine.rows import (
    insert_row,
    update_row,
)
from helix_store.exceptions import IdempotencyConflict, RunNotFound
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Operation,
    Run,
    Session,
)
from helix_store.sessions.database.bases import bases, stored_payload
from helix_store.sessions.database.locking import (
    admit,
    bump,
    lock_session,
    unlike,
)
from helix_store.sessions.database.messages import insert_messages
from helix_store.sessions.database.staging import take_staged
from helix_store.sessions.layout import (
    WRITTEN_COLUMNS,
    EncodedState,
    settled_mode,
    with_custom_state,
)
from helix_store.sessions.members import NO_MEMBERS, Members
from helix_store.sessions.requests import StepRequest

__all__ = ["DatabaseSteps"]


class DatabaseSteps(DatabaseOperations):
    """Statements of a step, whatever the history's length: lock, staging, messages, checkpoint, head.

    One more when a run or an operation id is given, and one more to record the operation.
    """

    @writes
    def commit(self, request: StepRequest) -> StepCommit:
        head = lock_session(self.db, request.session_id, None, *WRITTEN_COLUMNS)
        digest = request.digest() if request.operation_id is not None else ""
        claims = _read_claims(self.db, head, request)
        if claims.operation is not None:
            return claims.operation.replay(request.operation_id or "", digest)
        admit(self.db, head, request.guard)
        if request.run_id is not None and not claims.run_exists:
            raise RunNotFound(request.run_id)
        mode = settled_mode(head.mode, request.encoded.columns["mode"])
        at = timezone.now()
        encoded = self._promoted(request, take_staged(self.db, head, request.step.step_id))
        message_count = insert_messages(self.db, head, request.messages, at=at)
        commit = StepCommit(
            checkpoint_id(request.session_id, request.step.step_count), new_version=head.version + 1
        )
        pointer = _write_checkpoint(
            self.db, head, request, commit, encoded, message_count=message_count, at=at
        )
        columns = {**encoded.columns, **pointer, "mode": mode, "message_count": message_count}
        bump(self.db, head, at=at, **unlike(head, columns))
        if request.operation_id is not None:
            _record_operation(self.db, head, request.operation_id, digest, commit, at=at)
        return commit

    def earlier_members(self, session_id: str) -> Members:
        base = bases.get(self.db, session_id)
        return NO_MEMBERS if base is None or base.members is None else base.members

    def _promoted(self, request: StepRequest, staged: Sequence[StagedChanges]) -> EncodedState:
        """The state with what was staged."""
        if not staged:
            return request.encoded
        limits = self.db.limits
        promoted = with_staged(request.custom_state, staged, limits=limits)
        return with_custom_state(request.encoded, request.custom_state, promoted, limits)


@dataclass(frozen=True, slots=True)
class _RecordedOperation:
    digest: str
    checkpoint_id: str
    version: int

    def replay(self, operation_id: str, digest: str) -> StepCommit:
        if self.digest != digest:
            raise IdempotencyConflict(operation_id)
        return StepCommit(self.checkpoint_id, new_version=self.version)


@dataclass(frozen=True, slots=True)
class _Claims:
    """What a request says exists already: its run, and an earlier call under its operation id."""

    run_exists: bool = False
    operation: _RecordedOperation | None = None


def _read_claims(db: Database, head: Session, request: StepRequest) -> _Claims:
    """Look both up in one statement, after the lock: an earlier look could miss a twin's commit."""
    if request.run_id is None and request.operation_id is None:
        return _Claims()
    run_exists, *operation = (
        Session.objects.using(db.alias)
        .filter(pk=head.pk)
        .annotate(
            operation=FilteredRelation(
                "operations", condition=Q(operations__operation_id=request.operation_id)
            ),
            run_exists=Exists(Run.objects.filter(session_id=OuterRef("pk"), run_id=request.run_id)),
        )
        .values_list("run_exists", "operation__digest", "operation__checkpoint_id", "operation__version")
        .get()
    )
    found = operation[0] is not None
    return _Claims(run_exists, _RecordedOperation(*operation) if found else None)


def _write_checkpoint(
    db: Database,
    head: Session,
    request: StepRequest,
    commit: StepCommit,
    encoded: EncodedState,
    *,
    message_count: int,
    at: datetime,
) -> dict[str, Any]:
    """Record the step and return the head columns that point at its row.

    A state that waited between checkpoints becomes that row. The payload is a delta if there is something to
    build on, else it is stored in full, as something to build on.
    """
    base = bases.get(db, request.session_id)
    stored = stored_payload(encoded, base if base is not None and base.key == head.base_key else None)
    columns = {
        "session_id": head.pk,
        "kind": CheckpointKind.STEP.value,
        "namespace": "",
        "version": commit.new_version,
        "checkpoint_id": commit.checkpoint_id,
        "source": CheckpointSource.STEP.value,
        "run_id": request.run_id,
        "step_id": request.step.step_id,
        "step_count": request.step.step_count,
        "status": encoded.columns["status"],
        "message_count": message_count,
        "stream_sequence": request.step.stream_sequence,
        "payload": stored.text,
        "base_id": stored.base_id,
        "envelope": encoded.envelope,
        "size_bytes": encoded.size_bytes,
        "created_at": at,
    }
    if head.current_id is not None and not head.current_is_checkpoint:
        update_row(db, Checkpoint, head.current_id, columns)
        key = head.current_id
    else:
        key = insert_row(db, Checkpoint, columns)
    if not stored.is_delta:
        bases.keep(db, request.session_id, stored.base_key, key, encoded.payload, encoded.members)
    return {"current_id": key, "current_is_checkpoint": True, "base_key": stored.base_key}


def _record_operation(
    db: Database, head: Session, operation_id: str, digest: str, commit: StepCommit, *, at: datetime
) -> None:
    Operation.objects.using(db.alias).create(
        session_id=head.pk,
        operation_id=operation_id,
        digest=digest,
        checkpoint_id=commit.checkpoint_id,
        version=commit.new_version,
        created_at=at,
    )
