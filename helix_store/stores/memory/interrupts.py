"""Interrupt requests in memory: at most one per session."""

from __future__ import annotations

from django.utils import timezone

from helix_store.core.interrupts import is_bound_to, standing_request
from helix_store.core.types import InterruptKind, InterruptRequest
from helix_store.exceptions import RunNotFound
from helix_store.stores.memory.scope import TenantScope

__all__ = ["MemoryInterrupts"]


class MemoryInterrupts:
    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def request(
        self, session_id: str, kind: InterruptKind, reason: str | None, run_id: str | None
    ) -> InterruptRequest:
        with self._scope.writing(session_id) as draft:
            if run_id is not None and run_id not in draft.runs:
                raise RunNotFound(run_id)
            if run_id is None and draft.running_run is not None:
                run_id = draft.running_run.run.run_id
            wanted = InterruptRequest(
                session_id=session_id, kind=kind, reason=reason, run_id=run_id, requested_at=timezone.now()
            )
            draft.interrupt = standing = standing_request(draft.interrupt, wanted)
            return standing

    def check(self, session_id: str, run_id: str | None) -> InterruptRequest | None:
        pending = self._scope.require(session_id).interrupt
        return pending if pending is not None and is_bound_to(pending, run_id) else None

    def clear(self, session_id: str) -> bool:
        with self._scope.writing(session_id) as draft:
            was_pending = draft.interrupt is not None
            draft.interrupt = None
            return was_pending
