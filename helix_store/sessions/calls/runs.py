"""Runs, sub-session refs and interrupt requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from helix_store.core import validation
from helix_store.core.guards import guard
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

        One transaction that also clears a pending interrupt request. Raises `ConflictError` for a run id
        that exists, and while another run is running. With ``supersede``, or with a newer ``fencing_token``
        than that run's, the other run ends ``interrupted`` with reason ``superseded`` instead.
        """
        return self._backend.runs.start_run(
            validation.identifier(session_id, "session_id"),
            new_id() if run_id is None else validation.identifier(run_id, "run_id"),
            start_sequence=validation.whole_number(start_sequence, "start_sequence"),
            supersede=bool(supersede),
            guard=guard(expected_version, fencing_token),
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

        A run that waits or was interrupted may be set to ``running`` again, which clears a pending interrupt
        request as `start_run` does. Raises `RunNotFound`, and `ConflictError` for status ``running`` while
        another run is running, or for a run that has completed, failed or was superseded. With a
        ``fencing_token`` a superseded run takes no status at all.
        """
        update = RunUpdate(
            status=validation.enum(RunStatus, status, "status"),
            step_count=None if step_count is None else validation.whole_number(step_count, "step_count"),
            completion_reason=validation.reason(completion_reason, "completion_reason"),
            error=None if error is None else self._encoded("error", error),
        )
        return self._backend.runs.update_run(
            validation.identifier(session_id, "session_id"),
            validation.identifier(run_id, "run_id"),
            update,
            guard(fencing_token=fencing_token),
        )

    def get_current_run(self, session_id: str) -> Run | None:
        """The running run, or ``None``. Raises `SessionNotFound`."""
        return self._backend.runs.current_run(validation.identifier(session_id, "session_id"))

    def list_runs(self, session_id: str, *, limit: int = 50, offset: int = 0) -> list[Run]:
        """The session's runs, newest first. ``limit`` is 1 to 200 (above means 200)."""
        return self._backend.runs.select_runs(
            validation.identifier(session_id, "session_id"),
            limit=validation.page_limit(limit),
            offset=validation.page_offset(offset),
        )

    def add_sub_session_refs(
        self, session_id: str, refs: Iterable[SubSessionRef | Mapping[str, Any]]
    ) -> None:
        """Record sub-agents, all or nothing, before they are started.

        One transaction. Safe to repeat: a recorded ref stays as it is. Raises `ConflictError` for a recorded
        ref with another agent type, tool call or location.
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

        Raises `NotFoundError` for an unknown ref.
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
        """The sub-agents of a session in the order of their addition. Raises `SessionNotFound`."""
        return self._backend.runs.select_refs(validation.identifier(session_id, "session_id"))

    def request_interrupt(
        self,
        session_id: str,
        *,
        kind: InterruptKind | str = "interrupt",
        reason: str | None = None,
        run_id: str | None = None,
    ) -> InterruptRequest:
        """Request that the session's current run stops, in any process.

        The request is bound to ``run_id``, by default to the running run, if there is one; it is gone when
        that run ends. Safe to repeat. An abort replaces an interrupt; an interrupt never replaces an abort.
        Raises `RunNotFound`, and `ConflictError` for a run that has ended.
        """
        return self._backend.runs.request_interrupt(
            validation.identifier(session_id, "session_id"),
            validation.enum(InterruptKind, kind, "kind"),
            validation.reason(reason),
            validation.optional_identifier(run_id, "run_id"),
        )

    def check_interrupt(self, session_id: str, *, run_id: str | None = None) -> InterruptRequest | None:
        """The pending request, or ``None``; with ``run_id`` only a request that is bound to this run.

        A request that is bound to a run which has ended is not pending.
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
    """The status of a ref: any identifier, or the value of an enumeration's member."""
    return validation.identifier(status.value if isinstance(status, StrEnum) else status, "status")
