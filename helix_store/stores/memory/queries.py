"""Filtering, ordering and paging of session records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from helix_store.core.requests import SessionQuery
from helix_store.core.types import Unset
from helix_store.stores.memory.records import SessionRecord

__all__ = ["select_records"]


def select_records(
    records: Iterable[SessionRecord], query: SessionQuery
) -> tuple[list[SessionRecord], int, bool]:
    """The page, how many sessions the filters let through, and whether more follows."""

    def position(record: SessionRecord) -> tuple[datetime, str]:
        return record.columns[query.order_by], record.session_id

    found = [record for record in records if _matches(record.columns, query)]
    total = len(found)
    found.sort(key=position, reverse=query.descending)
    if query.after is not None:
        seen = query.after
        found = [
            record
            for record in found
            if (position(record) < seen if query.descending else position(record) > seen)
        ]
    end = query.offset + query.limit
    return found[query.offset : end], total, end < len(found)


def _matches(columns: Mapping[str, Any], query: SessionQuery) -> bool:
    for name in ("agent_type", "user_id", "root_session_id", "workspace_id"):
        wanted = getattr(query, name)
        if wanted is not None and columns[name] != wanted:
            return False
    if (
        not isinstance(query.parent_session_id, Unset)
        and columns["parent_session_id"] != query.parent_session_id
    ):
        return False
    if query.statuses is not None and columns["status"] not in query.statuses:
        return False
    if query.created_from is not None and columns["created_at"] < query.created_from:
        return False
    if query.created_to is not None and columns["created_at"] >= query.created_to:
        return False
    return set(query.tags) <= set(columns["tags"]) and query.metadata.items() <= columns["metadata"].items()
