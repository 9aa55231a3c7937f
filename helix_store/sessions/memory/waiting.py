"""Pending tool calls, suspension and resumption in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from operator import attrgetter
from typing import Any

from helix_store.core import moments
from helix_store.core.approvals import ApprovedCall
from helix_store.core.guards import Guard
from helix_store.core.types import (
    STORED_ANSWERS,
    PendingToolCall,
    RunStatus,
    SessionState,
    SessionStatus,
    Submission,
    SubmissionOutcome,
)
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.exceptions import ConflictError
from helix_store.sessions.approvals import Answer
from helix_store.sessions.memory.records import SessionRecord
from helix_store.sessions.memory.scope import MemoryOperations, TenantScope
from helix_store.sessions.rules import (
    RESUMED_COLUMNS,
    Suspension,
    require_suspended,
    resumed_state,
)
from helix_store.sessions.tool_calls import (
    ToolCalls,
    claimed_ownership,
    owner_of,
    readable_due_calls,
)
from helix_store.signals import session_answered


class MemoryWaiting(MemoryOperations):
    def add_calls(
        self, session_id: str, calls: Mapping[str, dict[str, Any]], owner_id: str, guard: Guard
    ) -> None:
        with self._scope.lock:
            tree = _tree_of(self._scope.require(session_id))
            if _tree_of(self._scope.require(owner_id)) != tree:
                raise ConflictError(
                    "The owner of the calls is in another tree; choose a session of the same tree."
                )
            self._scope.check_guard(self._scope.require(session_id), guard)
            with self._scope.writing(owner_id) as owner:
                columns = _asked_columns(self._scope, owner, calls)
                if columns:
                    owner.write(**columns)

    def submit_answer(
        self, session_id: str, tool_call_id: str, answer: Answer, *, submitted_at: int
    ) -> Submission:
        with self._scope.lock:
            owner_id = self._owner_of(session_id, tool_call_id)
            tree = _tree_of(self._scope.require(session_id))
            found = self._scope.find(owner_id)
            if found is None or _tree_of(found) != tree:
                return Submission(outcome=SubmissionOutcome.UNKNOWN_TOOL_CALL, tool_call_id=tool_call_id)
            with self._scope.writing(owner_id) as owner:
                calls = ToolCalls.of(owner.columns)
                outcome = calls.answer(
                    tool_call_id, answer, submitted_at=submitted_at, status=owner.columns["status"]
                )
                version = None
                if outcome in STORED_ANSWERS:
                    version = owner.write(**calls.columns(answer.limits))
        if version is not None and calls.is_answered:
            self._scope.announce(owner_id, [session_answered])
        return Submission(
            outcome=outcome,
            tool_call_id=tool_call_id,
            session_id=None if outcome is SubmissionOutcome.UNKNOWN_TOOL_CALL else owner_id,
            new_version=version,
        )

    def approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, ApprovedCall]:
        record = self._scope.require(session_id)
        return record.version, ToolCalls.of(record.columns).approved_call(tool_call_id)

    def take_answers(self, session_id: str, guard: Guard) -> dict[str, Any]:
        with self._scope.writing(session_id, guard) as draft:
            calls = ToolCalls.of(draft.columns)
            taken = calls.take()
            if taken:
                draft.write(**calls.columns(self._scope.limits))
            return taken

    def overdue_calls(self, now: datetime | None, limit: int) -> list[PendingToolCall]:
        now_milliseconds = datetime_to_milliseconds(moments.now() if now is None else now)
        with self._scope.lock:
            records = list(self._scope.sessions.values())
        calls = [
            call
            for record in records
            if not SessionStatus(record.columns["status"]).is_terminal
            for call in readable_due_calls(
                record.session_id, record.columns["pending_client_tool_calls"], now_milliseconds
            )
        ]
        return sorted(calls, key=attrgetter("deadline", "session_id", "tool_call_id"))[:limit]

    def _owner_of(self, session_id: str, tool_call_id: str) -> str:
        """Return the call's owner according to the root; by default the session itself is the owner."""
        own = self._scope.require(session_id)
        root = self._scope.find(_tree_of(own)) or own
        return owner_of(root.columns["client_tool_call_ownership"], tool_call_id) or session_id

    def suspend(self, session_id: str, suspension: Suspension, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            suspension.require_allowed(draft.columns["status"])
            columns = dict(suspension.columns)
            if suspension.calls:
                columns |= _asked_columns(self._scope, draft, suspension.calls)
            running = draft.running_run
            if running is not None:
                ended = replace(running.run, status=RunStatus(suspension.kind), ended_at=moments.now())
                draft.runs[ended.run_id] = replace(running, run=ended)
            version = draft.write(**columns)
        if suspension.is_answered(draft.columns["pending_client_tool_calls"]):
            self._scope.announce(session_id, [session_answered])
        return version

    def resume(self, session_id: str, guard: Guard) -> SessionState:
        with self._scope.writing(session_id) as draft:
            self._scope.check_fence(session_id, guard)
            # Check this before the version: the loser of two resumes gets ConflictError, not StaleStateError.
            require_suspended(draft.columns)
            guard.check_version(draft.version)
            state = draft.state()
            version = draft.write(resume_count=state.resume_count + 1, **RESUMED_COLUMNS)
            return resumed_state(state, version=version, at=draft.columns["updated_at"])


def _asked_columns(
    scope: TenantScope, owner: SessionRecord, calls: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the columns that new calls change in their owner's draft, and write the record on its root.

    If the root does not exist, the session holds the record itself. The lock must be held.
    """
    columns: dict[str, Any] = {}
    asked = ToolCalls.of(owner.columns)
    if asked.add(calls):
        columns = asked.columns(scope.limits)
    root_id = _tree_of(owner)
    root = owner if root_id == owner.session_id else scope.find(root_id) or owner
    ownership = root.columns["client_tool_call_ownership"]
    record = claimed_ownership(ownership, calls, owner.session_id, scope.limits)
    if record is not None and root is owner:
        columns["client_tool_call_ownership"] = record
    elif record is not None:
        with scope.writing(root_id) as draft:
            # The version stays the same: a running step of the root has read nothing that changes.
            draft.columns["client_tool_call_ownership"] = record
    return columns


def _tree_of(record: SessionRecord) -> str:
    return record.columns["root_session_id"] or record.session_id
