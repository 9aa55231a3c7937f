"""Queries for lists of sessions: checked filters, and the cursors of their pages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from helix_store.core import validation
from helix_store.core.types import SessionHead, SessionStatus, Timestamp, Unset
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.sessions.requests import SessionQuery


def checked_query(filters: Mapping[str, Any]) -> SessionQuery:
    """Return a query from the parameters of ``list_sessions``. Raises `InvalidQuery` and `InvalidPayload`."""
    parent_session_id, tags, metadata = (filters[name] for name in ("parent_session_id", "tags", "metadata"))
    return SessionQuery(
        agent_type=validation.optional_identifier(filters["agent_type"], "agent_type"),
        statuses=_status_filter(filters["status"]),
        user_id=validation.user_id(filters["user_id"]),
        parent_session_id=(
            parent_session_id
            if isinstance(parent_session_id, Unset)
            else validation.optional_identifier(parent_session_id, "parent_session_id")
        ),
        root_session_id=validation.optional_identifier(filters["root_session_id"], "root_session_id"),
        workspace_id=validation.optional_identifier(filters["workspace_id"], "workspace_id", empty=True),
        tags=[] if tags is None else validation.tags(tags if isinstance(tags, str) else list(tags)),
        metadata={} if metadata is None else validation.metadata(metadata),
        created_from=_timestamp(filters["created_from"], "created_from"),
        created_to=_timestamp(filters["created_to"], "created_to"),
        order_by=_one_of(filters["order_by"], ("created_at", "updated_at"), "order_by"),  # type: ignore[arg-type]
        descending=_one_of(filters["direction"], ("asc", "desc"), "direction") == "desc",
        limit=validation.page_limit(filters["limit"]),
        offset=validation.page_offset(filters["offset"]),
        count=bool(filters["count"]),
    )


def after_cursor(query: SessionQuery, cursor: str | None, *, tenant: str | None) -> SessionQuery:
    """Return the query for the page at a cursor. Raises `InvalidCursor` and `InvalidQuery`."""
    if cursor is None:
        return query
    if query.offset:
        raise InvalidQuery("Pass a cursor or an offset, not both.", path="cursor")
    time, *ids = read_cursor(cursor, query=_cursor_binding(query, tenant))
    return replace(query, after=(datetime.fromisoformat(time), *ids))


def next_cursor(query: SessionQuery, last: SessionHead, *last_tenant: str, tenant: str | None) -> str:
    """Return the cursor of the page after a session, with its tenant in a list of all tenants."""
    position = [getattr(last, query.order_by).isoformat(), last.session_id, *last_tenant]
    return write_cursor(position, query=_cursor_binding(query, tenant))


def _cursor_binding(query: SessionQuery, tenant: str | None) -> dict[str, Any]:
    """Return the values that the next page must repeat: the tenant (``None`` for all) and the query."""
    binding = {"tenant": tenant, **asdict(query)}
    binding["statuses"] = None if query.statuses is None else sorted(query.statuses)
    for paging in ("limit", "offset", "after", "count"):
        del binding[paging]
    return binding


def _status_filter(
    status: SessionStatus | str | Collection[SessionStatus | str] | None,
) -> frozenset[SessionStatus] | None:
    if status is None:
        return None
    try:
        return validation.statuses([status] if isinstance(status, str) else status, "status")
    except InvalidPayload as exc:
        raise InvalidQuery(f"status: {exc.reason}.", path="status") from exc


def _timestamp(value: Timestamp | None, name: str) -> datetime | None:
    return None if value is None else validation.aware_datetime(value, name)


def _one_of(value: str, allowed: tuple[str, ...], name: str) -> str:
    if value not in allowed:
        raise InvalidQuery(f"{name} must be one of {', '.join(allowed)}.", path=name)
    return value
