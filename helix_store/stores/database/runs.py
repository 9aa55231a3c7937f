"""Runs in the database."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Max, QuerySet
from django.utils import timezone

from helix_store.core.requests import Guard
from helix_store.core.runs import SUPERSEDED, check_no_other_runs, check_supersedes, end_of_run
from helix_store.core.types import Run, RunStatus, SessionStatus
from helix_store.exceptions import ConflictError, RunNotFound
from helix_store.models import InterruptRequest
from helix_store.models import Run as RunRow
from helix_store.stores.backend import RunUpdate
from helix_store.stores.database.locking import bump, lock_session, session_key
from helix_store.stores.database.records import first_row, run_from
from helix_store.stores.database.scope import DatabaseVerbs, reads, writes

__all__ = ["DatabaseRuns"]


class DatabaseRuns(DatabaseVerbs):
    @writes
    def start(
        self, session_id: str, run_id: str, *, start_sequence: int, supersede: bool, guard: Guard
    ) -> Run:
        head = lock_session(self.scope, session_id, guard)
        runs = self._of(head.pk)
        at = timezone.now()
        if runs.filter(run_id=run_id).exists():
            raise ConflictError("This run id is taken; choose another one.")
        running = _running(runs)
        if running is not None:
            check_supersedes(running.fencing_token, supersede=supersede, fencing_token=guard.fencing_token)
            _end_superseded(runs, running, at)
        last_turn = runs.aggregate(last=Max("turn"))["last"] or 0
        row = runs.create(
            session_id=head.pk,
            run_id=run_id,
            turn=last_turn + 1,
            status=RunStatus.RUNNING.value,
            start_sequence=start_sequence,
            fencing_token=guard.fencing_token,
            started_at=at,
        )
        InterruptRequest.objects.using(self.scope.alias).filter(session_id=head.pk).delete()
        if head.status != SessionStatus.ACTIVE:
            bump(self.scope, head, at=at, status=SessionStatus.ACTIVE.value)
        return run_from(row, session_id)

    @writes
    def update(self, session_id: str, run_id: str, update: RunUpdate) -> Run:
        runs = self._of(lock_session(self.scope, session_id).pk)
        row = first_row(runs.filter(run_id=run_id))
        if row is None:
            raise RunNotFound(run_id)
        if update.status is RunStatus.RUNNING:
            running = _running(runs)
            check_no_other_runs(None if running is None else running.run_id, run_id)
        row.status = update.status.value
        row.ended_at = end_of_run(update.status, row.ended_at, timezone.now())
        given = {name: getattr(update, name) for name in ("step_count", "completion_reason", "error")}
        for name, value in given.items():
            if value is not None:
                setattr(row, name, value)
        row.save(using=self.scope.alias, update_fields=["status", "ended_at", *given])
        return run_from(row, session_id)

    @reads
    def current(self, session_id: str) -> Run | None:
        running = _running(self._of(session_key(self.scope, session_id)))
        return None if running is None else run_from(running, session_id)

    @reads
    def select(self, session_id: str, *, limit: int, offset: int) -> list[Run]:
        runs = self._of(session_key(self.scope, session_id)).order_by("-turn")
        return [run_from(row, session_id) for row in runs[offset : offset + limit]]

    def _of(self, key: int) -> QuerySet[RunRow]:
        return RunRow.objects.using(self.scope.alias).filter(session_id=key)


def _running(runs: QuerySet[RunRow]) -> RunRow | None:
    return first_row(runs.filter(status=RunStatus.RUNNING.value))


def _end_superseded(runs: QuerySet[RunRow], running: RunRow, at: datetime) -> None:
    runs.filter(pk=running.pk).update(
        status=RunStatus.INTERRUPTED.value, completion_reason=SUPERSEDED, ended_at=at
    )
