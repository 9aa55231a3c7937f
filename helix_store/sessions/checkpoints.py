"""Checkpoints in the database: read, rewind, branch, prune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from django.db.models import QuerySet

from helix_store.catalogue import Branch
from helix_store.catalogue.table import branch_rows
from helix_store.core import moments
from helix_store.core.limits import AS_STORED, MAX_BIGINT
from helix_store.core.payloads import copy_json
from helix_store.core.types import (
    BRANCHED_FROM,
    Checkpoint,
    CheckpointHead,
    SessionState,
    SessionStatus,
)
from helix_store.core.validation import Guard
from helix_store.engine.database import DatabaseOperations, reads, writes
from helix_store.exceptions import CheckpointNotFound, IntegrityFault, InvalidQuery
from helix_store.models import Checkpoint as CheckpointRow
from helix_store.models import CheckpointKind, Decision, Session
from helix_store.sessions.heads import insert_session
from helix_store.sessions.locking import advance, first_row, lock_session, pk_of, session_key, touch_session
from helix_store.sessions.messages import cut_history
from helix_store.sessions.state import (
    NewSession,
    base_of,
    by_column,
    checkpoint_state,
    current_from,
    current_key,
    drop_checkpoints,
    encode_state,
    keep_checkpoints,
    step_checkpoints,
    written_columns,
)
from helix_store.sessions.statements import (
    CHECKPOINT_COLUMNS,
    CHECKPOINT_HEAD_COLUMNS,
    CURRENT_COLUMNS,
    DELETE_STAGED,
    LATEST_CHECKPOINT,
)
from helix_store.sessions.tool_calls import (
    approvals_in_branch,
    are_kinds_shown,
    opened_calls,
    waiting_calls,
)
from helix_store.sessions.waiting import decisions_of
from helix_store.signals import announce, session_waiting


def branched_state(source: SessionState, *, new_session_id: str, title: str | None = None) -> SessionState:
    """Return the first state of a branch. It shares no object with ``source``.

    The branch is active and the root of a new tree. It copies the identity of the session, its custom state
    and the completed client tool calls. It does not copy the result, failure, pending calls, suspension,
    expiry or workspace refs. The store sets versions, counts and times.
    """
    return SessionState(
        session_id=new_session_id,
        agent_type=source.agent_type,
        step_count=source.step_count,
        mode=source.mode,
        custom_state=copy_json(source.custom_state),
        user_id=source.user_id,
        tags=list(source.tags),
        metadata={**source.metadata, BRANCHED_FROM: source.session_id},
        title=source.title if title is None else title,
        workspace_id=source.workspace_id,
        directory=source.directory,
        root_session_id=new_session_id,
        stream_id=new_session_id,
        completed_client_tool_calls=copy_json(source.completed_client_tool_calls),
    )


_RESTORED: Final = (
    "root_session_id",
    "pending_client_tool_calls",
    "client_tool_call_ownership",
    "live_decisions",
)
"""The columns of the session that a rewind reads."""

_END_OF_TIME: Final = datetime.max.replace(tzinfo=UTC)


class DatabaseCheckpoints(DatabaseOperations):
    @reads
    def get(self, session_id: str, checkpoint_id: str) -> Checkpoint | None:
        checkpoints = step_checkpoints(self.db, pk_of(self.db, session_id))
        return self._first(checkpoints.filter(checkpoint_id=checkpoint_id), session_id)

    def latest(self, session_id: str) -> Checkpoint | None:
        rows = self.db.read(LATEST_CHECKPOINT, {"tenant": self.db.tenant, "session_id": session_id})
        return _checkpoint_from(by_column(CHECKPOINT_COLUMNS, rows[0]), session_id) if rows else None

    @reads
    def select(
        self, session_id: str, *, limit: int, before_version: int | None
    ) -> tuple[list[CheckpointHead], int, int | None]:
        """Return the page (newest first), the total, and the next page's ``before_version``, if any."""
        checkpoints = step_checkpoints(self.db, session_key(self.db, session_id))
        page = checkpoints.order_by("-version")
        if before_version is not None:
            page = page.filter(version__lt=before_version)
        rows = list(page.values(*CHECKPOINT_HEAD_COLUMNS)[: limit + 1])
        following = rows[limit - 1]["version"] if len(rows) > limit else None
        heads = [CheckpointHead(**_head_values(row, session_id)) for row in rows[:limit]]
        return heads, checkpoints.count(), following

    @writes
    def restore(self, session_id: str, checkpoint_id: str, guard: Guard) -> int:
        head = lock_session(self.db, session_id, guard, *_RESTORED)
        checkpoints = step_checkpoints(self.db, head.pk)
        found = checkpoints.filter(checkpoint_id=checkpoint_id).values("pk", *CHECKPOINT_COLUMNS)
        row = first_row(found)
        if row is None:
            raise CheckpointNotFound(checkpoint_id)
        state = _checkpoint_from(row, session_id).state
        encoded = encode_state(state, AS_STORED)
        columns = written_columns(encoded, vars(head), partial(decisions_of, self.db, head.pk))
        if not head.current_is_checkpoint:
            CheckpointRow.objects.using(self.db.alias).filter(pk=current_key(head)).delete()
        # The deltas of a base belong to the steps directly after it: no remaining checkpoint needs a deleted
        # one, and no remaining base loses all of its deltas.
        CheckpointRow.objects.using(self.db.alias).filter(
            session_id=head.pk,
            kind__in=[CheckpointKind.STEP, CheckpointKind.BASE],
            namespace="",
            version__gt=row["version"],
        ).delete()
        self.db.execute(DELETE_STAGED, {"key": head.pk, "at": moments.now()})
        cut_history(self.db, head, row["message_count"])
        before, after = waiting_calls(vars(head)), waiting_calls({"live_decisions": None, **columns})
        decisions = decisions_of(self.db, head.pk, before.claimed.keys() | after.claimed.keys())
        if opened := opened_calls(before, after, decisions):
            root_id = head.root_session_id or session_id
            announce(self.db, session_id, [session_waiting], tool_call_ids=opened, root_session_id=root_id)
        return advance(
            self.db,
            head,
            current_id=row["pk"],
            current_is_checkpoint=True,
            base_key=None,
            message_count=row["message_count"],
            **columns,
        )

    @writes
    def branch(self, request: BranchRequest) -> SessionState:
        head = lock_session(self.db, request.session_id, None, "typed_metadata")
        if request.message_index is not None and request.message_index > head.message_count:
            raise InvalidQuery("message_index is beyond the end of the history.", path="message_index")
        checkpoint, boundary = self._branching_point(head, request)
        if checkpoint is None:
            current = Session.objects.using(self.db.alias).values(*CURRENT_COLUMNS)
            source = current_from(current.get(pk=head.pk))
        else:
            source = checkpoint.state
        state = branched_state(source, new_session_id=request.new_session_id, title=request.title)
        if not are_kinds_shown(state.completed_client_tool_calls):
            decisions = Decision.objects.using(self.db.alias).filter(session_id=head.pk)
            decided = set(decisions.values_list("tool_call_id", flat=True).distinct())
            state.completed_client_tool_calls = approvals_in_branch(
                state.completed_client_tool_calls, decided
            )
        new = NewSession(request.new_session_id, encode_state(state, AS_STORED))
        new.encoded.columns.update(message_count=boundary, typed_metadata=head.typed_metadata)
        target, branched = insert_session(
            self.db, new, root_session_id=request.new_session_id, at=moments.now()
        )
        version, until = (
            (MAX_BIGINT, _END_OF_TIME) if checkpoint is None else (source.version, source.updated_at)
        )
        branch_rows(
            Branch(
                self.db,
                source=head.pk,
                target=target,
                source_id=request.session_id,
                target_id=request.new_session_id,
                message_count=boundary,
                checkpoint_id=request.checkpoint_id,
                version=version,
                until=until,
            )
        )
        return branched

    @writes
    def delete(self, session_id: str, checkpoint_id: str) -> bool:
        head = touch_session(self.db, session_id)
        doomed = step_checkpoints(self.db, head.pk).filter(checkpoint_id=checkpoint_id)
        return drop_checkpoints(self.db, head, doomed) > 0

    @writes
    def prune(self, session_id: str, keep: int, before: datetime | None = None) -> int:
        """Prune checkpoints beyond the newest ``keep``; with ``before``, only those made before it."""
        head = touch_session(self.db, session_id)
        return keep_checkpoints(self.db, head, keep, before)

    def _branching_point(self, head: Session, request: BranchRequest) -> tuple[Checkpoint | None, int]:
        """Return the checkpoint to branch from (``None``: current state) and how many messages to copy."""
        checkpoints = step_checkpoints(self.db, head.pk).order_by("-version")
        if request.checkpoint_id is not None:
            checkpoints = checkpoints.filter(checkpoint_id=request.checkpoint_id)
        elif request.message_index is not None:
            checkpoints = checkpoints.filter(message_count__lte=request.message_index)
        checkpoint = self._first(checkpoints, request.session_id)
        if checkpoint is None and request.checkpoint_id is not None:
            raise CheckpointNotFound(request.checkpoint_id)
        if request.message_index is not None:
            boundary = request.message_index
        else:
            boundary = head.message_count if checkpoint is None else checkpoint.message_count
        return checkpoint, boundary

    @staticmethod
    def _first(checkpoints: QuerySet[CheckpointRow], session_id: str) -> Checkpoint | None:
        row = first_row(checkpoints.values(*CHECKPOINT_COLUMNS))
        return None if row is None else _checkpoint_from(row, session_id)


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


def _checkpoint_from(row: Mapping[str, Any], session_id: str) -> Checkpoint:
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


@dataclass(frozen=True, slots=True)
class BranchRequest:
    session_id: str
    new_session_id: str
    checkpoint_id: str | None = None
    message_index: int | None = None
    title: str | None = None
