"""Runs in memory: one record per turn of a session."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from django.utils import timezone

from helix_store.core.requests import Guard
from helix_store.core.runs import SUPERSEDED, check_no_other_runs, check_supersedes, end_of_run
from helix_store.core.types import Run, RunStatus, SessionStatus
from helix_store.exceptions import ConflictError, RunNotFound
from helix_store.stores.backend import RunUpdate
from helix_store.stores.memory.records import StoredRun
from helix_store.stores.memory.scope import TenantScope

__all__ = ["MemoryRuns"]


class MemoryRuns:
    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def start(
        self, session_id: str, run_id: str, *, start_sequence: int, supersede: bool, guard: Guard
    ) -> Run:
        with self._scope.writing(session_id, guard) as draft:
            if run_id in draft.runs:
                raise ConflictError("The session has a run with this id already.")
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
                started_at=timezone.now(),
            )
            draft.runs[run_id] = StoredRun(started, guard.fencing_token)
            draft.interrupt = None
            if draft.columns["status"] != SessionStatus.ACTIVE:
                draft.write(status=SessionStatus.ACTIVE.value)
            return started

    def update(self, session_id: str, run_id: str, update: RunUpdate) -> Run:
        with self._scope.writing(session_id) as draft:
            stored = draft.runs.get(run_id)
            if stored is None:
                raise RunNotFound(run_id)
            if update.status is RunStatus.RUNNING and draft.running_run is not None:
                check_no_other_runs(draft.running_run.run.run_id, run_id)
            updated = draft.runs[run_id] = _updated(stored, update)
            return updated.value()

    def current(self, session_id: str) -> Run | None:
        running = self._scope.require(session_id).running_run
        return None if running is None else running.value()

    def select(self, session_id: str, *, limit: int, offset: int) -> list[Run]:
        runs = self._scope.require(session_id).runs
        return [stored.value() for stored in islice(reversed(runs.values()), offset, offset + limit)]


def _updated(stored: StoredRun, update: RunUpdate) -> StoredRun:
    """The run with what the update gives; what it leaves out stays."""
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
            ended_at=end_of_run(update.status, run.ended_at, timezone.now()),
        ),
        error=stored.error if update.error is None else update.error,
    )
