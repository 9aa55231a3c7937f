"""Staged changes, and the atomic step that promotes them: the canonical write of every agent loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from django.db.models import BigIntegerField, Exists, FilteredRelation, OuterRef, Q, Subquery, Value

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.merging import promote_staged, with_staged
from helix_store.core.types import TERMINAL_STATUSES, CheckpointSource, StagedChanges, StepCommit
from helix_store.engine.connections import release_once
from helix_store.engine.database import Database, DatabaseOperations, reads, writes
from helix_store.engine.outcomes import committed_once
from helix_store.engine.rows import insert_row, update_row
from helix_store.exceptions import (
    HelixStoreError,
    IdempotencyConflict,
    OutcomeUnknown,
    RunNotFound,
    SessionNotFound,
)
from helix_store.models import Checkpoint, CheckpointKind, Operation, Run, Session, StagedChange
from helix_store.sessions.announcements import signals_of_status
from helix_store.sessions.database.announcing import announce
from helix_store.sessions.database.current_state import keep_checkpoints, read_current
from helix_store.sessions.database.locking import (
    advance,
    changed_columns,
    check_guard,
    lock_session,
    touch,
)
from helix_store.sessions.database.messages import insert_messages
from helix_store.sessions.database.rows import session_with_id
from helix_store.sessions.database.sessions import replace_custom_state
from helix_store.sessions.deltas import StoredPayload, origin_of, remember_step, stored_payload
from helix_store.sessions.layout import WRITTEN_COLUMNS, EncodedState, settled_mode, with_custom_state
from helix_store.sessions.requests import EncodedMessage, StepRequest, decode_staged
from helix_store.sessions.sql import STAGE_CHANGE, TAKE_STAGED
from helix_store.sessions.step_sql import MAX_SINGLE_MESSAGES, STAGED_ROWS, step_statement

__all__ = ["DatabaseStaging", "DatabaseSteps"]


class DatabaseStaging(DatabaseOperations):
    def stage(self, session_id: str, step_id: str, tool_call_id: str, text: str) -> None:
        locked = partial(self._stage_locked, session_id, step_id, tool_call_id, text)
        if not self.db.has_fast_writes:
            locked()
            return

        def stage() -> None:
            parameters = {
                "tenant": self.db.tenant,
                "session_id": session_id,
                "step_id": step_id,
                "tool_call_id": tool_call_id,
                "payload": text,
                "at": moments.now(),
            }
            if not self.db.try_write(STAGE_CHANGE, parameters):
                locked()

        # A change replaces itself.
        committed_once(self.db, stage, locked, operation_id=lambda: tool_call_id)

    @writes
    def _stage_locked(self, session_id: str, step_id: str, tool_call_id: str, text: str) -> None:
        head = lock_session(self.db, session_id)
        row = StagedChange(
            session_id=head.pk,
            step_id=step_id,
            tool_call_id=tool_call_id,
            payload=text,
            created_at=moments.now(),
        )
        StagedChange.objects.using(self.db.alias).bulk_create(
            [row],
            update_conflicts=True,
            unique_fields=["session", "step_id", "tool_call_id"],
            update_fields=["payload", "created_at"],
        )

    @reads
    def staged(self, session_id: str, step_id: str) -> list[StagedChanges]:
        # The row of the session comes also without staged changes: one statement, and it knows the session.
        rows = list(
            session_with_id(self.db, session_id)
            .annotate(staged=FilteredRelation("staged_changes", condition=Q(staged_changes__step_id=step_id)))
            .values_list("staged__pk", "staged__payload")
        )
        if not rows:
            raise SessionNotFound(session_id)
        return decode_staged(text for key, text in sorted(rows) if key is not None)

    @writes
    def promote(self, session_id: str, step_id: str, guard: Guard) -> int:
        head = lock_session(self.db, session_id, guard)
        staged = _take_staged(self.db, head, step_id)
        if not staged:
            return head.version
        custom_state, envelope = read_current(self.db, head)
        promoted = promote_staged(custom_state, staged, limits=self.db.limits)
        return replace_custom_state(self.db, head, promoted, envelope)

    @writes
    def discard(self, session_id: str, step_id: str) -> int:
        head = lock_session(self.db, session_id)
        rows = StagedChange.objects.using(self.db.alias).filter(session_id=head.pk, step_id=step_id)
        discarded, _ = rows.delete()
        if discarded:
            touch(self.db, head)
        return discarded


class DatabaseSteps(DatabaseOperations):
    """A step as one statement where the database has that form, else as lock, decision and writes."""

    def commit(self, request: StepRequest) -> StepCommit:
        with release_once(self.db.connection):
            return committed_once(
                self.db,
                partial(self._commit, request),
                partial(self._commit_locked, request, is_repeat=True),
                operation_id=lambda: request.name,
            )

    def _commit(self, request: StepRequest) -> StepCommit:
        commit = None
        if request.operation_id is None and self.db.has_fast_writes:
            commit = self._in_one_statement(request)
        return self._in_a_transaction(request) if commit is None else commit

    def _in_one_statement(self, request: StepRequest) -> StepCommit | None:
        """Commit a step; ``None`` when it takes more deciding than one statement does.

        What is staged is read first if the last step of this state promoted something; else the statement
        returns it. A second statement promotes it, if it is still the same.
        """
        staged = self._staged_rows(request)
        if not staged:
            commit, staged = self._try(request, request.encoded, ())
            if not staged:
                return commit
        try:
            encoded = self._promoted(request, decode_staged(row.payload for row in staged))
        except HelixStoreError:
            # A change that cannot be applied. Whether the session is stale or gone comes first.
            return None
        return self._try(request, encoded, staged)[0]

    def _staged_rows(self, request: StepRequest) -> list[_StagedRow]:
        origin = origin_of(request.state)
        if origin is None or not origin.expects_staging:
            return []
        step = {
            "tenant": self.db.tenant,
            "session_id": request.session_id,
            "step_id": request.step.step_id,
        }
        return [_StagedRow(*row) for row in self.db.read(STAGED_ROWS, step)]

    def _try(
        self, request: StepRequest, encoded: EncodedState, staged: Sequence[_StagedRow]
    ) -> tuple[StepCommit | None, list[_StagedRow]]:
        """The commit of a step that promotes these rows, or what is staged instead."""
        at = moments.now()
        expected_version = request.guard.expected_version
        stored = stored_payload(
            request.state,
            encoded.payload,
            encoded.entries,
            version=None if expected_version is None else expected_version + 1,
        )
        columns = _checkpoint_columns(request, encoded, stored, at)
        ends = encoded.columns["status"] in TERMINAL_STATUSES
        statement = step_statement(
            tuple(columns),
            messages=min(len(request.messages), MAX_SINGLE_MESSAGES + 1),
            merges=bool(staged),
            is_delta=stored.is_delta,
            is_expected=expected_version is not None,
            is_fenced=request.guard.fencing_token is not None,
            is_of_run=request.run_id is not None,
            prunes=request.keep is not None,
            ends=ends,
        )
        tags, metadata = encoded.columns["tags"], encoded.columns["metadata"]
        parameters = {
            **columns,
            **encoded.columns,
            "tags": json.dumps(tags) if tags else "[]",
            "metadata": json.dumps(metadata) if metadata else "{}",
            "step_number": request.step.step_count,
            "base_key": stored.base_key,
            "tenant": self.db.tenant,
            "session_id": request.session_id,
            "expected_version": expected_version,
            "fencing_token": request.guard.fencing_token,
            "staged": [row.version for row in staged],
            "at": at,
            "added": len(request.messages),
            "keep": request.keep,
            **_message_parameters(request.messages),
        }
        rows = self.db.try_write(statement, parameters)
        if not rows or rows[0][0] is None:
            return None, [_StagedRow(version, payload) for _, _, _, version, payload in rows]
        new_version, row_id, earlier_status, _, _ = rows[0]
        if ends:
            status, failure_reason = encoded.columns["status"], encoded.columns["failure_reason"]
            announce(self.db, request.session_id, signals_of_status(earlier_status, status, failure_reason))
        remember_step(request.state, stored, row_id, new_version, has_promoted=bool(staged))
        return StepCommit(request.checkpoint_id, new_version=new_version), []

    @writes
    def _in_a_transaction(self, request: StepRequest) -> StepCommit:
        return self._commit_locked(request)

    def _commit_locked(self, request: StepRequest, *, is_repeat: bool = False) -> StepCommit:
        """Lock, staging, messages, checkpoint, head: the same statements for any length of the history.

        One more reads a run or an operation id, and one more records the operation. Up to five more prune.
        """
        head = lock_session(self.db, request.session_id, None, *WRITTEN_COLUMNS)
        claims = _read_claims(self.db, head, request, is_repeat=is_repeat)
        if claims.earlier_commit is not None:
            if is_repeat:
                # The status that the lost statement found is not known: a repeated end is told again.
                status, reason = head.status, request.encoded.columns["failure_reason"]
                announce(self.db, request.session_id, signals_of_status("", status, reason))
            return claims.earlier_commit
        if is_repeat and _may_be_pruned(head, request):
            raise OutcomeUnknown(request.name)
        check_guard(self.db, head, request.guard)
        if request.run_id is not None and not claims.run_exists:
            raise RunNotFound(request.run_id)
        mode = settled_mode(head.mode, request.encoded.columns["mode"])
        at = moments.now()
        staged = _take_staged(self.db, head, request.step.step_id)
        encoded = self._promoted(request, staged)
        message_count = insert_messages(self.db, head, request.messages, at=at)
        commit = StepCommit(request.checkpoint_id, new_version=head.version + 1)
        stored = stored_payload(
            request.state,
            encoded.payload,
            encoded.entries,
            version=commit.new_version,
            head_key=head.base_key,
        )
        checkpoint = _checkpoint_columns(request, encoded, stored, at)
        checkpoint |= {"session_id": head.pk, "version": commit.new_version, "message_count": message_count}
        # A state that waited between checkpoints becomes this one.
        if head.current_id is not None and not head.current_is_checkpoint:
            row_id = head.current_id
            update_row(self.db, Checkpoint, row_id, checkpoint)
        else:
            row_id = insert_row(self.db, Checkpoint, checkpoint)
        columns = {
            **encoded.columns,
            "current_id": row_id,
            "current_is_checkpoint": True,
            "base_key": stored.base_key,
            "mode": mode,
            "message_count": message_count,
        }
        advance(self.db, head, at=at, **changed_columns(head, columns))
        if request.keep is not None:
            head.current_id, head.current_is_checkpoint = row_id, True
            keep_checkpoints(self.db, head, request.keep)
        if request.operation_id is not None:
            _record_operation(self.db, head, request.operation_id, request, commit, at)
        remember_step(request.state, stored, row_id, commit.new_version, has_promoted=bool(staged))
        return commit

    def _promoted(self, request: StepRequest, staged: Sequence[StagedChanges]) -> EncodedState:
        """The state with what was staged."""
        if not staged:
            return request.encoded
        limits, custom_state = request.limits, request.state.custom_state
        promoted = with_staged(custom_state, staged, limits=limits)
        return with_custom_state(request.encoded, custom_state, promoted, limits)


class _StagedRow(NamedTuple):
    """A staged change as text, and the version of the row that holds it."""

    version: str
    payload: str


def _take_staged(db: Database, head: Session, step_id: str) -> list[StagedChanges]:
    """Remove and return a step's staged changes, in staging order. The session is locked."""
    rows = db.execute(TAKE_STAGED, {"key": head.pk, "step_id": step_id})
    return decode_staged(payload for _, payload in sorted(rows))


def _checkpoint_columns(
    request: StepRequest, encoded: EncodedState, stored: StoredPayload, at: datetime
) -> dict[str, Any]:
    """The columns of a step's checkpoint, the only list of them; those with ``None`` come from the head."""
    return {
        "session_id": None,
        "kind": CheckpointKind.STEP.value,
        "namespace": "",
        "version": None,
        "checkpoint_id": request.checkpoint_id,
        "source": CheckpointSource.STEP.value,
        "run_id": request.run_id,
        "step_id": request.step.step_id,
        "step_count": request.step.step_count,
        "status": encoded.columns["status"],
        "message_count": None,
        "stream_sequence": request.step.stream_sequence,
        "payload": stored.text,
        "base_id": stored.base_id,
        "envelope": encoded.envelope,
        "size_bytes": encoded.size_bytes,
        "created_at": at,
    }


def _message_parameters(messages: Sequence[EncodedMessage]) -> dict[str, Any]:
    if len(messages) > MAX_SINGLE_MESSAGES:
        return {
            "roles": [message.role for message in messages],
            "texts": [message.text for message in messages],
        }
    parameters = {}
    for number, message in enumerate(messages, 1):
        parameters[f"role_{number}"], parameters[f"text_{number}"] = message
    return parameters


class _Claims(NamedTuple):
    """Whether the run of a request exists, and the commit of an earlier call under its operation id."""

    run_exists: bool = False
    earlier_commit: StepCommit | None = None


def _read_claims(db: Database, head: Session, request: StepRequest, *, is_repeat: bool) -> _Claims:
    """Look both up in one statement, after the lock: an earlier look could miss a twin's commit.

    An operation id that the store made is the id of the checkpoint. Raises `IdempotencyConflict`.
    """
    name = request.name if is_repeat else request.operation_id
    if request.run_id is None and name is None:
        return _Claims()
    checkpoint = Checkpoint.objects.filter(
        session_id=OuterRef("pk"), checkpoint_id=name, kind=CheckpointKind.STEP, step_id=request.step.step_id
    )
    run_exists, digest, recorded_id, version, checkpoint_version = (
        Session.objects.using(db.alias)
        .filter(pk=head.pk)
        .annotate(
            operation=FilteredRelation("operations", condition=Q(operations__operation_id=name)),
            checkpoint_version=(
                Value(None, BigIntegerField()) if name is None else Subquery(checkpoint.values("version")[:1])
            ),
            run_exists=Exists(Run.objects.filter(session_id=OuterRef("pk"), run_id=request.run_id)),
        )
        .values_list(
            "run_exists",
            "operation__digest",
            "operation__checkpoint_id",
            "operation__version",
            "checkpoint_version",
        )
        .get()
    )
    if name is not None and checkpoint_version is not None:
        return _Claims(run_exists, StepCommit(name, new_version=checkpoint_version))
    if digest is None or request.operation_id is None:
        return _Claims(run_exists)
    if digest != request.digest():
        raise IdempotencyConflict(request.operation_id)
    return _Claims(run_exists, StepCommit(recorded_id, new_version=version))


def _may_be_pruned(head: Session, request: StepRequest) -> bool:
    """Whether the checkpoint of the lost step may have been pruned by as many later steps as are kept."""
    expected_version = request.guard.expected_version
    before = request.state.version if expected_version is None else expected_version
    return request.keep is not None and request.operation_id is None and head.version - before > request.keep


def _record_operation(
    db: Database, head: Session, operation_id: str, request: StepRequest, commit: StepCommit, at: datetime
) -> None:
    Operation.objects.using(db.alias).create(
        session_id=head.pk,
        operation_id=operation_id,
        digest=request.digest(),
        checkpoint_id=commit.checkpoint_id,
        version=commit.new_version,
        created_at=at,
    )
