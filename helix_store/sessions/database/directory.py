"""Lists of sessions; for all tenants, the search by id and sessions with too many checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Collection
from datetime import datetime
from typing import Any, Final

from django.db.models import Count, Exists, F, Min, OuterRef, Q, QuerySet

from helix_store.core.types import SessionHead, SubSessionRef, Unset
from helix_store.engine.database import Database, DatabaseOperations, reads
from helix_store.engine.expressions import (
    NoIndexHint,
    after_keyset,
    has_metadata,
    has_tag,
    tenant_parameter,
    tenants_with,
)
from helix_store.engine.statement import table
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.models import SubSessionRef as SubSessionRow
from helix_store.sessions.database.trees import tree_keys
from helix_store.sessions.layout import HEAD_FIELDS
from helix_store.sessions.reading import listed_head, sub_session_ref_from
from helix_store.sessions.requests import SessionQuery

_TENANTS_OF: Final = tenants_with(table(Session), "session_id")


class DatabaseDirectory(DatabaseOperations):
    """Reads across tenants. Reads of a single session use the tenant of the `Database`."""

    def tenants_of(self, session_id: str) -> list[str]:
        return [tenant for (tenant,) in self.db.read(_TENANTS_OF, {"session_id": session_id})]

    @reads
    def starting_with(self, start: str, *, tenant: str | None, limit: int) -> list[tuple[str, str]]:
        """Return tenants and ids of sessions whose id begins with ``start``, without those below a match."""
        sessions = Session.objects.using(self.db.alias)
        # This is a range because LIKE ignores case on SQLite, and ids are ordered by their bytes.
        begins = Q(session_id__gte=start, session_id__lt=start + chr(sys.maxunicode))
        roots = sessions.filter(begins, tenant=OuterRef("tenant"), session_id=OuterRef("root_session_id"))
        found = sessions.filter(begins).exclude(Exists(roots.exclude(session_id=OuterRef("session_id"))))
        if tenant is not None:
            found = found.filter(tenant=tenant)
        return list(found.order_by("session_id", "tenant").values_list("tenant", "session_id")[:limit])

    @reads
    def select(self, query: SessionQuery) -> tuple[list[tuple[str, SessionHead]], int | None, bool]:
        return select_sessions(self.db, query, of_all_tenants=True)

    def tree(self, session_id: str) -> tuple[list[SessionHead], dict[str, list[SubSessionRef]]]:
        """Return the session and all sessions below it, and the refs of each by session id."""
        return self._tree(tree_keys(self.db, session_id))

    @reads
    def _tree(self, keys: Collection[int]) -> tuple[list[SessionHead], dict[str, list[SubSessionRef]]]:
        sessions = Session.objects.using(self.db.alias).filter(pk__in=keys).order_by("created_at", "pk")
        rows = list(sessions.values("pk", *HEAD_FIELDS))
        ids = {row.pop("pk"): row["session_id"] for row in rows}
        refs: dict[str, list[SubSessionRef]] = {}
        for ref in SubSessionRow.objects.using(self.db.alias).filter(session_id__in=keys).order_by("pk"):
            if ref.session_id in ids:
                refs.setdefault(ids[ref.session_id], []).append(sub_session_ref_from(ref))
        return [listed_head(row) for row in rows], refs

    @reads
    def with_more_checkpoints(
        self,
        *,
        keep: int,
        before: datetime | None,
        tenant: str | None,
        session_id: str | None,
        after: int,
        limit: int,
    ) -> list[tuple[int, str, str]]:
        """Return sessions after a key that have more than ``keep`` step checkpoints, the oldest of them
        ``before`` a time, each as its surrogate key, tenant and id.
        """
        checkpoints = Checkpoint.objects.using(self.db.alias).filter(
            kind=CheckpointKind.STEP, namespace="", session_id__gt=after
        )
        if tenant is not None:
            checkpoints = checkpoints.filter(session__tenant=tenant)
        if session_id is not None:
            checkpoints = checkpoints.filter(session__session_id=session_id)
        found: Any = checkpoints.values("session_id").annotate(count=Count("*")).filter(count__gt=keep)
        if before is not None:
            found = found.annotate(oldest=Min("created_at")).filter(oldest__lt=before)
        keys = list(found.order_by("session_id").values_list("session_id", flat=True)[:limit])
        rows = Session.objects.using(self.db.alias).filter(pk__in=keys).order_by("pk")
        return list(rows.values_list("pk", "tenant", "session_id"))


# --- Lists ------------------------------------------------------------------------------------------


def select_sessions(
    db: Database, query: SessionQuery, *, of_all_tenants: bool = False
) -> tuple[list[tuple[str, SessionHead]], int | None, bool]:
    """Return the page with its tenants, the total if requested, and whether more sessions follow."""
    sessions = Session.objects.using(db.alias).all() if of_all_tenants else _of_tenant(db, query)
    matching = _filtered(sessions, query)
    total = matching.count() if query.count else None
    names = (query.order_by, "session_id", *(["tenant"] if of_all_tenants else []))
    prefix = "-" if query.descending else ""
    page = matching.order_by(*(f"{prefix}{name}" for name in names))
    if query.after is not None:
        last = dict(zip(names, query.after, strict=True))
        page = page.filter(after_keyset(Session, last, descending=query.descending))
    rows = list(page.values("tenant", *HEAD_FIELDS)[query.offset : query.offset + query.limit + 1])
    found = [(row["tenant"], listed_head(row)) for row in rows[: query.limit]]
    return found, total, len(rows) > query.limit


def _of_tenant(db: Database, query: SessionQuery) -> QuerySet[Session]:
    # An index over all tenants finds the documents. PostgreSQL must therefore know the size of this tenant:
    # if it assumes a small tenant, it also reads all of the tenant's sessions to intersect the two sets.
    is_by_document = query.tags or query.metadata
    tenant = db.tenant if is_by_document else tenant_parameter(db.tenant)
    return Session.objects.using(db.alias).filter(tenant=tenant)


def _filtered(sessions: QuerySet[Session], query: SessionQuery) -> QuerySet[Session]:
    """Return the sessions that match every filter of a query."""
    # An agent works for many users, so there are fewer sessions for a user or a workspace than for an agent.
    is_of_few = query.user_id is not None or query.workspace_id is not None
    sessions = sessions.alias(agent=NoIndexHint("agent_type") if is_of_few else F("agent_type"))
    equal: dict[str, Any] = {
        "agent": query.agent_type,
        "user_id": query.user_id,
        "root_session_id": query.root_session_id,
        "workspace_id": query.workspace_id,
        "created_at__gte": query.created_from,
        "created_at__lt": query.created_to,
    }
    sessions = sessions.filter(**{name: value for name, value in equal.items() if value is not None})
    if query.statuses is not None:
        sessions = sessions.filter(status__in=sorted(query.statuses))
    if query.parent_session_id is None:
        sessions = sessions.filter(parent_session_id__isnull=True)
    elif not isinstance(query.parent_session_id, Unset):
        sessions = sessions.filter(parent_session_id=query.parent_session_id)
    for tag in query.tags:
        sessions = sessions.filter(has_tag(tag))
    for key, value in query.metadata.items():
        sessions = sessions.filter(has_metadata(key, value))
    return sessions
