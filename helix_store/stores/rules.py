"""Rules for the calls that a session waits for, and for the states that request them. Pure Python."""

from __future__ import annotations

from collections.abc import Container, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.types import TERMINAL_STATUSES, RunStatus, SessionState, SessionStatus
from helix_store.exceptions import InvalidPayload, TurnInterrupted
from helix_store.sessions.layout import SUSPENSION_FIELDS
from helix_store.sessions.tool_calls import ToolCalls, checked_calls, claimed_calls

_END_TURN: Final = "end_turn"
_SUSPENDED: Final = frozenset({SessionStatus.PAUSED, SessionStatus.INTERRUPTED})


def calls_of(state: SessionState) -> ToolCalls:
    return ToolCalls(state.pending_client_tool_calls, state.completed_client_tool_calls)


def other_root(state: SessionState) -> str | None:
    """Return the root of the session's tree, which records the owners of calls; ``None`` for the root."""
    return None if state.root_session_id == state.session_id else state.root_session_id


def is_suspended(state: SessionState) -> bool:
    """Return whether `resume` can continue the session."""
    return state.status in _SUSPENDED and any(
        getattr(state, name) is not None for name in SUSPENSION_FIELDS if name != "tracing_context"
    )


class Standing(NamedTuple):
    """The situation of a session before a turn."""

    answers: dict[str, dict[str, Any]]
    """The answers that are offered to the turn, by tool call id."""
    is_suspended: bool
    """True if `resume` can continue the session."""
    can_continue: bool
    """True if the session has not ended and does not wait for an answer."""


def standing_of(state: SessionState) -> Standing:
    suspended, has_ended = is_suspended(state), state.status in TERMINAL_STATUSES
    if not state.pending_client_tool_calls:
        return Standing({}, suspended, can_continue=not has_ended)
    calls = calls_of(state)
    is_waiting = suspended and bool(calls.unanswered)
    return Standing(calls.answers, suspended, can_continue=not (has_ended or is_waiting))


def new_calls(calls: Any, *, now: datetime, run_id: str | None, limits: Limits) -> dict[str, dict[str, Any]]:
    """Return the complete entries of the calls that a step waits for. Raises `InvalidPayload`.

    A ``deadline`` is a duration from now or an aware datetime. With ``on_expiry`` "reject", the call is an
    approval, by default with its own id as approval id.
    """
    if not isinstance(calls, Mapping):
        raise InvalidPayload(path="calls", reason="expected a dict of calls by tool call id")
    asked_at = validation.datetime_to_milliseconds(now)
    given = {
        tool_call_id: _completed(tool_call_id, call, run_id)
        for tool_call_id, call in validation.items(calls.items(), "calls")
    }
    return checked_calls(given, requested_at=asked_at, limits=limits)


def _completed(tool_call_id: Any, call: Any, run_id: str | None) -> Any:
    if not isinstance(call, Mapping):
        return call
    entry = dict(call)
    entry.setdefault("run_id", run_id)
    if entry.get("on_expiry") == "reject" and entry.get("approval_id") is None:
        entry["approval_id"] = tool_call_id
    return entry


def take(state: SessionState, tool_call_ids: Container[str], limits: Limits) -> None:
    """Move the answers that were offered to a turn to the completed calls of a state."""
    calls = calls_of(state)
    if calls.take(tool_call_ids):
        state.pending_client_tool_calls = calls.pending
        state.completed_client_tool_calls = calls.kept(limits)


def ask(state: SessionState, entries: Mapping[str, dict[str, Any]], *, step_id: str) -> None:
    """Make a state wait for calls, as `suspend` does.

    Raises `ConflictError` for a call that the state already has.
    """
    calls = calls_of(state)
    calls.add(entries)
    state.pending_client_tool_calls = calls.pending
    if other_root(state) is None:
        state.client_tool_call_ownership = claimed_calls(
            state.client_tool_call_ownership, entries, state.session_id
        )
    state.status = SessionStatus.PAUSED
    state.suspension_kind = RunStatus.SUSPENDED_CLIENT_TOOL
    state.suspension_context = {"tool_call_ids": list(entries)}
    state.suspended_awaiting_children = None
    state.suspended_step_id = step_id


def outcome_of(state: SessionState) -> tuple[RunStatus, str | None]:
    """Return the status and the reason of a run whose last step stored this state."""
    if state.status == SessionStatus.FAILED:
        return RunStatus.FAILED, validation.failure_reason(state.failure_reason)
    if is_suspended(state):
        return state.suspension_kind or RunStatus.SUSPENDED_STEP_PARTIAL, None
    return RunStatus.COMPLETED, None


def end_of_run(
    state: SessionState,
    error: BaseException | None,
    interrupt: TurnInterrupted | None,
    *,
    was_ended: bool,
) -> tuple[RunStatus, str | None]:
    """Return the status and the reason of the run of a turn that ends with this state or error."""
    if error is not None:
        return RunStatus.FAILED, type(error).__name__
    if interrupt is not None:
        return RunStatus.INTERRUPTED, interrupt.reason or interrupt.kind
    status, reason = outcome_of(state)
    return status, _END_TURN if was_ended else reason
