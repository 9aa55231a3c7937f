"""The public calls of a state store for steps and for what a session waits for: they check arguments, then
call a back end.

The back ends of a state store, and the base class of the public calls.

A back end receives checked arguments, valid ids and encoded payloads. Every write is atomic, takes the
session's lock first and raises `SessionNotFound` if the session is unknown. A returned version is the new
version. Session ids belong to the back end's tenant.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from helix_store import conf
from helix_store.core import validation
from helix_store.core.approvals import Actor, ApprovedCall
from helix_store.core.dicts import AnyMessage, AnyStagedChanges, AnyToolCall
from helix_store.core.ids import new_id
from helix_store.core.limits import Limits
from helix_store.core.patches import check_operation_count, check_staged_patches
from helix_store.core.payloads import encode
from helix_store.core.types import (
    UNSET,
    InterruptKind,
    InterruptRequest,
    PendingToolCall,
    Run,
    RunStatus,
    SessionState,
    SessionStatus,
    StagedChanges,
    StepCommit,
    StepInfo,
    Submission,
    Timestamp,
)
from helix_store.core.validation import Guard, guard
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import InvalidPayload, SessionNotFound
from helix_store.sessions.runs import RunUpdate
from helix_store.sessions.state import loaded_of, suspension_kind
from helix_store.sessions.steps import StagedRow, StepWrite
from helix_store.sessions.tool_calls import (
    Answer,
    ToolCalls,
    checked_answer,
    checked_calls,
    permissions_of,
)
from helix_store.sessions.waiting import Suspension

if TYPE_CHECKING:
    from helix_store.sessions.checkpoints import DatabaseCheckpoints
    from helix_store.sessions.effects import DatabaseEffects
    from helix_store.sessions.heads import DatabaseSessions
    from helix_store.sessions.memory import (
        MemoryCheckpoints,
        MemoryEffects,
        MemoryMessages,
        MemoryPosts,
        MemoryRuns,
        MemorySessions,
        MemorySteps,
        MemoryWaiting,
    )
    from helix_store.sessions.messages import DatabaseMessages, DatabasePosts
    from helix_store.sessions.runs import DatabaseRuns
    from helix_store.sessions.steps import DatabaseSteps
    from helix_store.sessions.waiting import DatabaseWaiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """All operations of a back end, by subject. Both back ends have the same operations."""

    sessions: DatabaseSessions | MemorySessions
    messages: DatabaseMessages | MemoryMessages
    steps: DatabaseSteps | MemorySteps
    checkpoints: DatabaseCheckpoints | MemoryCheckpoints
    runs: DatabaseRuns | MemoryRuns
    waiting: DatabaseWaiting | MemoryWaiting
    posts: DatabasePosts | MemoryPosts
    effects: DatabaseEffects | MemoryEffects


class StoreCalls:
    """The base class of the public calls, for one tenant. ``limits`` replaces ``HELIX_STORE["LIMITS"]``."""

    def __init__(self, backend: Backend, *, tenant: str, limits: Limits | None) -> None:
        self._backend = backend
        self.tenant = tenant
        self._given_limits = limits

    @property
    def limits(self) -> Limits:
        return conf.limits(self._given_limits)

    def _require_session(self, session_id: str) -> None:
        """Raise `SessionNotFound` if a state of another session is written to one that does not exist."""
        if not self._backend.sessions.exists(validation.identifier(session_id, "session_id")):
            raise SessionNotFound(session_id)


_RUN_RULES: Final[dict[str, validation.Rule]] = {
    "session_id": validation.identifier,
    "run_id": validation.identifier,
    "status": validation.enum_text(RunStatus),
    "start_sequence": validation.whole_number,
    "step_count": validation.optional(validation.whole_number),
    "completion_reason": validation.reason,
    "expected_version": validation.optional(validation.whole_number),
    "fencing_token": validation.optional(validation.whole_number),
    "supersede": validation.flag,
}
_STAGING_RULES: Final[dict[str, validation.Rule]] = {
    "session_id": validation.identifier,
    "step_id": validation.identifier,
    "tool_call_id": validation.identifier,
}


class StepCalls(StoreCalls):
    def start_run(
        self,
        session_id: str,
        run_id: str | None = None,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
        start_sequence: int = 0,
        supersede: bool = False,
    ) -> Run:
        """Open the session's next turn and set the session active.

        Runs in one transaction that also clears a pending interrupt request. Raises `ConflictError` if the
        run id exists, or if another run is running. With ``supersede``, or a newer ``fencing_token`` than
        that run's, the other run ends as ``interrupted`` with the reason ``superseded`` instead.
        """
        run, _ = start_run(
            self._backend,
            session_id,
            run_id,
            expected_version=expected_version,
            fencing_token=fencing_token,
            start_sequence=start_sequence,
            supersede=supersede,
        )
        return run

    def update_run(
        self,
        session_id: str,
        run_id: str,
        *,
        status: RunStatus | str,
        step_count: int | None = None,
        completion_reason: str | None = None,
        error: Any = None,
        fencing_token: int | None = None,
    ) -> Run:
        """Set a run's status; any status but ``running`` ends it. ``None`` leaves a field unchanged.

        A run that waits or was interrupted can be set to ``running`` again, which clears a pending interrupt
        request as `start_run` does. Raises `RunNotFound`. Raises `ConflictError` for status ``running`` if
        another run is running, or if the run has completed, failed or been superseded. With a
        ``fencing_token``, no status can be set on a superseded run.
        """
        return update_run(
            self._backend,
            self._given_limits,
            session_id,
            run_id,
            status=status,
            step_count=step_count,
            completion_reason=completion_reason,
            error=error,
            fencing_token=fencing_token,
        )

    def get_current_run(self, session_id: str) -> Run | None:
        """Return the running run, or ``None``. Raises `SessionNotFound`."""
        return self._backend.runs.current_run(validation.identifier(session_id, "session_id"))

    def list_runs(self, session_id: str, *, limit: int = 50, offset: int = 0) -> list[Run]:
        """List the session's runs, newest first. ``limit`` is 1 to 200; larger values mean 200."""
        return self._backend.runs.select_runs(
            validation.identifier(session_id, "session_id"),
            limit=validation.page_limit(limit),
            offset=validation.page_offset(offset),
        )

    def stage_changes(self, session_id: str, step_id: str, staged: StagedChanges | AnyStagedChanges) -> None:
        """Stage one tool call's changes for a step; `load_state` does not show them until they are promoted.

        Runs in one transaction under the same session lock as steps: a step that commits at the same time
        either promotes the whole change or leaves it staged. Safe to repeat: the same tool call replaces its
        earlier change and keeps its order. Raises `InvalidPayload`. Raises `LimitExceeded`, even for a patch
        that could not be applied to any state.
        """
        stage(self._backend, self._given_limits, session_id, step_id, staged)

    def get_staged_changes(self, session_id: str, step_id: str) -> list[StagedChanges]:
        """Return the changes staged for a step, in staging order."""
        validation.identifier(session_id, "session_id")
        return self._backend.steps.staged(session_id, validation.identifier(step_id, "step_id"))

    def promote_staging(
        self,
        session_id: str,
        step_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Apply a step's staged changes to the custom state in staging order, clear them, return the version.

        Runs in one transaction. If no change is staged, the version does not change. Raises `PatchError` if a
        patch cannot be applied: then no change is applied, and all changes stay staged.
        """
        validation.identifier(session_id, "session_id")
        validation.identifier(step_id, "step_id")
        return self._backend.steps.promote(session_id, step_id, guard(expected_version, fencing_token))

    def discard_staging(self, session_id: str, step_id: str) -> int:
        """Delete a step's staged changes and return their number. Safe to repeat."""
        validation.identifier(session_id, "session_id")
        return self._backend.steps.discard(session_id, validation.identifier(step_id, "step_id"))

    def save_state_and_promote_staging(
        self,
        session_id: str,
        state: SessionState,
        append_messages: Sequence[AnyMessage],
        step: StepInfo | Mapping[str, Any],
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
        operation_id: str | None = None,
        run_id: str | None = None,
    ) -> StepCommit:
        """Commit one step: state, messages, staged changes and checkpoint, all or nothing.

        Runs in one transaction under the session's lock. The step's staged changes are applied on top of
        ``state.custom_state`` and cleared; the checkpoint refers to the history by message count. The stored
        state takes the ``step_count`` of the step, regardless of the value in ``state``. Raises
        `StaleStateError` and `PatchError`, `RunNotFound` if the run belongs to another session, and
        `ConflictError` if the mode is already set to another one; then nothing is written. With an
        ``operation_id``, a repeat returns the first result; another payload with the same id raises
        `IdempotencyConflict`. If ``CHECKPOINTS_KEEP`` is set, all but the newest checkpoints are deleted.

        If the reply to COMMIT is lost, the call looks up the outcome on another connection and writes the
        step if it is not stored. If the server does not answer for five seconds, it raises `OutcomeUnknown`:
        repeat the call with the ``operation_id`` of that error to find the outcome. Inside the caller's
        ``atomic()`` block, the caller owns the commit.
        Source: `saveStateAndPromoteStaging` of `@helix-agents/store-postgres`.
        """
        if isinstance(state, SessionState) and state.session_id != session_id:
            self._require_session(session_id)
        write = StepWrite(
            session_id=session_id,
            state=state,
            messages=append_messages,
            info=step if isinstance(step, StepInfo) else StepInfo.from_dict(step),
            expected_version=expected_version,
            fencing_token=fencing_token,
            operation_id=operation_id,
            run_id=run_id,
        )
        limits, keep = conf.rules_of_step(self._given_limits)
        return write.committed_by(self._backend.steps.commit, limits, keep=keep)[0]

    astart_run = async_twin(start_run)
    aupdate_run = async_twin(update_run)
    aget_current_run = async_twin(get_current_run)
    alist_runs = async_twin(list_runs)
    astage_changes = async_twin(stage_changes)
    aget_staged_changes = async_twin(get_staged_changes)
    apromote_staging = async_twin(promote_staging)
    adiscard_staging = async_twin(discard_staging)
    asave_state_and_promote_staging = async_twin(save_state_and_promote_staging)


_LARGEST_PAGE = 1_000
_RULES: Final[dict[str, validation.Rule]] = {
    "session_id": validation.identifier,
    "tool_call_id": validation.identifier,
}


class WaitingCalls(StoreCalls):
    def add_pending_tool_calls(
        self,
        session_id: str,
        calls: Mapping[str, AnyToolCall],
        *,
        owner_session_id: str | None = None,
        fencing_token: int | None = None,
    ) -> None:
        """Add pending tool calls, by tool call id, for a client or a person to answer.

        The calls belong to the session, or to ``owner_session_id`` of the same tree. The root session records
        the owner, so that an answer sent to any session of the tree finds the call. A ``permission`` must
        exist in the project's database, which takes one statement more. Runs in one transaction
        that locks both rows; each session that it changes gets one new version. Safe to repeat. The
        ``fencing_token`` belongs to the lock of ``session_id``. Raises `LimitExceeded`, and `ConflictError`
        if the tree already has a call with this id or it was answered before.
        """
        validation.identifier(session_id, "session_id")
        owner_id = validation.optional_identifier(owner_session_id, "owner_session_id") or session_id
        entries = checked_calls(calls, requested_at=_now(), limits=self.limits)
        require_permissions(self._backend, entries)
        fence = guard(fencing_token=fencing_token)
        self._backend.waiting.add_calls(session_id, entries, owner_id, fence)

    def submit_tool_result(
        self,
        session_id: str,
        tool_call_id: str,
        *,
        result: Any = None,
        error: Any = None,
        approval_id: str | None = None,
        approved: bool | None = None,
        reason: str | None = None,
        actor: Actor | None = None,
        digest: str | None = None,
        input: Any = UNSET,
    ) -> Submission:
        """Answer a call from any session of its tree. The agent continues after `resume`.

        Runs in one transaction under the lock of the session that owns the call. Only the first answer
        counts. Any later answer returns ``already_completed`` and changes nothing, even after the agent has
        taken the first answer or a deadline has passed and its default answer applies. An approval takes
        ``approved`` with its ``approval_id``, or only an ``error``; any other call takes a ``result`` (which
        may be ``None``) or an ``error``. Raises `InvalidPayload` for any other combination. For a call of a
        session that has ended, the result is ``unknown_tool_call``.

        ``actor`` is a string or a Django user, who is stored as ``user:<pk>``. Raises `NotPermitted` if a
        call has a permission or a requester and this actor may not answer it. With the ``digest`` that the
        person was shown, the answer to any other call is ``changed``. ``input`` approves a changed input of
        an editable call. If a call needs several approvals, every approval but the last is ``recorded``, each
        from a different actor; an edit discards the earlier ones, and a rejection is final.
        """
        answer = checked_answer(
            result=result,
            error=error,
            approval_id=approval_id,
            approved=approved,
            reason=reason,
            actor=actor,
            digest=digest,
            input=input,
            limits=conf.limits(self._given_limits),
        )
        return self._submit(session_id, tool_call_id, answer)

    def _submit(self, session_id: str, tool_call_id: str, answer: Answer) -> Submission:
        validation.arguments(_RULES, session_id=session_id, tool_call_id=tool_call_id)
        return self._backend.waiting.submit_answer(session_id, tool_call_id, answer, submitted_at=_now())

    def take_tool_results(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> dict[str, dict[str, Any]]:
        """Take the answers to the session's own calls, by tool call id, in the order of the calls.

        Each answer is ``{"result": …}``, ``{"error": …}`` or ``{"approved": …, "reason": …}`` with
        ``submitted_at`` in epoch milliseconds, ``actors`` if they are known, and ``input`` with its
        ``digest`` if the input was changed. Runs in one transaction that moves the calls to
        ``completed_client_tool_calls``, where you can read the answers again. An answer to an approval
        that only the state holds is left out: nobody has given it. If no call is answered, the version does
        not change. Raises `StaleStateError`.
        """
        return self._backend.waiting.take_answers(
            validation.identifier(session_id, "session_id"), guard(expected_version, fencing_token)
        )

    def find_expired_pending(
        self, *, now: Timestamp | None = None, limit: int = 200
    ) -> list[PendingToolCall]:
        """Find unanswered calls whose deadline has passed, the longest overdue first.

        Leaves out sessions that have ended. ``now`` is an aware datetime or epoch milliseconds, by default
        the time of the database; ``limit`` is 1 to 1,000, and larger values mean 1,000.
        """
        at = None if now is None else validation.aware_datetime(now, "now")
        return self._backend.waiting.overdue_calls(at, validation.page_limit(limit, maximum=_LARGEST_PAGE))

    def suspend(
        self,
        session_id: str,
        *,
        kind: RunStatus | str,
        context: dict[str, Any],
        pending: Mapping[str, AnyToolCall] | None = None,
        awaiting_children: list[Any] | None = None,
        step_id: str | None = None,
        tracing: dict[str, Any] | None = None,
        expires_at: Timestamp | None = None,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Pause a session, store the data it will continue with, and return the new version.

        Runs in one transaction that sets the status ``paused``, stores the continuation, adds the ``pending``
        calls as `add_pending_tool_calls` does, and ends the running run with ``kind``, one of the suspended
        statuses of a run. Without ``tracing`` or ``expires_at`` (epoch milliseconds), the stored value is
        kept; a second suspension replaces everything else. Raises `StaleStateError`, and `ConflictError` if
        the session has ended.
        """
        validation.identifier(session_id, "session_id")
        limits = self.limits
        calls = {} if pending is None else checked_calls(pending, requested_at=_now(), limits=limits)
        require_permissions(self._backend, calls)
        columns: dict[str, Any] = {
            "status": SessionStatus.PAUSED.value,
            "suspension_kind": suspension_kind(kind, "kind"),
            "suspension_context": _encoded("context", context, dict, limits),
            "suspended_awaiting_children": None,
            "suspended_step_id": validation.optional_identifier(step_id, "step_id"),
        }
        if awaiting_children is not None:
            children = _encoded("awaiting_children", awaiting_children, list, limits)
            columns["suspended_awaiting_children"] = children
        if tracing is not None:
            columns["tracing_context"] = _encoded("tracing", tracing, dict, limits)
        if expires_at is not None:
            milliseconds = validation.epoch_milliseconds(expires_at, "expires_at")
            columns["expires_at"] = validation.milliseconds_to_datetime(milliseconds)
        suspension = Suspension(columns, calls)
        return self._backend.waiting.suspend(session_id, suspension, guard(expected_version, fencing_token))

    def resume(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> SessionState:
        """Make a suspended session active and return its state, including the continuation just cleared.

        Runs in one transaction that clears the suspension and the expiry and adds one to ``resume_count``.
        The returned state still holds ``suspension_…``, ``suspended_…`` and ``tracing_context``. Saving the
        state omits them, but saves values that you assign to them. A state copied from it by ``from_dict`` or
        ``dataclasses.replace`` holds them as its own. Raises `StaleStateError`, and `ConflictError` if the
        session is not suspended: of two concurrent resumes, one succeeds.
        """
        return self._backend.waiting.resume(
            validation.identifier(session_id, "session_id"), guard(expected_version, fencing_token)
        )

    def request_interrupt(
        self,
        session_id: str,
        *,
        kind: InterruptKind | str = "interrupt",
        reason: str | None = None,
        run_id: str | None = None,
    ) -> InterruptRequest:
        """Request that the session's current run stops, in whichever process it runs.

        The request is bound to ``run_id``, by default to the running run, if there is one, and expires when
        that run ends. Safe to repeat. An abort replaces an interrupt; an interrupt never replaces an abort.
        Raises `RunNotFound`, and `ConflictError` if the run has ended.
        """
        return self._backend.runs.request_interrupt(
            validation.identifier(session_id, "session_id"),
            validation.enum(InterruptKind, kind, "kind"),
            validation.reason(reason),
            validation.optional_identifier(run_id, "run_id"),
        )

    def check_interrupt(self, session_id: str, *, run_id: str | None = None) -> InterruptRequest | None:
        """Return the pending request, or ``None``; with ``run_id``, only a request bound to this run.

        A request bound to a run that has ended is not pending.
        """
        return self._backend.runs.check_interrupt(
            validation.identifier(session_id, "session_id"), validation.optional_identifier(run_id, "run_id")
        )

    def clear_interrupt(self, session_id: str) -> bool:
        """Delete the pending request and return whether there was one. Safe to repeat."""
        return self._backend.runs.clear_interrupt(validation.identifier(session_id, "session_id"))

    aadd_pending_tool_calls = async_twin(add_pending_tool_calls)
    asubmit_tool_result = async_twin(submit_tool_result)
    atake_tool_results = async_twin(take_tool_results)
    afind_expired_pending = async_twin(find_expired_pending)
    asuspend = async_twin(suspend)
    aresume = async_twin(resume)
    arequest_interrupt = async_twin(request_interrupt)
    acheck_interrupt = async_twin(check_interrupt)
    aclear_interrupt = async_twin(clear_interrupt)


def start_run(
    backend: Backend,
    session_id: str,
    run_id: str | None = None,
    *,
    expected_version: int | None = None,
    fencing_token: int | None = None,
    start_sequence: int = 0,
    supersede: bool = False,
    keeps_status: bool = False,
) -> tuple[Run, str | None]:
    """Start a run, and return it and the id of the run that it has superseded.

    With ``keeps_status``, the session does not become active, and keeps its version.
    """
    run_id = new_id() if run_id is None else run_id
    validation.arguments(
        _RUN_RULES,
        session_id=session_id,
        run_id=run_id,
        start_sequence=start_sequence,
        expected_version=expected_version,
        fencing_token=fencing_token,
        supersede=supersede,
    )
    return backend.runs.start_run(
        session_id,
        run_id,
        start_sequence=start_sequence,
        supersede=supersede,
        guard=Guard(expected_version, fencing_token),
        keeps_status=keeps_status,
    )


def update_run(
    backend: Backend,
    given_limits: Limits | None,
    session_id: str,
    run_id: str,
    *,
    status: RunStatus | str,
    step_count: int | None,
    completion_reason: str | None,
    error: Any,
    fencing_token: int | None,
    refused: tuple[int, int] | None = None,
) -> Run:
    """Update a run, and store the amounts that a budget refused; dollars are whole units."""
    validation.arguments(
        _RUN_RULES,
        status=status,
        step_count=step_count,
        completion_reason=completion_reason,
        session_id=session_id,
        run_id=run_id,
        fencing_token=fencing_token,
    )
    update = RunUpdate(
        status=RunStatus(status),
        step_count=step_count,
        completion_reason=completion_reason,
        error=None
        if error is None
        else encode(error, limit=conf.limits(given_limits).max_state_bytes, path="/error"),
        refused_usd=None if refused is None else refused[0],
        refused_tokens=None if refused is None else refused[1],
    )
    return backend.runs.update_run(session_id, run_id, update, Guard(None, fencing_token))


def stage(
    backend: Backend,
    given_limits: Limits | None,
    session_id: str,
    step_id: str,
    staged: StagedChanges | AnyStagedChanges,
) -> StagedRow | None:
    """Stage a change, and return its row if a step of a handle can promote the row without reading it."""
    changes = staged if isinstance(staged, StagedChanges) else StagedChanges.from_dict(staged)
    validation.arguments(
        _STAGING_RULES, session_id=session_id, step_id=step_id, tool_call_id=changes.tool_call_id
    )
    limits = conf.limits(given_limits)
    at = changes.timestamp
    at = None if at is None else validation.epoch_milliseconds(at, "timestamp")
    if changes.merge_changes is not None and type(changes.merge_changes) is not dict:
        raise InvalidPayload(path="/merge_changes", reason="expected a dict")
    if type(changes.patches) is not list:
        raise InvalidPayload(path="/patches", reason="expected a list")
    if changes.patches:
        check_operation_count(changes.patches)
    document = {field.name: getattr(changes, field.name) for field in fields(changes)} | {"timestamp": at}
    text = encode(document, limit=limits.max_staged_bytes, name="max_staged_bytes")
    if changes.patches:
        check_staged_patches(changes.patches, limits=limits)
    return backend.steps.stage(session_id, step_id, changes.tool_call_id, text)


def require_permissions(backend: Backend, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `InvalidPayload` for a permission that does not exist. Sends a statement if there is any."""
    needed = permissions_of(entries)
    for name in backend.waiting.unknown_permissions(list(needed)) if needed else ():
        raise InvalidPayload(path=needed[name], reason=f"the permission {name} does not exist")


def add_checked_calls(
    backend: Backend, session_id: str, entries: dict[str, Any], fencing_token: int | None
) -> None:
    """Add calls of this session that a step has checked."""
    fence = guard(fencing_token=fencing_token)
    backend.waiting.add_calls(session_id, entries, session_id, fence)


def approved_call(backend: Backend, session_id: str, tool_call_id: str) -> tuple[int, int, ApprovedCall]:
    """Return the version of the session, the asking and the approved call, for a step.

    Raises `NotApproved`.
    """
    return backend.waiting.approved_call(session_id, validation.identifier(tool_call_id, "tool_call_id"))


def open_claims(store: WaitingCalls, state: SessionState) -> dict[str, dict[str, Any]]:
    """Return the calls whose answers in a loaded state nobody has given, so that they are still open.

    This takes one statement if an answer may be the agent's own, otherwise none.
    """
    claimed = loaded_of(state).claimed
    if not claimed:
        return {}
    decisions = store._backend.waiting.decisions(state.session_id, claimed)
    still_open = ToolCalls(state.pending_client_tool_calls, {}).open(decisions)
    return {key: call for key, call in still_open.items() if key in claimed}


def due_calls_of(store: WaitingCalls, session_id: str, now: datetime) -> list[PendingToolCall]:
    """Return the calls of one session that nobody has answered and that are due by ``now``.

    Raises `IntegrityFault`.
    """
    return store._backend.waiting.due_calls(session_id, now)


def submit_default(
    store: WaitingCalls, session_id: str, tool_call_id: str, default: Mapping[str, Any]
) -> Submission:
    """Give a call its default answer, which depends on no actor."""
    answer = checked_answer(**default, limits=store.limits)
    return store._submit(session_id, tool_call_id, replace(answer, is_default=True))


def _now() -> int:
    return time.time_ns() // 1_000_000


def _encoded(name: str, value: Any, expected: type, limits: Limits) -> str:
    if type(value) is not expected:
        raise InvalidPayload(path=f"/{name}", reason=f"expected a {expected.__name__}")
    return encode(value, limit=limits.max_state_bytes, path=f"/{name}")
