"""Runs, sub-session refs and interrupt requests in the database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet, Subquery

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
from helix_store.engine.commits import recorded_value
from helix_store.engine.database import (
    DatabaseOperations,
    reads,
    writes,
)
from helix_store.engine.statement import Statement
from helix_store.exceptions import RunNotFound
from helix_store.models import InterruptRequest as InterruptRow
from helix_store.models import Run as RunRow
from helix_store.models import Session
from helix_store.models import SubSessionRef as SubSessionRow
from helix_store.sessions.database.locking import (
    advance,
    lock_session,
    missing_session,
    session_key,
    touch,
)
from helix_store.sessions.database.rows import first_row, session_with_id
from helix_store.sessions.reading import interrupt_from, run_from, stored_run, sub_session_ref_from
from helix_store.sessions.requests import EncodedRef, RunUpdate
from helix_store.sessions.rules import (
    SUPERSEDED,
    check_interruptible,
    check_may_run,
    check_no_other_runs,
    check_not_superseded,
    check_same_ref,
    check_supersedes,
    is_bound_to,
    standing_request,
    taken_run,
    unknown_ref,
)
from helix_store.sessions.sql import END_LOCKED_RUN, RUN_COLUMNS, end_run, start_run


class DatabaseRuns(DatabaseOperations):
    def start_run(
        self, session_id: str, run_id: str, *, start_sequence: int, supersede: bool, guard: Guard
    ) -> Run:
        locked = partial(self._start_run_locked, session_id, run_id, start_sequence, supersede, guard)
        token, version = guard.fencing_token, guard.expected_version
        statement = start_run(is_expected=version is not None, is_fenced=token is not None)
        parameters = {
            "tenant": self.db.tenant,
            "session_id": session_id,
            "run_id": run_id,
            "start_sequence": start_sequence,
            "expected_version": version,
            "fencing_token": token,
            "at": moments.now(),
        }
        return self._written_once(statement, parameters, locked)

    def _written_once(
        self, statement: Statement, parameters: Mapping[str, Any], locked: Callable[[], Run]
    ) -> Run:
        session_id, run_id = parameters["session_id"], parameters["run_id"]

        def look_first(call_id: str) -> Run:
            row = first_row(self._runs_of(lock_session(self.db, session_id).pk).filter(run_id=run_id))
            # This call may have started or ended the run.
            is_recorded = row is not None and recorded_value(row.call_ids, call_id) is not None
            return run_from(row, session_id) if is_recorded else locked()

        return self.db.write_once(
            statement,
            parameters,
            partial(stored_run, session_id, RUN_COLUMNS),
            otherwise=locked,
            look_first=look_first,
            operation_id=run_id,
        )

    @writes
    def _start_run_locked(
        self, session_id: str, run_id: str, start_sequence: int, supersede: bool, guard: Guard
    ) -> Run:
        head = lock_session(self.db, session_id, guard)
        runs = self._runs_of(head.pk)
        at = moments.now()
        of_session = RunRow.objects.filter(session_id=OuterRef("pk"))
        running = of_session.filter(status=RunStatus.RUNNING.value)
        # Everything that a new run must know about its locked session, in one statement.
        is_taken, running_key, running_token, last_turn, has_interrupt = (
            Session.objects.using(self.db.alias)
            .filter(pk=head.pk)
            .values_list(
                Exists(of_session.filter(run_id=run_id)),
                Subquery(running.values("pk")[:1]),
                Subquery(running.values("fencing_token")[:1]),
                Subquery(of_session.order_by("-turn").values("turn")[:1]),
                Exists(InterruptRow.objects.filter(session_id=OuterRef("pk"))),
            )
            .get()
        )
        if is_taken:
            raise taken_run(run_id)
        if running_key is not None:
            check_supersedes(running_token, supersede=supersede, fencing_token=guard.fencing_token)
            runs.filter(pk=running_key).update(
                status=RunStatus.INTERRUPTED.value, completion_reason=SUPERSEDED, ended_at=at
            )
        row = runs.create(
            session_id=head.pk,
            run_id=run_id,
            turn=(last_turn or 0) + 1,
            status=RunStatus.RUNNING.value,
            start_sequence=start_sequence,
            fencing_token=guard.fencing_token,
            started_at=at,
        )
        if has_interrupt:
            self._interrupts_of(head.pk).delete()
        if head.status != SessionStatus.ACTIVE:
            advance(self.db, head, at=at, status=SessionStatus.ACTIVE.value)
        return run_from(row, session_id)

    def update_run(self, session_id: str, run_id: str, update: RunUpdate, guard: Guard) -> Run:
        locked = partial(self._update_run_locked, session_id, run_id, update, guard)
        if update.status is RunStatus.RUNNING:
            return locked()
        parameters = {
            **_end_parameters(run_id, update),
            "tenant": self.db.tenant,
            "session_id": session_id,
            "fencing_token": guard.fencing_token,
        }
        return self._written_once(end_run(is_fenced=guard.fencing_token is not None), parameters, locked)

    @writes
    def _update_run_locked(self, session_id: str, run_id: str, update: RunUpdate, guard: Guard) -> Run:
        key = lock_session(self.db, session_id, guard).pk
        if update.status is not RunStatus.RUNNING:
            parameters = {**_end_parameters(run_id, update), "key": key}
            for ended in self.db.execute(END_LOCKED_RUN[guard.fencing_token is not None], parameters):
                return stored_run(session_id, RUN_COLUMNS, ended)
        runs = self._runs_of(key)
        row = first_row(runs.filter(run_id=run_id))
        if row is None:
            raise RunNotFound(run_id)
        check_not_superseded(run_id, row.completion_reason, guard)
        if row.status != RunStatus.RUNNING:
            running = _running(runs)
            check_no_other_runs(None if running is None else running.run_id, run_id)
            check_may_run(run_id, row.status, row.completion_reason)
            self._interrupts_of(key).delete()
        row.status, row.ended_at = update.status.value, None
        given = {name: getattr(update, name) for name in ("step_count", "completion_reason", "error")}
        for name, value in given.items():
            if value is not None:
                setattr(row, name, value)
        row.save(using=self.db.alias, update_fields=["status", "ended_at", *given])
        return run_from(row, session_id)

    @reads
    def current_run(self, session_id: str) -> Run | None:
        running = _running(self._runs_of(session_key(self.db, session_id)))
        return None if running is None else run_from(running, session_id)

    @reads
    def select_runs(self, session_id: str, *, limit: int, offset: int) -> list[Run]:
        runs = self._runs_of(session_key(self.db, session_id)).order_by("-turn")
        return [run_from(row, session_id) for row in runs[offset : offset + limit]]

    def _runs_of(self, key: int) -> QuerySet[RunRow]:
        return RunRow.objects.using(self.db.alias).filter(session_id=key)

    @writes
    def add_refs(self, session_id: str, refs: Sequence[EncodedRef]) -> None:
        head = lock_session(self.db, session_id)
        rows = self._refs_of(head.pk)
        at = moments.now()
        known: dict[str, SubSessionRow | EncodedRef] = {
            row.sub_session_id: row
            for row in rows.filter(sub_session_id__in=[ref.sub_session_id for ref in refs])
        }
        new = []
        for ref in refs:
            stored = known.setdefault(ref.sub_session_id, ref)
            check_same_ref(stored, ref)
            if stored is ref:
                new.append(SubSessionRow(session_id=head.pk, created_at=at, updated_at=at, **asdict(ref)))
        rows.bulk_create(new)

    @writes
    def update_ref(self, session_id: str, sub_session_id: str, changes: Mapping[str, str]) -> SubSessionRef:
        rows = self._refs_of(lock_session(self.db, session_id).pk).filter(sub_session_id=sub_session_id)
        if changes:
            rows.update(updated_at=moments.now(), **changes)
        row = first_row(rows)
        if row is None:
            raise unknown_ref(sub_session_id)
        return sub_session_ref_from(row)

    @reads
    def select_refs(self, session_id: str) -> list[SubSessionRef]:
        return [
            sub_session_ref_from(row)
            for row in self._refs_of(session_key(self.db, session_id)).order_by("pk")
        ]

    def _refs_of(self, key: int) -> QuerySet[SubSessionRow]:
        return SubSessionRow.objects.using(self.db.alias).filter(session_id=key)

    @writes
    def request_interrupt(
        self, session_id: str, kind: InterruptKind, reason: str | None, run_id: str | None
    ) -> InterruptRequest:
        head = lock_session(self.db, session_id)
        wanted = InterruptRequest(
            session_id=session_id,
            kind=kind,
            reason=reason,
            run_id=self._bound_run(head.pk, run_id),
            requested_at=moments.now(),
        )
        row = first_row(self._pending_of(head.pk))
        pending = None if row is None else interrupt_from(row, session_id)
        standing = standing_request(pending, wanted)
        if standing is wanted:
            # A run that starts in one statement does not clear a request that it cannot see.
            touch(self.db, head)
            InterruptRow.objects.using(self.db.alias).update_or_create(
                session_id=head.pk,
                defaults={
                    "kind": wanted.kind.value,
                    "reason": wanted.reason,
                    "run_id": wanted.run_id,
                    "requested_at": wanted.requested_at,
                },
            )
        return standing

    @reads
    def check_interrupt(self, session_id: str, run_id: str | None) -> InterruptRequest | None:
        # This is one statement because a worker asks before each step.
        running = RunRow.objects.filter(
            session_id=OuterRef("pk"),
            status=RunStatus.RUNNING.value,
            run_id=OuterRef("interrupt_request__run_id"),
        )
        row = first_row(
            session_with_id(self.db, session_id)
            .select_related("interrupt_request")
            .only("id", "interrupt_request")
            .annotate(is_current=Exists(running))
        )
        if row is None:
            raise missing_session(self.db, session_id)
        found = getattr(row, "interrupt_request", None)
        if found is None or (found.run_id is not None and not row.is_current):
            return None
        pending = interrupt_from(found, session_id)
        return pending if is_bound_to(pending, run_id) else None

    @writes
    def clear_interrupt(self, session_id: str) -> bool:
        head = lock_session(self.db, session_id)
        return self._pending_of(head.pk).delete()[0] > 0

    def _interrupts_of(self, key: int) -> QuerySet[InterruptRow]:
        return InterruptRow.objects.using(self.db.alias).filter(session_id=key)

    def _pending_of(self, key: int) -> QuerySet[InterruptRow]:
        """Return the request unless it is stale: the same condition as `rules.is_stale`, in the query."""
        running = RunRow.objects.filter(
            session_id=key, status=RunStatus.RUNNING.value, run_id=OuterRef("run_id")
        )
        return self._interrupts_of(key).filter(Q(run_id=None) | Exists(running))

    def _bound_run(self, key: int, run_id: str | None) -> str | None:
        runs = self._runs_of(key)
        if run_id is None:
            return first_row(runs.filter(status=RunStatus.RUNNING.value).values_list("run_id", flat=True))
        status = first_row(runs.filter(run_id=run_id).values_list("status", flat=True))
        if status is None:
            raise RunNotFound(run_id)
        check_interruptible(run_id, status)
        return run_id


def _running(runs: QuerySet[RunRow]) -> RunRow | None:
    return first_row(runs.filter(status=RunStatus.RUNNING.value))


def _end_parameters(run_id: str, update: RunUpdate) -> dict[str, Any]:
    return {**asdict(update), "status": update.status.value, "run_id": run_id, "at": moments.now()}
