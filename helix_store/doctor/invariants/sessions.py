"""Invariants of a session's head, its messages, its runs, its tool calls and its posts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from helix_store.core.payloads import decode_object
from helix_store.doctor import sql
from helix_store.doctor.findings import Fault
from helix_store.doctor.registry import by_statement, each, fault
from helix_store.doctor.scope import fetched, read_keys
from helix_store.engine.database import Database
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.sessions.layout import earliest_deadline

__all__ = ["CHECKS", "has_deadline_off"]


@each(Session, "message-count-off", "message-hole")
def histories(db: Database, keys: list[int]) -> Iterator[Fault]:
    """Compare the head's count with the last message. A hole only concerns the messages themselves."""
    for tenant, name, key, count, number, first, last in read_keys(db, sql.HISTORIES, keys):
        if count != last:
            yield fault("message-count-off", "session", tenant, name, key=key)
        if number != last or first != 1:
            yield fault("message-hole", "message", tenant, name, f"{number} of {last}", key=key)


@each(Session, "deadline-off")
def deadlines(db: Database, keys: list[int]) -> Iterator[Fault]:
    rows = (
        Session.objects.using(db.alias)
        .filter(pk__in=keys)
        .exclude(pending_client_tool_calls__isnull=True, pending_deadline__isnull=True)
    )
    columns = ("tenant", "session_id", "pk", "pending_client_tool_calls", "pending_deadline")
    for tenant, name, key, calls, deadline in fetched(db, rows.values_list(*columns)):
        if has_deadline_off(calls, deadline):
            yield fault("deadline-off", "session", tenant, name, key=key)


def has_deadline_off(calls: str | None, deadline: Any) -> bool:
    """Return whether the deadline does not match the pending calls. Unreadable calls are another fault."""
    try:
        return bool(earliest_deadline({} if calls is None else decode_object(calls)) != deadline)
    except IntegrityFault:
        return False


CHECKS: Final = (
    histories,
    by_statement("runs-running", Session, "run", sql.RUNS_RUNNING),
    deadlines,
    by_statement("next-post-off", Session, "session", sql.NEXT_POST_OFF),
)
