"""The approver's inbox: the open calls that a user may answer, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

from django.db.models import F, QuerySet
from django.db.models.functions import Substr
from django.http import HttpRequest

from helix_store.actions.answers import People
from helix_store.admin.base import MOST_TENANTS, Scope, of_tenants
from helix_store.admin.elements import distance, moment_of_epoch, one_line
from helix_store.admin.filters import LONGEST_CALLS, open_calls_in, waiting_for_person
from helix_store.admin.operating import OperatedAdmin
from helix_store.admin.sections.section import SessionView
from helix_store.admin.sections.waits import open_call
from helix_store.core import moments
from helix_store.exceptions import InvalidPayload, NotPermitted
from helix_store.models import Session
from helix_store.reports.payloads import PayloadText, start_of
from helix_store.sessions.tool_calls import LiveDecisions, checked_actor, current_call, require_permitted

_SESSIONS: Final = 100
"""The number of sessions, those with the earliest deadlines, in which the inbox looks for calls."""

_CALLS: Final = 100
_TITLE: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """An open call that a user may answer."""

    session_key: int
    key: str
    title: str
    tool: str
    requester: Any
    asked: datetime | None
    deadline: datetime | None

    def is_named(self, request: HttpRequest) -> bool:
        """Return whether the URL names the call."""
        query = request.GET
        return (query.get("session"), query.get("call")) == (str(self.session_key), self.key)

    def url(self, address: str) -> str:
        return f"{address}?{urlencode({'session': self.session_key, 'call': self.key}, errors='replace')}"


def answerable_calls(scope: Scope, user: Any) -> tuple[list[OpenCall], bool]:
    """Return the calls that a user may answer, and whether there may be others.

    The sessions with the earliest deadlines come first, and then those that have waited for the longest time.
    Calls that need somebody else are left out: they have another requester, a permission that the user does
    not have, or the user's approval already. This takes a bounded number of statements.
    """
    sessions = scope.rows(Session)
    tenants = scope.known_tenants(Session)
    waiting = waiting_for_person(sessions)
    if len(tenants) <= MOST_TENANTS:
        waiting = of_tenants(waiting, tenants)
    rows = _in_order(sessions.filter(pk__in=waiting.values("pk")))
    calls = open_calls_in({key: (pending, live) for key, _, _, pending, live in rows}, scope.using)
    actor, found = checked_actor(user), list[OpenCall]()
    for key, session_id, title, _, column in rows:
        live = LiveDecisions(column)
        for call_id, call in calls.get(key, {}).items():
            try:
                require_permitted(call_id, call, actor)
            except (NotPermitted, InvalidPayload):
                continue
            # The digest of a call is only computed if the user may have approved it.
            if actor.id in live.people(call_id) and actor.id in live.approved_by(call_id, current_call(call)):
                continue
            found.append(
                OpenCall(
                    session_key=key,
                    key=call_id,
                    title=one_line(title or session_id, _TITLE),
                    tool=one_line(str(call.get("tool_name") or "?"), _TITLE),
                    requester=call.get("requester"),
                    asked=moment_of_epoch(call.get("requested_at")),
                    deadline=moment_of_epoch(call.get("deadline")),
                )
            )
    return found[:_CALLS], len(rows) == _SESSIONS or len(found) > _CALLS


def _in_order(sessions: QuerySet[Any]) -> list[Any]:
    pending = PayloadText(Substr("pending_client_tool_calls", 1, LONGEST_CALLS + 1))
    by_deadline = sessions.order_by(F("pending_deadline").asc(nulls_last=True), "updated_at", "pk")
    columns = ("pk", "session_id", start_of("title", _TITLE), pending, PayloadText("live_decisions"))
    return list(by_deadline.values_list(*columns)[:_SESSIONS])


def inbox(page: OperatedAdmin, request: HttpRequest, address: str) -> dict[str, Any]:
    """Return the context of the inbox: the calls, and the one that the URL names, by default the first.

    An answer leads to the call after it.
    """
    calls, has_more = answerable_calls(page.scope(request), request.user)
    place = next((place for place, call in enumerate(calls) if call.is_named(request)), 0)
    people = People.of_actors(call.requester for call in calls)
    now = moments.now()
    return {
        "calls": [
            {
                "title": call.title,
                "tool": call.tool,
                "url": call.url(address),
                "is_shown": number == place,
                "requester": people.named(call.requester),
                "asked": distance(call.asked),
                "deadline": distance(call.deadline),
                "is_overdue": call.deadline is not None and call.deadline < now,
            }
            for number, call in enumerate(calls)
        ],
        "has_more": has_more,
        "number": place + 1,
        "previous_url": calls[place - 1].url(address) if place > 0 else "",
        "next_url": calls[place + 1].url(address) if place + 1 < len(calls) else "",
        **_shown(page, request, calls, place, address),
    }


def _shown(
    page: OperatedAdmin, request: HttpRequest, calls: list[OpenCall], place: int, address: str
) -> dict[str, Any]:
    if not calls:
        return {}
    chosen = calls[place]
    session = page.get_queryset(request).filter(pk=chosen.session_key).first()
    if session is None:
        return {}
    view = SessionView(request=request, page=page, session=session, section="waits")
    call = open_call(view, chosen.key)
    # After the answer, the call is gone from the list, so the next one is at its place.
    following = calls[place + 1] if place + 1 < len(calls) else None
    return {
        "call": call,
        "shown_title": chosen.title,
        "session_url": view.url("conversation"),
        "section": {"may_answer": True, "next": address if following is None else following.url(address)},
    }
