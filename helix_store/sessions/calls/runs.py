"""Runs, sub-session refs and interrupt requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final

from helix_store.core import validation
from helix_store.core.guards import Guard
from helix_store.core.ids import new_id
from helix_store.core.payloads import encode
from helix_store.core.types import (
    InterruptKind,
    InterruptRequest,
    Run,
    RunStatus,
    SubSessionRef,
    as_value,
)
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import InvalidPayload
from helix_store.sessions.backend import StoreCalls
from helix_store.sessions.requests import EncodedRef, RunUpdate

__all__ = ["RunCalls"]

_RULES: Final[dict[str, validation.Rule]] = {
    "session_id": validation.identifier,
    "run_id": validation.identifier,
    "status": validation.enum_text(RunStatus),
    "start_sequence": validation.whole_number,
    "step_count": validation.optional(validation.whole_number),
    "completion_reason": validation.reason,
    "expected_version": validation.optional(validation.whole_number),
    "fencing_token": validation.optional(validation.whole_number),
}


class RunCalls(StoreCalls):
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
        run_id = new_id() if run_id is None else run_id
        validation.arguments(
            _RULES,
            session_id=session_id,
            run_id=run_id,
            start_sequence=start_sequence,
            expected_version=expected_version,
            fencing_token=fencing_token,
        )
        return self._backend.runs.start_run(
            session_id,
            run_id,
            start_sequence=start_sequence,
            supersede=bool(supersede),
            guard=Guard(expected_version, fencing_token),
        )

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
        validation.arguments(
            _RULES,
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
            error=None if error is None else self._encoded("error", error),
        )
        return self._backend.runs.update_run(session_id, run_id, update, Guard(None, fencing_token))

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

    def add_sub_session_refs(
        self, session_id: str, refs: Iterable[SubSessionRef | Mapping[str, Any]]
    ) -> None:
        """Record sub-agents, all or nothing, before they are started.

        Runs in one transaction. Safe to repeat: a recorded ref is left unchanged. Raises `ConflictError` if a
        ref is already recorded with another agent type, tool call or location.
        """
        validation.identifier(session_id, "session_id")
        encoded = [self._encoded_ref(as_value(SubSessionRef, ref)) for ref in validation.items(refs, "refs")]
        self._backend.runs.add_refs(session_id, encoded)

    def update_sub_session_ref(
        self,
        session_id: str,
        sub_session_id: str,
        *,
        status: str | None = None,
        output: Any = None,
        error: Any = None,
    ) -> SubSessionRef:
        """Change the given fields of a ref; agent type, tool call and location never change.

        Raises `NotFoundError` if the ref is unknown.
        """
        changes: dict[str, str] = {}
        if status is not None:
            changes["status"] = _status_text(status)
        for name, value in (("output", output), ("error", error)):
            if value is not None:
                changes[name] = self._encoded(name, value)
        return self._backend.runs.update_ref(
            validation.identifier(session_id, "session_id"),
            validation.identifier(sub_session_id, "sub_session_id"),
            changes,
        )

    def get_sub_session_refs(self, session_id: str) -> list[SubSessionRef]:
        """List a session's sub-agents in the order they were added. Raises `SessionNotFound`."""
        return self._backend.runs.select_refs(validation.identifier(session_id, "session_id"))

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

    def _encoded(self, name: str, value: Any) -> str:
        return encode(value, limit=self.limits.max_state_bytes, path=f"/{name}")

    def _encoded_ref(self, ref: SubSessionRef) -> EncodedRef:
        if ref.location not in ("local", "remote"):
            raise InvalidPayload(path="/location", reason="must be local or remote")
        if ref.remote is not None and type(ref.remote) is not dict:
            raise InvalidPayload(path="/remote", reason="expected a dict")
        return EncodedRef(
            sub_session_id=validation.identifier(ref.sub_session_id, "sub_session_id"),
            agent_type=validation.identifier(ref.agent_type, "agent_type"),
            parent_tool_call_id=validation.optional_identifier(
                ref.parent_tool_call_id, "parent_tool_call_id"
            ),
            status=_status_text(ref.status),
            location=ref.location,
            remote=None if ref.remote is None else self._encoded("remote", ref.remote),
            output=None if ref.output is None else self._encoded("output", ref.output),
            error=None if ref.error is None else self._encoded("error", ref.error),
        )

    astart_run = async_twin(start_run)
    aupdate_run = async_twin(update_run)
    aget_current_run = async_twin(get_current_run)
    alist_runs = async_twin(list_runs)
    aadd_sub_session_refs = async_twin(add_sub_session_refs)
    aupdate_sub_session_ref = async_twin(update_sub_session_ref)
    aget_sub_session_refs = async_twin(get_sub_session_refs)
    arequest_interrupt = async_twin(request_interrupt)
    acheck_interrupt = async_twin(check_interrupt)
    aclear_interrupt = async_twin(clear_interrupt)


def _status_text(status: str) -> str:
    """Return the text for a ref's status: any identifier, or the value of an enumeration member."""
    return validation.identifier(status.value if isinstance(status, StrEnum) else status, "status")
