"""Suspending and resuming sessions in the database."""

from __future__ import annotations

from django.utils import timezone

from helix_store.core.requests import Guard
from helix_store.core.suspension import RESUMED_COLUMNS, Suspension, require_suspended, resumed_state
from helix_store.core.types import RunStatus, SessionState
from helix_store.exceptions import SessionNotFound
from helix_store.models import Run, Session
from helix_store.stores.database.locking import admit, bump, lock_session, lock_sessions_of_tree, root_of
from helix_store.stores.database.records import CURRENT_COLUMNS, current_from
from helix_store.stores.database.scope import DatabaseVerbs, writes
from helix_store.stores.database.tool_calls import CALL_COLUMNS, asked_columns

__all__ = ["DatabaseSuspensions"]


class DatabaseSuspensions(DatabaseVerbs):
    @writes
    def suspend(self, session_id: str, suspension: Suspension, guard: Guard) -> int:
        root_id = root_of(self.scope, session_id) if suspension.calls else session_id
        heads = lock_sessions_of_tree(self.scope, {session_id, root_id}, *CALL_COLUMNS)
        head = heads.get(session_id)
        if head is None:
            raise SessionNotFound(session_id)
        admit(self.scope, head, guard)
        suspension.require_allowed(head.status)
        columns = dict(suspension.columns)
        if suspension.calls:
            columns |= asked_columns(self.scope, head, suspension.calls, heads.get(root_id))
        at = timezone.now()
        running = Run.objects.using(self.scope.alias).filter(
            session_id=head.pk, status=RunStatus.RUNNING.value
        )
        running.update(status=suspension.kind, ended_at=at)
        return bump(self.scope, head, at=at, **columns)

    @writes
    def resume(self, session_id: str, guard: Guard) -> SessionState:
        head = lock_session(self.scope, session_id)
        row = Session.objects.using(self.scope.alias).values(*CURRENT_COLUMNS).get(pk=head.pk)
        # Before the version: whoever loses to another resume learns that, and not only that it is late.
        require_suspended(row)
        admit(self.scope, head, guard)
        state = current_from(row)
        at = timezone.now()
        version = bump(self.scope, head, at=at, resume_count=head.resume_count + 1, **RESUMED_COLUMNS)
        return resumed_state(state, version=version, at=at)
