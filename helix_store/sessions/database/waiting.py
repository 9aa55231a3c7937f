"""Pending tool calls, suspension and resumption in the database."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from operator import attrgetter
from typing import Any, Final

from helix_store.core import moments
from helix_store.core.approvals import ApprovedCall
from helix_store.core.guards import Guard
from helix_store.core.types import (
    STORED_ANSWERS,
    PendingToolCall,
    RunStatus,
    SessionState,
    Submission,
    SubmissionOutcome,
)
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    Rows,
    reads,
    writes,
)
from helix_store.engine.expressions import NoIndexHint, after_keyset
from helix_store.engine.rows import update_row
from helix_store.exceptions import ConflictError
from helix_store.locks.database import hold_fence
from helix_store.models import Run, Session
from helix_store.sessions.approvals import Answer
from helix_store.sessions.database.locking import (
    advance,
    check_guard,
    lock_known_session,
    lock_session,
    lock_sessions_of_tree,
    missing_session,
    root_of,
)
from helix_store.sessions.database.rows import first_row, session_with_id, sessions_with_ids
from helix_store.sessions.reading import current_from
from helix_store.sessions.rules import (
    RESUMED_COLUMNS,
    Suspension,
    require_suspended,
    resumed_state,
)
from helix_store.sessions.sql import CURRENT_COLUMNS, OWNERSHIP
from helix_store.sessions.tool_calls import (
    ToolCalls,
    claimed_ownership,
    owner_of,
    readable_due_calls,
)
from helix_store.signals import announce, session_answered

_CALL_COLUMNS: Final = (
    "pending_client_tool_calls",
    "completed_client_tool_calls",
    "client_tool_call_ownership",
)
_ANSWER_COLUMNS: Final = (*_CALL_COLUMNS, "approved_tool_calls")


class DatabaseWaiting(DatabaseOperations):
    @writes
    def add_calls(
        self, session_id: str, calls: Mapping[str, dict[str, Any]], owner_id: str, guard: Guard
    ) -> None:
        """Add pending calls to the owner, and record the owner on the root of both sessions.

        The guard's fence belongs to ``session_id``.
        """
        rows = sessions_with_ids(self.db, {session_id, owner_id}).only("session_id", "root_session_id")
        trees = {head.session_id: head.root_session_id or head.session_id for head in rows}
        for unknown_id in sorted({session_id, owner_id} - trees.keys()):
            raise missing_session(self.db, unknown_id)
        root_id = trees[session_id]
        if trees[owner_id] != root_id:
            raise ConflictError(
                "The owner of the calls is in another tree; choose a session of the same tree."
            )
        locked = lock_sessions_of_tree(self.db, {owner_id, root_id}, *_CALL_COLUMNS)
        owner = locked.get(owner_id)
        if owner is None:
            raise missing_session(self.db, owner_id)
        hold_fence(self.db, session_id, guard)
        columns = _asked_columns(self.db, owner, calls, locked.get(root_id))
        if columns:
            advance(self.db, owner, **columns)

    @writes
    def submit_answer(
        self, session_id: str, tool_call_id: str, answer: Answer, *, submitted_at: int
    ) -> Submission:
        owner_id, root_id = self._owner_of(session_id, tool_call_id)
        owner = lock_known_session(self.db, owner_id, None, *_ANSWER_COLUMNS)
        if owner is None or (owner.root_session_id or owner_id) != root_id:
            return Submission(outcome=SubmissionOutcome.UNKNOWN_TOOL_CALL, tool_call_id=tool_call_id)
        calls = ToolCalls.of(vars(owner))
        outcome = calls.answer(tool_call_id, answer, submitted_at=submitted_at, status=owner.status)
        version = None
        if outcome in STORED_ANSWERS:
            version = advance(self.db, owner, **calls.columns(answer.limits))
            if calls.is_answered:
                announce(self.db, owner_id, [session_answered])
        return Submission(
            outcome=outcome,
            tool_call_id=tool_call_id,
            session_id=None if outcome is SubmissionOutcome.UNKNOWN_TOOL_CALL else owner_id,
            new_version=version,
        )

    @reads
    def approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, ApprovedCall]:
        """Return the version of the session and the approved call."""
        columns = (
            "version",
            "pending_client_tool_calls",
            "completed_client_tool_calls",
            "approved_tool_calls",
        )
        row = first_row(session_with_id(self.db, session_id).values(*columns))
        if row is None:
            raise missing_session(self.db, session_id)
        return row["version"], ToolCalls.of(row).approved_call(tool_call_id)

    @writes
    def take_answers(self, session_id: str, guard: Guard) -> dict[str, Any]:
        head = lock_session(self.db, session_id, guard, *_CALL_COLUMNS)
        calls = ToolCalls.of(vars(head))
        taken = calls.take()
        if taken:
            advance(self.db, head, **calls.columns(self.db.limits))
        return taken

    @reads
    def overdue_calls(self, now: datetime | None, limit: int) -> list[PendingToolCall]:
        """Return calls ordered by deadline; ``now=None`` means the time of the back end's clock."""
        at = self.db.now() if now is None else now
        now_milliseconds = datetime_to_milliseconds(at)
        sessions = (
            Session.objects.using(self.db.alias)
            .alias(unindexed_tenant=NoIndexHint("tenant"))
            .filter(unindexed_tenant=self.db.tenant)
            .non_terminal()
            .overdue(at)
            .order_by("pending_deadline", "pk")
            .values_list("pending_deadline", "pk", "session_id", "pending_client_tool_calls")
        )
        calls: list[PendingToolCall] = []
        page, missing = sessions, limit
        # Each session has at least one such call, so the first calls belong to the first sessions: one page
        # is enough, unless one of its rows cannot be read.
        while missing:
            rows = list(page[:missing])
            is_last = len(rows) < missing
            for _, _, session_id, pending in rows:
                due = readable_due_calls(session_id, pending, now_milliseconds)
                missing -= bool(due)
                calls += due
            if is_last:
                break
            deadline, key, _, _ = rows[-1]
            page = sessions.filter(after_keyset(Session, {"pending_deadline": deadline, "id": key}))
        return sorted(calls, key=attrgetter("deadline", "session_id", "tool_call_id"))[:limit]

    def _owner_of(self, session_id: str, tool_call_id: str) -> tuple[str, str]:
        """Return the call's owner according to the root, and the root; by default the session is the owner.

        No lock is needed: the owner of a call never changes, and later checks use the owner's locked row,
        including the check that the owner is in the tree.
        """
        for own_root_id, recorded in self._ownership(session_id):
            root_id = own_root_id or session_id
            if root_id != session_id:
                recorded = next((record for _, record in self._ownership(root_id)), recorded)
            return owner_of(recorded, tool_call_id) or session_id, root_id
        raise missing_session(self.db, session_id)

    def _ownership(self, session_id: str) -> Rows:
        return self.db.execute(OWNERSHIP, {"tenant": self.db.tenant, "session_id": session_id})

    @writes
    def suspend(self, session_id: str, suspension: Suspension, guard: Guard) -> int:
        root_id = root_of(self.db, session_id) if suspension.calls else session_id
        heads = lock_sessions_of_tree(self.db, {session_id, root_id}, *_CALL_COLUMNS)
        head = heads.get(session_id)
        if head is None:
            raise missing_session(self.db, session_id)
        check_guard(self.db, head, guard)
        suspension.require_allowed(head.status)
        columns = dict(suspension.columns)
        if suspension.calls:
            columns |= _asked_columns(self.db, head, suspension.calls, heads.get(root_id))
        at = moments.now()
        running = Run.objects.using(self.db.alias).filter(session_id=head.pk, status=RunStatus.RUNNING.value)
        running.update(status=suspension.kind, ended_at=at)
        pending = columns.get("pending_client_tool_calls", head.pending_client_tool_calls)
        if suspension.is_answered(pending):
            announce(self.db, session_id, [session_answered])
        return advance(self.db, head, at=at, **columns)

    @writes
    def resume(self, session_id: str, guard: Guard) -> SessionState:
        head = lock_session(self.db, session_id)
        hold_fence(self.db, session_id, guard)
        row = Session.objects.using(self.db.alias).values(*CURRENT_COLUMNS).get(pk=head.pk)
        # Check this before the version: the loser of two resumes gets ConflictError, not StaleStateError.
        require_suspended(row)
        guard.check_version(head.version)
        state = current_from(row)
        at = moments.now()
        version = advance(self.db, head, at=at, resume_count=head.resume_count + 1, **RESUMED_COLUMNS)
        return resumed_state(state, version=version, at=at)


def _asked_columns(
    db: Database, owner: Session, calls: Mapping[str, dict[str, Any]], root: Session | None
) -> dict[str, Any]:
    """Return the columns that new calls change in their locked owner, and write the locked root's record.

    If the root does not exist, the session holds the record itself.
    """
    columns: dict[str, Any] = {}
    asked = ToolCalls.of(vars(owner))
    if asked.add(calls):
        columns = asked.columns(db.limits)
    keeper = owner if root is None else root
    record = claimed_ownership(keeper.client_tool_call_ownership, calls, owner.session_id, db.limits)
    if record is not None and keeper.pk == owner.pk:
        columns["client_tool_call_ownership"] = record
    elif record is not None:
        # The version stays the same: a running step of the root has read nothing that changes.
        update_row(db, Session, keeper.pk, {"client_tool_call_ownership": record})
    return columns
