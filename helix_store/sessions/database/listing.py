"""Listing of sessions: filters, keyset pages, heads only."""

from __future__ import annotations

from typing import Any

from django.db.models import F, QuerySet

from helix_store.core.types import SessionHead, Unset
from helix_store.engine.database import Database
from helix_store.engine.expressions import NoIndexHint, after_keyset, has_metadata, has_tag, tenant_parameter
from helix_store.models import Session
from helix_store.sessions.layout import HEAD_FIELDS
from helix_store.sessions.reading import listed_head
from helix_store.sessions.requests import SessionQuery

__all__ = ["filtered_sessions", "select_sessions"]


def select_sessions(db: Database, query: SessionQuery) -> tuple[list[SessionHead], int | None, bool]:
    """Return the page, the total if requested, and whether more sessions follow."""
    matching = filtered_sessions(_of_tenant(db, query), query)
    total = matching.count() if query.count else None
    prefix = "-" if query.descending else ""
    page = matching.order_by(f"{prefix}{query.order_by}", f"{prefix}session_id")
    if query.after is not None:
        timestamp, session_id = query.after
        last = {query.order_by: timestamp, "session_id": session_id}
        page = page.filter(after_keyset(Session, last, descending=query.descending))
    rows = list(page.values(*HEAD_FIELDS)[query.offset : query.offset + query.limit + 1])
    heads = [listed_head(row) for row in rows[: query.limit]]
    return heads, total, len(rows) > query.limit


def _of_tenant(db: Database, query: SessionQuery) -> QuerySet[Session]:
    # An index over all tenants finds documents. PostgreSQL must therefore know how large this tenant is: if
    # it assumes a small tenant, it also reads all of the tenant's sessions to intersect the two sets.
    is_by_document = query.tags or query.metadata
    tenant = db.tenant if is_by_document else tenant_parameter(db.tenant)
    return Session.objects.using(db.alias).filter(tenant=tenant)


def filtered_sessions(sessions: QuerySet[Session], query: SessionQuery) -> QuerySet[Session]:
    """Return the sessions that match every filter of a query."""
    # An agent works for many users, so a user or a workspace has fewer sessions than an agent.
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
