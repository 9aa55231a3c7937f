"""Marking many expired sessions in one statement: those that own nothing that a provider has to delete."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.utils import timezone

from helix_store.core.expiry import SESSION_EXPIRED, SessionKey
from helix_store.core.payloads import decode
from helix_store.core.types import SessionStatus
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.models.sessions import NON_TERMINAL
from helix_store.stores.database.scope import Scope
from helix_store.stores.database.statements import fetched_rows

__all__ = ["mark_without_refs"]


def mark_without_refs(scope: Scope, keys: Sequence[SessionKey], now: datetime) -> list[SessionKey]:
    """Mark the sessions that own nothing and that nobody is busy with; return the others."""
    seen = scope.read(
        lambda: list(
            Session.objects.using(scope.alias)
            .filter(pk__in=[key.key for key in keys])
            .values_list("pk", "version", "current__envelope")
        )
    )
    free = [(key, version) for key, version, envelope in seen if _owns_nothing(envelope)]
    if not free:
        return list(keys)
    sql, parameters = _marking(scope, free, now)
    marked = {key for (key,) in scope.write(lambda: fetched_rows(scope.connection, sql, parameters))}
    return [key for key in keys if key.key not in marked]


def _owns_nothing(envelope: str | None) -> bool:
    if envelope is None:
        return False
    try:
        return not decode(envelope).get("workspace_refs")
    except (IntegrityFault, AttributeError):
        # Nobody knows what an unreadable session owns.
        return False


def _marking(scope: Scope, free: Sequence[tuple[int, int]], now: datetime) -> tuple[str, list[Any]]:
    """What was seen holds while the version does; a session that is locked is somebody else's business."""
    connection = scope.connection
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
