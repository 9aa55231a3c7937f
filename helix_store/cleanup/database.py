"""Cleanup of a database, for one tenant or for all tenants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import chain, repeat
from typing import Final

from django.db.models import F, QuerySet

from helix_store.catalogue.rows import Sweep, sweeps
from helix_store.cleanup.outcomes import CleanupOutcome, ExpiryCandidate, SessionKey
from helix_store.cleanup.trees import require_writable
from helix_store.core import moments
from helix_store.core.contracts import StateStore
from helix_store.core.payloads import decode_object
from helix_store.core.types import SESSION_EXPIRED, PendingToolCall, SessionStatus
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.engine.database import Database
from helix_store.engine.expressions import NoIndexHint
from helix_store.engine.paging import keyset_pages
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.models.sessions import NON_TERMINAL, SessionQuerySet
from helix_store.sessions.database.locking import lock_sessions
from helix_store.sessions.database.rows import first_row
from helix_store.sessions.database.trees import delete_tree, tree_keys
from helix_store.sessions.tool_calls import due_calls
from helix_store.signals import EXPIRY_SIGNALS, announce
from helix_store.stores.database import DatabaseStateStore

_MARK: Final = f"""UPDATE {table(Session)}
    SET status = '{SessionStatus.FAILED.value}', failure_reason = '{SESSION_EXPIRED}',
        version = version + 1, updated_at = %(marked_at)s
    WHERE id IN ({{unchanged}}) RETURNING id"""
_IS_EXPIRED: Final = f"""
    status IN ({", ".join(f"'{status}'" for status in NON_TERMINAL)}) AND expires_at <= %(now)s"""

_MARK_IN_BULK: Final = Statement(
    # A session that another transaction has locked is skipped, and later marked on its own.
    postgresql=_MARK.format(
        unchanged=f"""
            SELECT s.id FROM {table(Session)} AS s
            JOIN jsonb_array_elements(%(candidates)s::jsonb) AS c(known)
                ON s.id = (c.known ->> 'id')::bigint AND s.version = (c.known ->> 'version')::bigint
            WHERE {_IS_EXPIRED} FOR NO KEY UPDATE OF s SKIP LOCKED"""
    ),
    sqlite=_MARK.format(
        unchanged=f"""
            SELECT id FROM {table(Session)}
            WHERE (id, version) IN (
                SELECT json_extract(value, '$.id'), json_extract(value, '$.version')
                FROM json_each(%(candidates)s)
            ) AND {_IS_EXPIRED}"""
    ),
)
"""Mark the candidates whose version is unchanged, and return their keys."""


class DatabaseCleanup:
    """The store's side of a cleanup, for a database. ``tenant`` is one tenant, or ``None`` for all of them.

    Pages have up to ``size`` sessions, in an order that marking does not change. There is at least one page.
    """

    def __init__(self, using: str | None, tenant: str | None) -> None:
        self._using = using
        self._tenant = tenant
        self._db = Database(using, tenant or "")

    def now(self) -> datetime:
        return self._db.query(self._db.now)

    def expired(self, now: datetime, size: int) -> Iterator[list[SessionKey]]:
        """Yield pages of non-terminal sessions past their expiry."""
        return self._pages(self._of_tenant.non_terminal().expired(now), "expires_at", size)

    def overdue(self, now: datetime, size: int) -> Iterator[list[SessionKey]]:
        """Yield pages of non-terminal sessions with calls past their deadline."""
        return self._pages(self._of_tenant.non_terminal().overdue(now), "pending_deadline", size)

    def deletable(self, before: datetime, size: int) -> Iterator[list[SessionKey]]:
        """Yield pages of sessions that a cleanup has marked and that expired before this time."""
        # Filter by the reason alone, as the index does. With the status, PostgreSQL expects too few rows.
        marked = self._of_tenant.filter(failure_reason=SESSION_EXPIRED)
        return self._pages(marked.expired(before), "expires_at", size)

    def non_terminal(self, keys: list[SessionKey]) -> list[SessionKey]:
        """Return the non-terminal sessions, using one query."""
        rows = self._with_keys(keys).non_terminal().values_list("pk", flat=True)
        found = self._db.query(lambda: set(rows))
        return [key for key in keys if key.key in found]

    def mark_in_bulk(self, keys: list[SessionKey], now: datetime) -> list[SessionKey]:
        """Mark the sessions without workspaces that no other worker has locked, and return the others."""
        rows = self._with_keys(keys).values_list("pk", "version", "current__envelope")
        candidates = [
            {"id": key, "version": version}
            for key, version, envelope in self._db.query(lambda: list(rows))
            if _has_no_workspaces(envelope)
        ]
        if not candidates:
            return list(keys)
        parameters = {"candidates": json.dumps(candidates), "now": now, "marked_at": moments.now()}
        rows_of_marked = self._db.transaction(lambda: self._db.execute(_MARK_IN_BULK, parameters))
        marked = {key for (key,) in rows_of_marked}
        for key in keys:
            if key.key in marked:
                self._announce_expiry(key)
        return [key for key in keys if key.key not in marked]

    def sweeps(self) -> Iterator[Sweep]:
        """Yield the sweeps that delete expired rows of other apps."""
        return sweeps(self._db.alias, self._tenant)

    def inspect(self, key: SessionKey) -> ExpiryCandidate | None:
        columns = ("version", "status", "expires_at", "current__envelope")
        row = self._db.query(lambda: first_row(self._with_keys([key]).values_list(*columns)))
        if row is None:
            return None
        version, status, expires_at, envelope = row
        refs = decode_object(envelope).get("workspace_refs", {})
        return ExpiryCandidate(key, version, SessionStatus(status).is_terminal, expires_at, refs)

    def mark(
        self, candidate: ExpiryCandidate, delete_snapshots: Callable[[], None], *, wait: bool
    ) -> CleanupOutcome:
        """Lock the row, delete the snapshots and mark the session, all in one transaction.

        Return `BUSY` if the session has changed since `inspect`, and with ``wait=False`` if another worker
        has locked it. If ``delete_snapshots`` raises an error, the session is left unchanged.
        """
        unchanged = self._with_keys([candidate.key]).filter(version=candidate.version)

        def lock_delete_and_mark() -> CleanupOutcome:
            locked = unchanged.select_for_update(no_key=True, skip_locked=not wait).values_list("pk")
            if first_row(locked) is None:
                return CleanupOutcome.BUSY
            if candidate.workspace_refs:
                require_writable(self._db, [candidate.key.key])
            delete_snapshots()
            # Check the version again: the row lock does not stop a provider that writes on this connection.
            marked = unchanged.update(
                status=SessionStatus.FAILED.value,
                failure_reason=SESSION_EXPIRED,
                version=F("version") + 1,
                updated_at=moments.now(),
            )
            if not marked:
                return CleanupOutcome.BUSY
            self._announce_expiry(candidate.key)
            return CleanupOutcome.MARKED

        return self._db.transaction(lock_delete_and_mark)

    def _announce_expiry(self, key: SessionKey) -> None:
        announce(self._db, key.session_id, EXPIRY_SIGNALS, tenant=key.tenant)

    def overdue_calls(self, key: SessionKey, now: datetime) -> tuple[StateStore, list[PendingToolCall]]:
        """Return a session's calls that are past their deadline, and the store that accepts their answers."""
        pending = self._with_keys([key]).values_list("pending_client_tool_calls", flat=True)
        text = self._db.query(lambda: first_row(pending))
        store = DatabaseStateStore(self._using, tenant=key.tenant)
        return store, due_calls(key.session_id, text, datetime_to_milliseconds(now))

    def delete(self, key: SessionKey, before: datetime) -> int:
        """Delete a session and its tree, but no usage, and return the number of deleted sessions.

        Nothing is deleted if a session of the tree is non-terminal.
        """
        db = Database(self._using, key.tenant)

        def delete_if_all_have_ended() -> int:
            locked = lock_sessions(db, tree_keys(db, key.session_id))
            tree = self._sessions.filter(pk__in=[head.pk for head in locked])
            marked = tree.filter(status=SessionStatus.FAILED.value, failure_reason=SESSION_EXPIRED)
            top = marked.filter(pk=key.key).expired(before)
            if tree.non_terminal().exists() or not top.exists():
                return 0
            return delete_tree(db, key.session_id, keep_usage=True)

        return db.transaction(delete_if_all_have_ended)

    def _pages(self, rows: QuerySet[Session], order: str, size: int) -> Iterator[list[SessionKey]]:
        columns = ("session_id", "tenant", "pk")
        pages = keyset_pages(self._db, rows, (order, "pk"), *columns, sizes=repeat(size))
        for page in chain([next(pages, [])], pages):
            yield [SessionKey(*row[: len(columns)]) for row in page]

    @property
    def _sessions(self) -> SessionQuerySet:
        return Session.objects.using(self._db.alias).all()

    @property
    def _of_tenant(self) -> SessionQuerySet:
        if self._tenant is None:
            return self._sessions
        unindexed = self._sessions.alias(unindexed_tenant=NoIndexHint("tenant"))
        return unindexed.filter(unindexed_tenant=self._tenant)

    def _with_keys(self, keys: list[SessionKey]) -> SessionQuerySet:
        return self._sessions.filter(pk__in=[key.key for key in keys])


def _has_no_workspaces(envelope: str | None) -> bool:
    if envelope is None:
        return False
    try:
        return not decode_object(envelope).get("workspace_refs")
    except IntegrityFault:
        # If a session cannot be read, its workspaces are unknown.
        return False
