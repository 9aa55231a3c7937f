"""Putting a session aside until somebody answers, and going on with it in any process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils import timezone

from helix_store.core import validation
from helix_store.core.suspension import checked_suspension
from helix_store.core.tool_calls import checked_calls
from helix_store.core.types import RunStatus, SessionState
from helix_store.stores.api.base import StoreCalls, guard
from helix_store.stores.async_twins import async_twin

__all__ = ["SuspensionCalls"]


class SuspensionCalls(StoreCalls):
    def suspend(
        self,
        session_id: str,
        *,
        kind: RunStatus | str,
        context: dict[str, Any],
        pending: Mapping[str, dict[str, Any]] | None = None,
        awaiting_children: list[Any] | None = None,
        step_id: str | None = None,
        tracing: dict[str, Any] | None = None,
        expires_at: int | None = None,
        expected_version: int | None = None,
    ) -> int:
        """Pause a session with everything it takes to go on, and return the new version.

        One transaction: status ``paused``, the continuation, the ``pending`` calls as in
        `add_pending_tool_calls`, and the running run ends with ``kind``, which is one of the suspended
        statuses of a run. ``tracing`` and ``expires_at`` (epoch milliseconds) that are not given leave what
        is there; suspending again replaces the rest. Raises `StaleStateError`, and `ConflictError` for a
        session that has ended.
        """
        validation.identifier(session_id, "session_id")
        limits = self.limits
        now = validation.datetime_to_milliseconds(timezone.now())
        calls = {} if pending is None else checked_calls(pending, requested_at=now, limits=limits)
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
        return self._backend.suspensions.suspend(session_id, suspension, guard(expected_version))

    def resume(self, session_id: str, *, expected_version: int | None = None) -> SessionState:
        """Make a suspended session active and return its state with the continuation that was cleared.

        One transaction that clears the suspension and the expiry and adds one to ``resume_count``. The
        returned state still holds ``suspension_…``, ``suspended_…`` and ``tracing_context``: reset them, or
        load the state, before saving. Raises `ConflictError` for a session that is not suspended, so that
        of two resumes at once one wins, and `StaleStateError`.
        """
        return self._backend.suspensions.resume(
            validation.identifier(session_id, "session_id"), guard(expected_version)
        )

    asuspend = async_twin(suspend)
    aresume = async_twin(resume)
