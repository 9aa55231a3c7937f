"""Waiting for a person or a client: tool calls, suspension and resumption."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helix_store.core import moments, validation
from helix_store.core.dicts import AnyToolCall
from helix_store.core.guards import guard
from helix_store.core.types import PendingToolCall, RunStatus, SessionState, Submission, Timestamp
from helix_store.engine.async_twins import async_twin
from helix_store.sessions.backend import StoreCalls
from helix_store.sessions.rules import checked_suspension
from helix_store.sessions.tool_calls import checked_answer, checked_calls

__all__ = ["WaitingCalls"]

_LARGEST_PAGE = 1_000


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

        The session owns them, or ``owner_session_id`` of the same tree. The root session records the owner,
        so that an answer from any session of the tree finds the call. One transaction that locks both rows;
        each session that it changes gets one new version. Safe to repeat. The ``fencing_token`` is that of
        ``session_id``. Raises `ConflictError` for an id that the tree has already or that was answered
        before, and `LimitExceeded`.
        """
        validation.identifier(session_id, "session_id")
        owner_id = validation.optional_identifier(owner_session_id, "owner_session_id") or session_id
        entries = checked_calls(calls, requested_at=_now(), limits=self.limits)
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
    ) -> Submission:
        """Answer a call from any session of its tree. The agent continues after `resume`.

        One transaction under the lock of the session that owns the call. The first answer counts. Any later
        answer is ``already_completed`` and changes nothing, also after the agent has taken the first answer
        and after the default answer of a passed deadline. An approval takes ``approved`` with its
        ``approval_id``, or an ``error`` alone; any other call takes a ``result`` (which may be ``None``) or
        an ``error``. Raises `InvalidPayload` for any other combination. A call of a session that has ended
        is ``unknown_tool_call``.
        """
        answer = checked_answer(
            result=result,
            error=error,
            approval_id=approval_id,
            approved=approved,
            reason=reason,
            limits=self.limits,
        )
        return self._backend.waiting.submit_answer(
            validation.identifier(session_id, "session_id"),
            validation.identifier(tool_call_id, "tool_call_id"),
            answer,
            submitted_at=_now(),
        )

    def take_tool_results(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> dict[str, dict[str, Any]]:
        """Take the answers to the calls that the session owns, by tool call id, in the order of the calls.

        Each is ``{"result": …}``, ``{"error": …}`` or ``{"approved": …, "reason": …}`` with
        ``submitted_at`` in epoch milliseconds. One transaction that moves the calls to
        ``completed_client_tool_calls``, where the answers can be read again. The version stays if no call
        is answered. Raises `StaleStateError`.
        """
        return self._backend.waiting.take_answers(
            validation.identifier(session_id, "session_id"), guard(expected_version, fencing_token)
        )

    def find_expired_pending(
        self, *, now: Timestamp | None = None, limit: int = 200
    ) -> list[PendingToolCall]:
        """Calls without an answer whose deadline has passed, the longest overdue first.

        Sessions that have ended are left out. ``now`` is an aware datetime or epoch milliseconds, by default
        the time of the database; ``limit`` is 1 to 1,000 (above means 1,000).
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
        """Pause a session with the data that it continues with, and return the new version.

        One transaction sets status ``paused``, stores the continuation, adds the ``pending`` calls as in
        `add_pending_tool_calls`, and ends the running run with ``kind``, one of the suspended statuses of a
        run. Without ``tracing`` or ``expires_at`` (epoch milliseconds) the stored value stays; a second
        suspension replaces the rest. Raises `StaleStateError`, and `ConflictError` for a
        session that has ended.
        """
        validation.identifier(session_id, "session_id")
        limits = self.limits
        calls = {} if pending is None else checked_calls(pending, requested_at=_now(), limits=limits)
        suspension = checked_suspension(
            kind=kind,
            context=context,
            calls=calls,
            awaiting_children=awaiting_children,
            step_id=step_id,
            tracing=tracing,
            expires_at=expires_at,
            limits=limits,
        )
        return self._backend.waiting.suspend(session_id, suspension, guard(expected_version, fencing_token))

    def resume(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> SessionState:
        """Make a suspended session active and return its state, with the continuation that is now cleared.

        One transaction that clears the suspension and the expiry and adds one to ``resume_count``. The
        returned state still holds ``suspension_…``, ``suspended_…`` and ``tracing_context``. Saving it leaves
        them out; what you assign to them is saved. A state made of it by ``from_dict`` or
        ``dataclasses.replace`` holds them as its own. Raises `StaleStateError`, and `ConflictError` for a
        session that is not suspended: of two concurrent resumes, one succeeds.
        """
        return self._backend.waiting.resume(
            validation.identifier(session_id, "session_id"), guard(expected_version, fencing_token)
        )

    aadd_pending_tool_calls = async_twin(add_pending_tool_calls)
    asubmit_tool_result = async_twin(submit_tool_result)
    atake_tool_results = async_twin(take_tool_results)
    afind_expired_pending = async_twin(find_expired_pending)
    asuspend = async_twin(suspend)
    aresume = async_twin(resume)


def _now() -> int:
    return validation.datetime_to_milliseconds(moments.now())
