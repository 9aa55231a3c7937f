"""Rules of a session: runs, interrupts, sub-session refs, branches, suspension and resumption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, Final

from helix_store.core.guards import Guard
from helix_store.core.payloads import copy_json
from helix_store.core.types import (
    BRANCHED_FROM,
    InterruptKind,
    InterruptRequest,
    RunStatus,
    SessionState,
    SessionStatus,
)
from helix_store.exceptions import ConflictError, NotFoundError, shown_id
from helix_store.sessions.layout import SUSPENSION_FIELDS, EncodedState
from helix_store.sessions.tool_calls import ToolCalls, kept_ownership

DEFAULT_STEP: Final = "step-"
"""The prefix of the id of a step that has no other id; its number follows."""
SUPERSEDED: Final = "superseded"
"""The completion reason of a run that another run replaced."""

_OVER: Final = frozenset({RunStatus.COMPLETED, RunStatus.FAILED})
_RESUMABLE: Final = frozenset({SessionStatus.PAUSED, SessionStatus.INTERRUPTED})

RESUMED_COLUMNS: Final[dict[str, Any]] = {
    "status": SessionStatus.ACTIVE.value,
    **dict.fromkeys(SUSPENSION_FIELDS),
    "expires_at": None,
}
"""The columns that a resume writes. The expiry was the suspension's and must not end an active session."""


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


def standing_request(pending: InterruptRequest | None, wanted: InterruptRequest) -> InterruptRequest:
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


def written_columns(encoded: EncodedState, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the head's columns for a whole state that is written over a session with ``stored`` columns.

    The mode is set only once; a write without a mode keeps it. Raises `ConflictError` if the mode differs.
    """
    columns, mode = encoded.columns, stored["mode"]
    if mode is not None and columns["mode"] not in (None, mode):
        raise ConflictError("The mode of a session is written once and cannot change.")
    ownership = kept_ownership(
        columns["client_tool_call_ownership"], stored["client_tool_call_ownership"], stored["session_id"]
    )
    return {**columns, "mode": mode or columns["mode"], "client_tool_call_ownership": ownership}


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


@dataclass(frozen=True, slots=True)
class Suspension:
    """A checked suspension: The ``columns`` of the head, and the calls that the same write adds."""

    columns: dict[str, Any]
    calls: dict[str, dict[str, Any]]

    @property
    def kind(self) -> str:
        return str(self.columns["suspension_kind"])

    def is_answered(self, pending: str | None) -> bool:
        """Return whether all calls that the session waits for were answered before it was suspended."""
        waits = self.kind == RunStatus.SUSPENDED_CLIENT_TOOL
        return waits and ToolCalls.stored(pending, None).is_answered

    def require_allowed(self, status: str) -> None:
        """Raise `ConflictError` if the session has ended: `resume` would make it active again."""
        if SessionStatus(status).is_terminal:
            raise ConflictError(
                f"The session is {status} and cannot be suspended; start a new session or branch this one."
            )


def require_suspended(columns: Mapping[str, Any]) -> None:
    """Raise `ConflictError` unless the session is paused or interrupted and has a continuation."""
    has_continuation = any(
        columns[name] is not None
        for name in (
            "suspension_kind",
            "suspension_context",
            "suspended_awaiting_children",
            "suspended_step_id",
        )
    )
    if not has_continuation or columns["status"] not in _RESUMABLE:
        raise ConflictError(
            "The session is not suspended: it was resumed, has ended or was never suspended; load its state."
        )


def resumed_state(state: SessionState, *, version: int, at: datetime) -> SessionState:
    """Return the state after resuming, including the continuation that the store cleared and a save omits."""
    state.status = SessionStatus.ACTIVE
    state.resume_count += 1
    state.expires_at = None
    state.version = version
    state.updated_at = at
    state._cleared = {name: getattr(state, name) for name in SUSPENSION_FIELDS}
    return state
