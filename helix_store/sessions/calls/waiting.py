"""Waiting for a person or a client: pending tool calls, suspension and resumption; interrupt requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from helix_store import conf
from helix_store.core import validation
from helix_store.core.approvals import Actor, ApprovedCall
from helix_store.core.dicts import AnyToolCall
from helix_store.core.guards import guard
from helix_store.core.limits import Limits
from helix_store.core.payloads import encode
from helix_store.core.types import (
    UNSET,
    InterruptKind,
    InterruptRequest,
    PendingToolCall,
    RunStatus,
    SessionState,
    SessionStatus,
    Submission,
    Timestamp,
)
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import InvalidPayload
from helix_store.sessions.approvals import Answer, checked_answer
from helix_store.sessions.backend import StoreCalls
from helix_store.sessions.layout import suspension_kind
from helix_store.sessions.rules import Suspension
from helix_store.sessions.tool_calls import checked_calls

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
        the owner, so that an answer sent to any session of the tree finds the call. Runs in one transaction
        that locks both rows; each session that it changes gets one new version. Safe to repeat. The
        ``fencing_token`` belongs to the lock of ``session_id``. Raises `LimitExceeded`, and `ConflictError`
        if the tree already has a call with this id or it was answered before.
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

    def _submit_default(self, session_id: str, tool_call_id: str, default: Mapping[str, Any]) -> Submission:
        """Give a call its default answer, which depends on no actor."""
        answer = checked_answer(**default, limits=self.limits)
        return self._submit(session_id, tool_call_id, replace(answer, is_default=True))

    def _submit(self, session_id: str, tool_call_id: str, answer: Answer) -> Submission:
        validation.arguments(_RULES, session_id=session_id, tool_call_id=tool_call_id)
        return self._backend.waiting.submit_answer(session_id, tool_call_id, answer, submitted_at=_now())

    def _approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, ApprovedCall]:
        """Return the version of the session and the approved call, for a step. Raises `NotApproved`."""
        return self._backend.waiting.approved_call(
            session_id, validation.identifier(tool_call_id, "tool_call_id")
        )

    def take_tool_results(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> dict[str, dict[str, Any]]:
        """Take the answers to the session's own calls, by tool call id, in the order of the calls.

        Each answer is ``{"result": …}``, ``{"error": …}`` or ``{"approved": …, "reason": …}`` with
        ``submitted_at`` in epoch milliseconds, ``actors`` if they are known, and ``input`` with its
        ``digest`` if the input was changed. Runs in one transaction that moves the calls to
        ``completed_client_tool_calls``, where you can read the answers again. If no call is answered, the
        version does not change. Raises `StaleStateError`.
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


def _now() -> int:
    return time.time_ns() // 1_000_000


def _encoded(name: str, value: Any, expected: type, limits: Limits) -> str:
    if type(value) is not expected:
        raise InvalidPayload(path=f"/{name}", reason=f"expected a {expected.__name__}")
    return encode(value, limit=limits.max_state_bytes, path=f"/{name}")
