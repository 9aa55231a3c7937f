"""A list of sessions: its filters, checked, and what a cursor is bound to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from helix_store.core import validation
from helix_store.core.types import UNSET, SessionStatus, Timestamp, Unset
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.sessions.requests import SessionQuery

__all__ = ["checked_query", "cursor_binding"]


def checked_query(
    *,
    agent_type: str | None = None,
    status: SessionStatus | str | Collection[SessionStatus | str] | None = None,
    user_id: str | None = None,
    parent_session_id: str | Unset | None = UNSET,
    root_session_id: str | None = None,
    workspace_id: str | None = None,
    tags: Iterable[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    created_from: Timestamp | None = None,
    created_to: Timestamp | None = None,
    order_by: str = "updated_at",
    direction: str = "desc",
    limit: int = 50,
    offset: int = 0,
    count: bool = True,
) -> SessionQuery:
    """The query of these filters. Raises `InvalidQuery` and `InvalidPayload`."""
    return SessionQuery(
        agent_type=validation.optional_identifier(agent_type, "agent_type"),
        statuses=_status_filter(status),
        user_id=validation.optional_identifier(user_id, "user_id"),
        parent_session_id=(
            parent_session_id
            if isinstance(parent_session_id, Unset)
            else validation.optional_identifier(parent_session_id, "parent_session_id")
        ),
        root_session_id=validation.optional_identifier(root_session_id, "root_session_id"),
        workspace_id=validation.optional_identifier(workspace_id, "workspace_id", empty=True),
        tags=[] if tags is None else validation.tags(tags if isinstance(tags, str) else list(tags)),
        metadata={} if metadata is None else validation.metadata(metadata),
        created_from=_timestamp(created_from, "created_from"),
        created_to=_timestamp(created_to, "created_to"),
        order_by=_one_of(order_by, ("created_at", "updated_at"), "order_by"),  # type: ignore[arg-type]
        descending=_one_of(direction, ("asc", "desc"), "direction") == "desc",
        limit=validation.page_limit(limit),
        offset=validation.page_offset(offset),
        count=bool(count),
    )


def cursor_binding(tenant: str | None, query: SessionQuery) -> dict[str, Any]:
    """What the next page must repeat: the tenant, ``None`` for all of them, and the query."""
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
