"""Sessions: the list, with its filters and its search."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin import SimpleListFilter
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from helix_store.admin.elements import (
    NOTHING,
    distance,
    identifier,
    narrow,
    one_line,
    under,
)
from helix_store.admin.lookups import is_searchable
from helix_store.admin.payloads import start_of
from helix_store.admin.session_page import CHILDREN_OF, SessionPage
from helix_store.models import Session

__all__ = ["SessionAdmin"]

_TITLE_LENGTH = 80


class AgentTypeFilter(SimpleListFilter):
    """Offers the agent types of the newest sessions: those of all sessions would need a full scan."""

    title = "agent type"
    parameter_name = "agent_type"
    newest = 1_000

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        newest = Session.objects.order_by("-pk").values_list("agent_type", flat=True)[: self.newest]
        names = set(newest)
        if chosen := self.value():
            names.add(chosen)
        return [(name, name) for name in sorted(names)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        return queryset if chosen is None else queryset.filter(agent_type=chosen)


@admin.register(Session)
class SessionAdmin(SessionPage):
    list_display = (
        "name",
        "agent_type",
        "status_badge",
        "user",
        "steps",
        "messages",
        "expires",
        "updated",
    )
    list_filter = ("status", AgentTypeFilter)
    link_lookups = CHILDREN_OF
    # The order of the index on (tenant, updated_at, session_id), read backwards.
    ordering = ("-tenant", "-updated_at", "-session_id")
    search_fields = ("session_id", "user_id", "title")
    search_help_text = "The beginning of a session id, user id or title."

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        start = start_of("title", _TITLE_LENGTH)
        sessions: QuerySet[Any] = super().get_queryset(request).annotate(title_start=start)
        return sessions

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if not is_searchable(search_term):
            return queryset.none(), False
        if beginning := search_term.strip():
            queryset = queryset.filter(
                Q(session_id__startswith=beginning)
                | Q(user_id__startswith=beginning)
                | Q(title__istartswith=beginning)
            )
        return queryset, False

    @admin.display(description="session")
    def name(self, session: Any) -> SafeString:
        title = one_line(session.title_start or "", _TITLE_LENGTH)
        return format_html(
            "{}{}{}",
            identifier(session.session_id),
            under(title) if title else "",
            under(f"tenant {session.tenant}") if session.tenant else "",
        )

    @admin.display(description="user", empty_value=NOTHING)
    def user(self, session: Session) -> SafeString | None:
        return None if session.user_id is None else narrow(session.user_id)

    @admin.display(description="steps")
    def steps(self, session: Session) -> int:
        return session.step_count

    @admin.display(description="messages")
    def messages(self, session: Session) -> int:
        return session.message_count

    @admin.display(description="expires", empty_value=NOTHING)
    def expires(self, session: Session) -> SafeString | None:
        return None if session.expires_at is None else distance(session.expires_at)

    @admin.display(description="updated")
    def updated(self, session: Session) -> SafeString:
        return distance(session.updated_at)
