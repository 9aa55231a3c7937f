"""Runs, sub-session refs and interrupt requests in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.types import (
    InterruptKind,
    InterruptRequest,
    Run,
    RunStatus,
    SessionStatus,
    SubSessionRef,
)
from helix_store.exceptions import RunNotFound
from helix_store.sessions.memory.records import StoredRun
from helix_store.sessions.memory.scope import MemoryOperations
from helix_store.sessions.reading import sub_session_ref_from
from helix_store.sessions.requests import EncodedRef, RunUpdate
from helix_store.sessions.rules import (
    SUPERSEDED,
    check_interruptible,
    check_may_run,
    check_no_other_runs,
    check_not_superseded,
    check_same_ref,
    check_supersedes,
    end_of_run,
    is_bound_to,
    standing_request,
    taken_run,
    unknown_ref,
)


class MemoryRuns(MemoryOperations):
    def start_run(
        self, session_id: str, run_id: str, *, start_sequence: int, supersede: bool, guard: Guard
    ) -> Run:
        with self._scope.writing(session_id, guard) as draft:
            if run_id in draft.runs:
                raise taken_run(run_id)
            running = draft.running_run
            if running is not None:
                check_supersedes(
                    running.fencing_token, supersede=supersede, fencing_token=guard.fencing_token
                )
                draft.runs[running.run.run_id] = _updated(
                    running, RunUpdate(RunStatus.INTERRUPTED, completion_reason=SUPERSEDED)
                )
            started = Run(
                run_id=run_id,
                session_id=session_id,
                turn=len(draft.runs) + 1,
                status=RunStatus.RUNNING,
                step_count=0,
                start_sequence=start_sequence,
                started_at=moments.now(),
            )
            draft.runs[run_id] = StoredRun(started, guard.fencing_token)
            draft.interrupt = None
            if draft.columns["status"] != SessionStatus.ACTIVE:
                draft.write(status=SessionStatus.ACTIVE.value)
            return started

    def update_run(self, session_id: str, run_id: str, update: RunUpdate, guard: Guard) -> Run:
        with self._scope.writing(session_id, guard) as draft:
            stored = draft.runs.get(run_id)
            if stored is None:
                raise RunNotFound(run_id)
            check_not_superseded(run_id, stored.run.completion_reason, guard)
            if update.status is RunStatus.RUNNING and not stored.is_running:
                check_no_other_runs(draft.running_run_id, run_id)
                check_may_run(run_id, stored.run.status, stored.run.completion_reason)
                draft.interrupt = None
            updated = draft.runs[run_id] = _updated(stored, update)
            return updated.value()

    def current_run(self, session_id: str) -> Run | None:
        running = self._scope.require(session_id).running_run
        return None if running is None else running.value()

    def select_runs(self, session_id: str, *, limit: int, offset: int) -> list[Run]:
        runs = self._scope.require(session_id).runs
        return [stored.value() for stored in list(reversed(runs.values()))[offset : offset + limit]]

    def add_refs(self, session_id: str, refs: Sequence[EncodedRef]) -> None:
        with self._scope.writing(session_id) as draft:
            for ref in refs:
                check_same_ref(draft.refs.setdefault(ref.sub_session_id, ref), ref)

    def update_ref(self, session_id: str, sub_session_id: str, changes: Mapping[str, str]) -> SubSessionRef:
        with self._scope.writing(session_id) as draft:
            ref = draft.refs.get(sub_session_id)
            if ref is None:
                raise unknown_ref(sub_session_id)
            updated = draft.refs[sub_session_id] = replace(ref, **changes)
            return sub_session_ref_from(updated)

    def select_refs(self, session_id: str) -> list[SubSessionRef]:
        return [sub_session_ref_from(ref) for ref in self._scope.require(session_id).refs.values()]

    def request_interrupt(
        self, session_id: str, kind: InterruptKind, reason: str | None, run_id: str | None
    ) -> InterruptRequest:
        with self._scope.writing(session_id) as draft:
            if run_id is None:
                run_id = draft.running_run_id
            elif run_id not in draft.runs:
                raise RunNotFound(run_id)
            else:
                check_interruptible(run_id, draft.runs[run_id].run.status)
            wanted = InterruptRequest(
                session_id=session_id, kind=kind, reason=reason, run_id=run_id, requested_at=moments.now()
            )
            draft.interrupt = standing = standing_request(draft.pending_interrupt, wanted)
            return standing

    def check_interrupt(self, session_id: str, run_id: str | None) -> InterruptRequest | None:
        pending = self._scope.require(session_id).pending_interrupt
        return pending if pending is not None and is_bound_to(pending, run_id) else None

    def clear_interrupt(self, session_id: str) -> bool:
        with self._scope.writing(session_id) as draft:
            was_pending = draft.pending_interrupt is not None
            draft.interrupt = None
            return was_pending


def _updated(stored: StoredRun, update: RunUpdate) -> StoredRun:
    """Return the run after the update; ``None`` leaves a field unchanged."""
    run = stored.run
    return replace(
        stored,
        run=replace(
            run,
            status=update.status,
            step_count=run.step_count if update.step_count is None else update.step_count,
            completion_reason=(
                run.completion_reason if update.completion_reason is None else update.completion_reason
            ),
            ended_at=end_of_run(update.status, run.ended_at, moments.now()),
        ),
        error=stored.error if update.error is None else update.error,
    )
