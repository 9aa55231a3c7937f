"""Runs, sub-session refs and interrupt requests: their rules, then their storage in the database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Any, Final

from django.db.models import BooleanField, Exists, ExpressionWrapper, OuterRef, Q, QuerySet, Subquery

from helix_store import conf
from helix_store.core import moments
from helix_store.core.moments import as_utc
from helix_store.core.types import (
    InterruptKind,
    InterruptRequest,
    Run,
    RunStatus,
    SessionStatus,
    SubSessionRef,
)
from helix_store.core.validation import Guard
from helix_store.engine.database import DatabaseOperations, reads, writes
from helix_store.engine.expressions import DatabaseNow, update_row
from helix_store.engine.statement import Clock, Statement, recorded_value, table, with_recorded
from helix_store.exceptions import ConflictError, NotFoundError, RunNotFound, shown_id
from helix_store.models import InterruptRequest as InterruptRow
from helix_store.models import Lock, Session
from helix_store.models import Run as RunRow
from helix_store.models import SubSessionRef as SubSessionRow
from helix_store.sessions.locking import (
    advance,
    first_row,
    lock_session,
    missing_session,
    session_key,
    touch,
    touch_session,
)
from helix_store.sessions.state import (
    SUPERSEDED,
    EncodedRef,
    interrupt_from,
    run_from,
    stored_run,
    sub_session_ref_from,
)
from helix_store.sessions.statements import (
    END_LOCKED_RUN,
    MARK_STOPPED,
    RUN_COLUMNS,
    end_run,
    session_by_id,
    start_run,
)

STOPPED_BY_ERROR: Final = "error"
STOPPED_BY_BUDGET: Final = "budget"
STOPPED_BY_EFFECT: Final = "effect"
STOPS: Final = (STOPPED_BY_ERROR, STOPPED_BY_BUDGET, STOPPED_BY_EFFECT)

_OVER: Final = frozenset({RunStatus.COMPLETED, RunStatus.FAILED})


def check_supersedes(running_token: int | None, *, supersede: bool, fencing_token: int | None) -> None:
    """Raise `ConflictError` unless a new run may replace the running one.

    It may do so with ``supersede``, or with a newer token than that of the running run, whose worker has then
    lost the lock. A run without a token counts as having token 0.
    """
    if not supersede and (fencing_token is None or fencing_token <= (running_token or 0)):
        raise ConflictError(
            "A run of this session is running; let it end, or start this one with supersede=True."
        )


def taken_run(run_id: str) -> ConflictError:
    """Return the error for starting a run whose id the session already has."""
    return ConflictError(f"The run id {shown_id(run_id)} is taken; choose another one.", run_id=run_id)


def unknown_ref(sub_session_id: str) -> NotFoundError:
    """Return the error for updating a ref that the session does not have."""
    return NotFoundError(
        f"The session has no sub-session ref with the id {shown_id(sub_session_id)}; add it first.",
        sub_session_id=sub_session_id,
    )


def check_no_other_runs(running_run_id: str | None, run_id: str) -> None:
    """Raise `ConflictError` if another run is running while this one is set to running."""
    if running_run_id is not None and running_run_id != run_id:
        raise ConflictError("Another run of this session is running; end it, then set this one to running.")


def check_may_run(run_id: str, status: RunStatus | str, completion_reason: str | None) -> None:
    """Raise `ConflictError` if this run is set to running although it has ended.

    A run that is waiting or was interrupted may continue. A superseded run may not: its worker has lost the
    session and would prevent the next run from starting.
    """
    if status in _OVER or (status != RunStatus.RUNNING and completion_reason == SUPERSEDED):
        raise ConflictError(f"The run {shown_id(run_id)} is over; start another run.", run_id=run_id)


def check_not_superseded(run_id: str, completion_reason: str | None, guard: Guard) -> None:
    """Raise `ConflictError` if the holder of a lock updates a run that another run has replaced."""
    if guard.fencing_token is not None and completion_reason == SUPERSEDED:
        raise ConflictError(f"The run {shown_id(run_id)} was superseded; stop this worker.", run_id=run_id)


def check_interruptible(run_id: str, status: RunStatus | str) -> None:
    """Raise `ConflictError` if an interrupt is requested for a run that is not running."""
    if status != RunStatus.RUNNING:
        raise ConflictError(
            f"The run {shown_id(run_id)} has ended; request the interrupt without run_id.",
            run_id=run_id,
        )


def end_of_run(status: RunStatus, ended_at: datetime | None, now: datetime) -> datetime | None:
    """Return the end time of a run with this status: the first one is kept, and a running run has none."""
    if status is RunStatus.RUNNING:
        return None
    return now if ended_at is None else ended_at


def request_to_keep(pending: InterruptRequest | None, wanted: InterruptRequest) -> InterruptRequest:
    """Return the request to keep: the newer one, except that an interrupt never replaces an abort."""
    if pending is not None and pending.kind == InterruptKind.ABORT and wanted.kind != InterruptKind.ABORT:
        return pending
    return wanted


def is_stale(request: InterruptRequest, running_run_id: str | None) -> bool:
    """Return whether the request is bound to a run that has ended, so that it no longer counts."""
    return request.run_id not in (None, running_run_id)


def is_bound_to(request: InterruptRequest, run_id: str | None) -> bool:
    """Return whether a check with this ``run_id`` returns the request; ``None`` matches every request."""
    return run_id is None or request.run_id == run_id


_identity_of: Final = attrgetter("agent_type", "parent_tool_call_id", "location")


def check_same_ref(stored: object, given: object) -> None:
    """Raise `ConflictError` if a ref is added again with another agent type, tool call or location."""
    if _identity_of(stored) != _identity_of(given):
        raise ConflictError(
            "This sub-session has another agent type, tool call or location, which never change; "
            "use another sub-session id."
        )


BUDGET_REASON: Final = "budget:"
EFFECT_REASON: Final = "effect:"
"""The beginnings of the reasons of runs that were interrupted by a budget or an unknown effect."""


def stop_of(update: RunUpdate) -> str | None:
    """Return what has stopped the session if its newest run ends like this; ``None`` if it can go on."""
    if update.status is RunStatus.FAILED:
        return STOPPED_BY_ERROR
    reason = update.completion_reason or ""
    if update.status is RunStatus.INTERRUPTED and reason.startswith(BUDGET_REASON):
        return STOPPED_BY_BUDGET
    if update.status is RunStatus.INTERRUPTED and reason.startswith(EFFECT_REASON):
        return STOPPED_BY_EFFECT
    return None


def is_abandoned(clock: Clock, *, run: str, session: str) -> str:
    """Return the condition that a running run is abandoned: the lock with the name of its session was held
    with its token or a newer one, and nobody holds it now.

    A run without a token, or with one of another lock manager, has no sign of life that could end.
    """
    return f"""EXISTS (
                SELECT 1 FROM {table(Lock)} AS gone
                WHERE gone.tenant = {session}.tenant AND gone.name = {session}.session_id
                    AND gone.token >= {run}.fencing_token
                    AND (gone.expires_at IS NULL OR gone.expires_at <= {clock.now}))"""


def with_abandoned(runs: QuerySet[RunRow]) -> QuerySet[RunRow]:
    """Annotate runs with ``is_abandoned``: they are running, and the condition `is_abandoned` holds."""
    gone = Lock.objects.filter(
        Q(expires_at=None) | Q(expires_at__lte=DatabaseNow()),
        tenant=OuterRef("session__tenant"),
        name=OuterRef("session__session_id"),
        token__gte=OuterRef("fencing_token"),
    )
    is_running = Q(status=RunStatus.RUNNING.value)
    return runs.annotate(
        is_abandoned=ExpressionWrapper(is_running & Exists(gone), output_field=BooleanField())
    )


def has_live_run(clock: Clock, session: str) -> str:
    """Return the condition that a session has a running run that is not abandoned."""
    return f"""EXISTS (
                SELECT 1 FROM {table(RunRow)} AS r
                WHERE r.session_id = {session}.id AND r.status = '{RunStatus.RUNNING.value}'
                    AND NOT {is_abandoned(clock, run="r", session=session)})"""


_NOT_STOPPED: Final = {"stopped_by": None, "stopped_at": None}

# A session without a request has a row too, so one statement also shows whether the session exists. A worker
# asks before each step, and about once a second while it streams an answer.
_PENDING: Final = Statement(
    f"""
    SELECT i.kind, i.reason, i.run_id, i.requested_at FROM {table(Session)} AS s
    LEFT JOIN {table(InterruptRow)} AS i ON i.session_id = s.id AND (i.run_id IS NULL OR EXISTS (
        SELECT 1 FROM {table(RunRow)} AS r
        WHERE r.session_id = s.id AND r.run_id = i.run_id AND r.status = '{RunStatus.RUNNING.value}'
    ))
    WHERE {session_by_id("s")}"""
)
"""The request of a session, unless it is stale: the same condition as `is_stale`."""


class DatabaseRuns(DatabaseOperations):
    def start_run(
        self,
        session_id: str,
        run_id: str,
        *,
        start_sequence: int,
        supersede: bool,
        guard: Guard,
        keeps_status: bool,
    ) -> tuple[Run, str | None]:
        """Start a run, and return it and the id of the run that it has superseded."""
        superseded: list[str] = []
        locked = partial(
            self._start_run_locked,
            superseded,
            session_id,
            run_id,
            start_sequence,
            supersede,
            guard,
            keeps_status,
        )
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
            "build": conf.build(),
        }
        run = self._written_once(statement, parameters, locked)
        return run, superseded[-1] if superseded else None

    def _written_once(
        self, statement: Statement, parameters: Mapping[str, Any], locked: Callable[[str], Run]
    ) -> Run:
        session_id, run_id = parameters["session_id"], parameters["run_id"]

        def look_first(call_id: str) -> Run:
            row = first_row(self._runs_of(lock_session(self.db, session_id).pk).filter(run_id=run_id))
            # This call may have started or ended the run.
            is_recorded = row is not None and recorded_value(row.call_ids, call_id) is not None
            return run_from(row, session_id) if is_recorded else locked(call_id)

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
        self,
        superseded: list[str],
        session_id: str,
        run_id: str,
        start_sequence: int,
        supersede: bool,
        guard: Guard,
        keeps_status: bool,
        call_id: str = "",
    ) -> Run:
        head = touch_session(self.db, session_id, guard, "stopped_by")
        runs = self._runs_of(head.pk)
        at = moments.now()
        of_session = RunRow.objects.filter(session_id=OuterRef("pk"))
        running = of_session.filter(status=RunStatus.RUNNING.value)
        # Everything that a new run must know about its locked session, in one statement.
        is_taken, running_key, running_id, running_token, last_turn, has_interrupt = (
            Session.objects.using(self.db.alias)
            .filter(pk=head.pk)
            .values_list(
                Exists(of_session.filter(run_id=run_id)),
                Subquery(running.values("pk")[:1]),
                Subquery(running.values("run_id")[:1]),
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
            superseded.append(running_id)
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
            build=conf.build(),
            call_ids=with_recorded(None, call_id),  # type: ignore[misc]  # the field is nullable
        )
        if has_interrupt:
            self._interrupts_of(head.pk).delete()
        restarted = {} if head.stopped_by is None else _NOT_STOPPED
        if head.status != SessionStatus.ACTIVE and not keeps_status:
            advance(self.db, head, at=at, status=SessionStatus.ACTIVE.value, **restarted)
        elif restarted:
            update_row(self.db, Session, head.pk, restarted)
        return run_from(row, session_id)

    def update_run(self, session_id: str, run_id: str, update: RunUpdate, guard: Guard) -> Run:
        locked = partial(self._update_run_locked, session_id, run_id, update, guard)
        if update.status is RunStatus.RUNNING:
            return locked()
        stopped_by = stop_of(update)
        parameters = {
            **_end_parameters(run_id, update),
            "tenant": self.db.tenant,
            "session_id": session_id,
            "fencing_token": guard.fencing_token,
            "stopped_by": stopped_by,
        }
        statement = end_run(is_fenced=guard.fencing_token is not None, is_stop=stopped_by is not None)
        return self._written_once(statement, parameters, locked)

    @writes
    def _update_run_locked(
        self, session_id: str, run_id: str, update: RunUpdate, guard: Guard, call_id: str = ""
    ) -> Run:
        key = touch_session(self.db, session_id, guard).pk
        stopped_by = stop_of(update)
        if update.status is not RunStatus.RUNNING:
            parameters = {**_end_parameters(run_id, update), "key": key, "call_id": call_id}
            for columns in self.db.execute(END_LOCKED_RUN[guard.fencing_token is not None], parameters):
                ended = stored_run(session_id, RUN_COLUMNS, columns)
                if stopped_by is not None:
                    self._mark_stopped(key, ended.turn, stopped_by, ended.ended_at)
                return ended
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
            self._mark_stopped(key, row.turn, None, None)
        row.status, row.ended_at, row.build = update.status.value, None, conf.build()
        given = {name: getattr(update, name) for name in ("step_count", "completion_reason", "error")}
        for name, value in given.items():
            if value is not None:
                setattr(row, name, value)
        row.save(using=self.db.alias, update_fields=["status", "ended_at", "build", *given])
        return run_from(row, session_id)

    def _mark_stopped(self, key: int, turn: int, stopped_by: str | None, stopped_at: datetime | None) -> None:
        mark = {"key": key, "turn": turn, "stopped_by": stopped_by, "stopped_at": stopped_at}
        self.db.execute(MARK_STOPPED, mark)

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
        head = touch_session(self.db, session_id)
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
        rows = self._refs_of(touch_session(self.db, session_id).pk).filter(sub_session_id=sub_session_id)
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
        kept = request_to_keep(pending, wanted)
        if kept is wanted:
            # A run that starts in one statement then notices the request.
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
        return kept

    def check_interrupt(self, session_id: str, run_id: str | None) -> InterruptRequest | None:
        rows = self.db.read(_PENDING, {"tenant": self.db.tenant, "session_id": session_id})
        if not rows:
            raise missing_session(self.db, session_id)
        ((kind, reason, of_run, requested_at),) = rows
        if kind is None:
            return None
        pending = InterruptRequest(
            session_id=session_id,
            kind=InterruptKind(kind),
            reason=reason,
            run_id=of_run,
            requested_at=as_utc(requested_at),
        )
        return pending if is_bound_to(pending, run_id) else None

    @writes
    def clear_interrupt(self, session_id: str) -> bool:
        head = touch_session(self.db, session_id)
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
    return {**asdict(update), "status": update.status.value, "run_id": run_id}


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """An update of a run. ``None`` leaves ``step_count``, ``completion_reason`` or ``error`` unchanged."""

    status: RunStatus
    step_count: int | None = None
    completion_reason: str | None = None
    error: str | None = None
    refused_usd: int | None = None
    """What a budget refused, in the smallest unit of dollars."""
    refused_tokens: int | None = None
