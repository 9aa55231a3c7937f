"""The reason why a session failed or is waiting, on one line, and the sessions that wait for a person."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Substr
from django.utils.translation import gettext

from helix_store.admin.elements import one_line
from helix_store.admin.labels import name_of_status
from helix_store.core.types import TERMINAL_STATUSES, RunStatus
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.reports.payloads import PayloadText
from helix_store.sessions.tool_calls import ToolCalls

REASON_LENGTH: Final = 60

_LONGEST_CALLS: Final = 200_000
"""The maximum number of characters of pending tool calls that a list reads."""

_MOST_ANSWERED: Final = 1_000
_READ_AT_ONCE: Final = 50


def waiting_for_person(sessions: Any) -> QuerySet[Any]:
    """Return the sessions that have an open call.

    A session whose calls are all answered stays suspended until the application resumes it, but no longer
    needs a person. At most 1,000 such sessions are excluded. Ambiguous sessions are read to decide.
    """
    waiting = sessions.waiting_for_person().exclude(
        pending_client_tool_calls__isnull=True, completed_client_tool_calls__isnull=False
    )
    answered = Session.objects.using(sessions.db).waiting_for_person()
    marked = answered.filter(pending_client_tool_calls__contains='"submitted_at":')
    keys = list(marked.values_list("pk", flat=True)[:_MOST_ANSWERED])
    closed = [
        key
        for start in range(0, len(keys), _READ_AT_ONCE)
        for key, tools in _open_tools(keys[start : start + _READ_AT_ONCE], sessions.db)
        if tools == []
    ]
    found: QuerySet[Any] = waiting.exclude(pk__in=closed) if closed else waiting
    return found


def read_open_tools(sessions: Iterable[Any]) -> None:
    """Set ``open_tools`` of sessions of one database: the tools of their open calls, without duplicates.

    It is ``None`` if they cannot be read. This takes one statement if any session waits for a person.
    """
    waiting = {each.pk: each for each in sessions if _is_waiting(each)}
    if not waiting:
        return
    alias = next(iter(waiting.values()))._state.db
    for key, tools in _open_tools(list(waiting), alias):
        waiting[key].open_tools = tools


def _is_waiting(session: Any) -> bool:
    is_over = session.status in TERMINAL_STATUSES
    return not is_over and session.suspension_kind == RunStatus.SUSPENDED_CLIENT_TOOL


def _open_tools(keys: list[int], using: str) -> Iterable[tuple[int, list[str] | None]]:
    pending = PayloadText(Substr("pending_client_tool_calls", 1, _LONGEST_CALLS + 1))
    completed = ExpressionWrapper(Q(completed_client_tool_calls__isnull=False), output_field=BooleanField())
    rows = Session.objects.using(using).filter(pk__in=keys).order_by()
    for key, text, has_completed in rows.values_list("pk", pending, completed):
        yield key, [] if text is None and has_completed else _tools_in(text)


def _tools_in(pending: str | None) -> list[str] | None:
    if pending is None or len(pending) > _LONGEST_CALLS:
        return None
    try:
        calls = ToolCalls.stored(pending, None).unanswered.values()
    except (IntegrityFault, RecursionError):
        return None
    return list(dict.fromkeys(str(call.get("tool_name") or "?") for call in calls))


def reason_of(session: Any) -> str:
    """Return the reason from the session's columns, the result of `read_open_tools` and ``failure_start``."""
    if session.status == "failed":
        return one_line(session.failure_start or "", REASON_LENGTH)
    if session.status in TERMINAL_STATUSES or session.suspension_kind is None:
        return ""
    if not _is_waiting(session):
        return name_of_status(session.suspension_kind)
    if session.open_tools is None:
        return gettext("waits for a person")
    if not session.open_tools:
        return gettext("answered, not resumed yet")
    return gettext("waits for %(tools)s") % {"tools": one_line(", ".join(session.open_tools), REASON_LENGTH)}
