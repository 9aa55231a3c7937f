"""Interrupt requests in the database."""

from __future__ import annotations

from django.utils import timezone

from helix_store.core.interrupts import is_bound_to, standing_request
from helix_store.core.types import InterruptKind, InterruptRequest, RunStatus
from helix_store.exceptions import RunNotFound
from helix_store.models import InterruptRequest as InterruptRow
from helix_store.models import Run
from helix_store.stores.database.locking import lock_session, session_key
from helix_store.stores.database.records import first_row, interrupt_from
from helix_store.stores.database.scope import DatabaseVerbs, reads, writes

__all__ = ["DatabaseInterrupts"]


class DatabaseInterrupts(DatabaseVerbs):
    @writes
    def request(
        self, session_id: str, kind: InterruptKind, reason: str | None, run_id: str | None
    ) -> InterruptRequest:
        head = lock_session(self.scope, session_id)
        wanted = InterruptRequest(
            session_id=session_id,
            kind=kind,
            reason=reason,
            run_id=self._bound_run(head.pk, run_id),
            requested_at=timezone.now(),
        )
        standing = standing_request(self._pending(head.pk, session_id), wanted)
        if standing is wanted:
            InterruptRow.objects.using(self.scope.alias).update_or_create(
                session_id=head.pk,
                defaults={
                    "kind": wanted.kind.value,
                    "reason": wanted.reason,
                    "run_id": wanted.run_id,
                    "requested_at": wanted.requested_at,
                },
            )
        return standing

    @reads
    def check(self, session_id: str, run_id: str | None) -> InterruptRequest | None:
        pending = self._pending(session_key(self.scope, session_id), session_id)
        return pending if pending is not None and is_bound_to(pending, run_id) else None

    @writes
    def clear(self, session_id: str) -> bool:
        head = lock_session(self.scope, session_id)
        return InterruptRow.objects.using(self.scope.alias).filter(session_id=head.pk).delete()[0] > 0

    def _pending(self, key: int, session_id: str) -> InterruptRequest | None:
        row = first_row(InterruptRow.objects.using(self.scope.alias).filter(session_id=key))
        return None if row is None else interrupt_from(row, session_id)

    def _bound_run(self, key: int, run_id: str | None) -> str | None:
        runs = Run.objects.using(self.scope.alias).filter(session_id=key)
        if run_id is None:
            running = runs.filter(status=RunStatus.RUNNING.value).values_list("run_id", flat=True)
            return first_row(running)
        if not runs.filter(run_id=run_id).exists():
            raise RunNotFound(run_id)
        return run_id
