"""Expired sessions and overdue calls in the database, of one tenant or of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from django.db.models import F
from django.utils import timezone

from helix_store.cleanup.any_store import Page
from helix_store.cleanup.candidates import (
    SeenSession,
    SessionKey,
    Settlement,
)
from helix_store.core.contracts import StateStore
from helix_store.core.payloads import decode
from helix_store.core.types import SESSION_EXPIRED, PendingToolCall, SessionStatus
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.engine.clocks import database_now
from helix_store.engine.database import Database
from helix_store.engine.expressions import NoIndexHint, after_keyset
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.models.sessions import NON_TERMINAL
from helix_store.sessions.database.locking import lock_sessions
from helix_store.sessions.database.rows import first_row
from helix_store.sessions.database.store import DatabaseStateStore
from helix_store.sessions.database.trees import delete_tree, tree_keys
from helix_store.sessions.tool_calls import due_calls

__all__ = ["DatabaseExpiry", "mark_without_refs"]


def mark_without_refs(db: Database, keys: Sequence[SessionKey], now: datetime) -> list[SessionKey]:
    """Mark the sessions that own nothing and that nobody is busy with; return the others."""
    seen = db.query(
        lambda: list(
            Session.objects.using(db.alias)
            .filter(pk__in=[key.key for key in keys])
            .values_list("pk", "version", "current__envelope")
        )
    )
    free = [(key, version) for key, version, envelope in seen if _owns_nothing(envelope)]
    if not free:
        return list(keys)
    sql, parameters = _marking(db, free, now)
    marked = {key for (key,) in db.transaction(lambda: db.execute(sql, parameters))}
    return [key for key in keys if key.key not in marked]


def _owns_nothing(envelope: str | None) -> bool:
    if envelope is None:
        return False
    try:
        return not decode(envelope).get("workspace_refs")
    except (IntegrityFault, AttributeError):
        # Nobody knows what an unreadable session owns.
        return False


def _marking(db: Database, free: Sequence[tuple[int, int]], now: datetime) -> tuple[str, list[Any]]:
    """What was seen holds while the version does; a session that is locked is somebody else's business."""
    connection = db.connection
    table = connection.ops.quote_name(Session._meta.db_table)
    moment = connection.ops.adapt_datetimefield_value
    marks = [SessionStatus.FAILED.value, SESSION_EXPIRED, moment(timezone.now())]
    ours = [*NON_TERMINAL, moment(now)]
    is_open = f"status IN ({', '.join(['%s'] * len(NON_TERMINAL))}) AND expires_at <= %s"
    keys, versions = map(list, zip(*free, strict=True))
    update = f"""UPDATE {table} SET status = %s, failure_reason = %s, version = version + 1, updated_at = %s
        WHERE id IN ({{found}}) RETURNING id"""
    if connection.vendor == "postgresql":
        found = f"""
            SELECT s.id FROM {table} AS s JOIN unnest(%s::bigint[], %s::bigint[]) AS seen(id, version)
                ON s.id = seen.id AND s.version = seen.version
            WHERE {is_open} FOR NO KEY UPDATE OF s SKIP LOCKED"""
        return update.format(found=found), [*marks, keys, versions, *ours]
    pairs = ", ".join(["(%s, %s)"] * len(free))
    found = f"SELECT id FROM {table} WHERE (id, version) IN (VALUES {pairs}) AND {is_open}"
    return update.format(found=found), [*marks, *(value for pair in free for value in pair), *ours]


class DatabaseExpiry:
    """``using`` is an alias as in a store; ``tenant`` is one tenant, or ``None`` for all of them."""

    def __init__(self, using: str | None, tenant: str | None) -> None:
        self._using = using
        self._tenant = tenant
        self._db = Database(using, tenant or "", None)

    def now(self) -> datetime:
        return self._db.query(lambda: database_now(self._db))

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
        found = self._db.query(lambda: set(rows))
        return [key for key in keys if key.key in found]

    def mark(self, keys: list[SessionKey], now: datetime) -> list[SessionKey]:
        return mark_without_refs(self._db, keys, now)

    def see(self, key: SessionKey) -> SeenSession | None:
        columns = self._all.filter(pk=key.key).values_list(
            "version", "status", "expires_at", "current__envelope"
        )
        row = self._db.query(lambda: first_row(columns))
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

        return self._db.transaction(claim_and_mark)

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
        text = self._db.query(lambda: first_row(pending))
        store = DatabaseStateStore(self._using, tenant=key.tenant)
        return store, due_calls(key.session_id, text, datetime_to_milliseconds(now))

    def delete(self, key: SessionKey, before: datetime) -> int:
        db = Database(self._using, key.tenant, None)

        def delete_if_all_have_ended() -> int:
            locked = lock_sessions(db, tree_keys(db, key.session_id))
            tree = self._all.filter(pk__in=[head.pk for head in locked])
            marked = tree.filter(status=SessionStatus.FAILED.value, failure_reason=SESSION_EXPIRED)
            top = marked.filter(pk=key.key).expired(before)
            if tree.non_terminal().exists() or not top.exists():
                return 0
            return delete_tree(db, key.session_id, keep_usage=True)

        return db.transaction(delete_if_all_have_ended)

    def _page(self, sessions: Any, order: str, after: Any, limit: int) -> Page:
        """The next sessions in the order of an index."""
        if after is not None:
            moment, key = after
            sessions = sessions.filter(after_keyset(Session, {order: moment, "id": key}))
        page = sessions.order_by(order, "pk").values_list("session_id", "tenant", "pk", order)[:limit]
        rows = self._db.query(lambda: list(page))
        keys = [SessionKey(session_id, tenant, key) for session_id, tenant, key, _ in rows]
        return Page(keys, (rows[-1][3], rows[-1][2]) if len(rows) == limit else None)

    @property
    def _all(self) -> Any:
        return Session.objects.using(self._db.alias)

    @property
    def _ours(self) -> Any:
        if self._tenant is None:
            return self._all.all()
        return self._all.alias(unindexed_tenant=NoIndexHint("tenant")).filter(unindexed_tenant=self._tenant)
