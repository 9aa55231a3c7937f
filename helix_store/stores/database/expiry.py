"""Expired sessions and overdue calls in the database, found by partial indexes, of one tenant or of all.

The lock on a session's row is the claim on it: it is taken without waiting, held while the session's
snapshots are deleted and until it is marked, and it ends with the cleaner, however that ends. Whoever renews
or resumes the session comes before the claim, and is left alone, or after it, and finds it failed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.db.models import F
from django.utils import timezone

from helix_store.core.contracts import StateStore
from helix_store.core.expiry import SESSION_EXPIRED, SeenSession, SessionKey, Settlement
from helix_store.core.payloads import decode
from helix_store.core.tool_calls import PendingToolCall, due_calls
from helix_store.core.types import SessionStatus
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.models import Session
from helix_store.stores.database.clocks import database_now
from helix_store.stores.database.expired_marks import mark_without_refs
from helix_store.stores.database.keysets import Unindexed, beyond
from helix_store.stores.database.locking import lock_sessions
from helix_store.stores.database.records import first_row
from helix_store.stores.database.scope import Scope
from helix_store.stores.database.state_store import DatabaseStateStore
from helix_store.stores.database.trees import delete_tree, tree_keys
from helix_store.stores.expiry import Page

__all__ = ["DatabaseExpiry"]


class DatabaseExpiry:
    """``using`` is an alias as in a store; ``tenant`` is one tenant, or ``None`` for all of them."""

    def __init__(self, using: str | None, tenant: str | None) -> None:
        self._using = using
        self._tenant = tenant
        self._scope = Scope(using, tenant or "", None)

    def now(self) -> datetime:
        return self._scope.read(lambda: database_now(self._scope.connection))

    def expired(self, now: datetime, after: Any, limit: int) -> Page:
        return self._page(self._ours.non_terminal().expired(now), "expires_at", after, limit)

    def overdue(self, now: datetime, after: Any, limit: int) -> Page:
        return self._page(self._ours.non_terminal().overdue(now), "pending_deadline", after, limit)

    def deletable(self, before: datetime, after: Any, limit: int) -> Page:
        # By the reason alone, as in the index: with the status too PostgreSQL expects a fraction of the rows.
        marked = self._ours.filter(failure_reason=SESSION_EXPIRED)
        return self._page(marked.expired(before), "expires_at", after, limit)

    def still_open(self, keys: list[SessionKey]) -> list[SessionKey]:
        rows = self._all.non_terminal().filter(pk__in=[key.key for key in keys]).values_list("pk", flat=True)
        found = self._scope.read(lambda: set(rows))
        return [key for key in keys if key.key in found]

    def mark(self, keys: list[SessionKey], now: datetime) -> list[SessionKey]:
        return mark_without_refs(self._scope, keys, now)

    def see(self, key: SessionKey) -> SeenSession | None:
        columns = self._all.filter(pk=key.key).values_list(
            "version", "status", "expires_at", "current__envelope"
        )
        row = self._scope.read(lambda: first_row(columns))
        if row is None:
            return None
        version, status, expires_at, envelope = row
        refs = decode(envelope).get("workspace_refs", {})
        return SeenSession(key, version, SessionStatus(status).is_terminal, expires_at, refs)

    def settle(self, seen: SeenSession, release: Callable[[], None], *, wait: bool) -> Settlement:
        def claim_and_mark() -> Settlement:
            claim = self._all.select_for_update(no_key=True, skip_locked=not wait).values_list("pk")
            if first_row(claim.filter(pk=seen.key.key, version=seen.version)) is None:
                return Settlement.BUSY
            release()
            return self._marked(seen)

        return self._scope.write(claim_and_mark)

    def _marked(self, seen: SeenSession) -> Settlement:
        # By its version: the lock does not hold off a provider that writes through this very connection.
        marked = self._all.filter(pk=seen.key.key, version=seen.version).update(
            status=SessionStatus.FAILED.value,
            failure_reason=SESSION_EXPIRED,
            version=F("version") + 1,
            updated_at=timezone.now(),
        )
        return Settlement.MARKED if marked else Settlement.BUSY

    def due(self, key: SessionKey, now: datetime) -> tuple[StateStore, list[PendingToolCall]]:
        pending = self._all.filter(pk=key.key).values_list("pending_client_tool_calls", flat=True)
        text = self._scope.read(lambda: first_row(pending))
        store = DatabaseStateStore(self._using, tenant=key.tenant)
        return store, due_calls(key.session_id, text, datetime_to_milliseconds(now))

    def delete(self, key: SessionKey, before: datetime) -> int:
        scope = Scope(self._using, key.tenant, None)

        def delete_if_all_have_ended() -> int:
            locked = lock_sessions(scope, tree_keys(scope, key.session_id))
            tree = self._all.filter(pk__in=[head.pk for head in locked])
            marked = tree.filter(status=SessionStatus.FAILED.value, failure_reason=SESSION_EXPIRED)
            top = marked.filter(pk=key.key).expired(before)
            if tree.non_terminal().exists() or not top.exists():
                return 0
            return delete_tree(scope, key.session_id, keep_usage=True)

        return scope.write(delete_if_all_have_ended)

    def _page(self, sessions: Any, order: str, after: Any, limit: int) -> Page:
        """The next sessions in the order of an index."""
        if after is not None:
            moment, key = after
            sessions = sessions.filter(beyond(Session, {order: moment, "id": key}))
        page = sessions.order_by(order, "pk").values_list("session_id", "tenant", "pk", order)[:limit]
        rows = self._scope.read(lambda: list(page))
        keys = [SessionKey(session_id, tenant, key) for session_id, tenant, key, _ in rows]
        return Page(keys, (rows[-1][3], rows[-1][2]) if len(rows) == limit else None)

    @property
    def _all(self) -> Any:
        return Session.objects.using(self._scope.alias)

    @property
    def _ours(self) -> Any:
        if self._tenant is None:
            return self._all.all()
        return self._all.alias(unindexed_tenant=Unindexed("tenant")).filter(unindexed_tenant=self._tenant)
