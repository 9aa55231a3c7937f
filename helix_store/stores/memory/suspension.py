"""Suspending and resuming sessions in memory."""

from __future__ import annotations

from dataclasses import replace

from django.utils import timezone

from helix_store.core.requests import Guard
from helix_store.core.suspension import RESUMED_COLUMNS, Suspension, require_suspended, resumed_state
from helix_store.core.types import RunStatus, SessionState
from helix_store.stores.memory.scope import TenantScope
from helix_store.stores.memory.tool_calls import asked_columns

__all__ = ["MemorySuspensions"]


class MemorySuspensions:
    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def suspend(self, session_id: str, suspension: Suspension, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            suspension.require_allowed(draft.columns["status"])
            columns = dict(suspension.columns)
            if suspension.calls:
                columns |= asked_columns(self._scope, draft, suspension.calls)
            running = draft.running_run
            if running is not None:
                ended = replace(running.run, status=RunStatus(suspension.kind), ended_at=timezone.now())
                draft.runs[ended.run_id] = replace(running, run=ended)
            return draft.write(**columns)

    def resume(self, session_id: str, guard: Guard) -> SessionState:
        with self._scope.writing(session_id) as draft:
            require_suspended(draft.columns)
            self._scope.admit(draft, guard)
            state = draft.state()
            version = draft.write(resume_count=state.resume_count + 1, **RESUMED_COLUMNS)
            return resumed_state(state, version=version, at=draft.columns["updated_at"])
