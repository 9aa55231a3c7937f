"""Sessions: the list, with its filters, its orders and its search."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Substr
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from helix_store.admin.amounts import dollars, number
from helix_store.admin.elements import NOTHING, badge, distance, narrow, note, one_line, short_id, under
from helix_store.admin.export import EXPORTED_MODELS, export_sessions
from helix_store.admin.filters import (
    ORDERS,
    AgentTypeFilter,
    ChangedFilter,
    ExpiryFilter,
    OrderFilter,
    TagFilter,
    TenantFilter,
    WaitingFilter,
)
from helix_store.admin.lists import OperatedList
from helix_store.admin.lookups import OrderedChangeList
from helix_store.admin.names import NamedChoicesFilter
from helix_store.admin.operating import list_action
from helix_store.admin.payloads import FreeText, start_of
from helix_store.admin.reasons import CALLS_READ, REASON_LENGTH, reason_of
from helix_store.admin.search import MOST_FOUND, NEWEST_SEARCHED, Found, found_sessions
from helix_store.admin.session_operations import DELETE, INTERRUPT, MARK_FAILED
from helix_store.admin.session_page import CHILDREN_OF, SessionPage
from helix_store.core import moments
from helix_store.core.types import TERMINAL_STATUSES
from helix_store.models import Session, UsageEntry
from helix_store.usage.session_totals import SessionTotal, session_totals

__all__ = ["SessionAdmin"]

_TITLE_LENGTH: Final = 80


_INTERRUPT: Final = replace(
    INTERRUPT,
    is_destructive=True,
    warning=_("The agents of these sessions stop at their next step, and can continue."),
)
"""With a question before it: one click must not stop fifty agents."""


class SessionList(OrderedChangeList):
    """A page of sessions with what each has spent."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        page: Any = self.model_admin
        if not page.may_view(request, UsageEntry):
            return
        sessions = list(self.result_list)
        totals = session_totals([session.pk for session in sessions], using=self.root_queryset.db)
        for session in sessions:
            session.total = totals[session.pk]


@admin.register(Session)
class SessionAdmin(SessionPage, OperatedList):
    list_display = (
        "name",
        "agent_type",
        "status_and_reason",
        "user",
        "length",
        "spent",
        "changed",
    )
    list_filter = (
        ("status", NamedChoicesFilter),
        WaitingFilter,
        ExpiryFilter,
        ChangedFilter,
        AgentTypeFilter,
        TenantFilter,
        TagFilter,
        OrderFilter,
    )
    link_lookups = CHILDREN_OF
    actions = (*map(list_action, (_INTERRUPT, MARK_FAILED, DELETE)), export_sessions)
    of_other_models = {**SessionPage.of_other_models, "spent": UsageEntry}
    search_fields = ("session_id",)
    search_help_text = _("Words of a title, a user, a tag or a session id.")

    def has_export_permission(self, request: HttpRequest) -> bool:
        may_view = all(self.may_view(request, model) for model in EXPORTED_MODELS)
        return may_view and self.has_operate_change_permission(request)

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return ORDERS.get(request.GET.get("order", ""), ORDERS[""])

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[OrderedChangeList]:
        return SessionList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        sessions: QuerySet[Any] = (
            super()
            .get_queryset(request)
            .annotate(
                title_start=start_of("title", _TITLE_LENGTH),
                failure_start=start_of("failure_reason", REASON_LENGTH),
                calls_start=FreeText(Substr("pending_client_tool_calls", 1, CALLS_READ)),
            )
        )
        return sessions

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        found = found_sessions(queryset, search_term)
        request.found = found  # type: ignore[attr-defined]  # for `changelist_view`, which says what is left out
        if found.keys is None:
            return queryset, False
        # Without the conditions, which these sessions meet: SQLite would look for them by a tenant's index.
        sessions = self.get_queryset(request).filter(pk__in=found.keys)
        return sessions.order_by(*queryset.query.order_by), False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        response = super().changelist_view(request, extra_context)
        found: Found | None = getattr(request, "found", None)
        if found is not None and isinstance(response, TemplateResponse) and response.context_data is not None:
            response.context_data["search_notes"] = list(_left_out(found))
        return response

    @admin.display(description=_("session"))
    def name(self, session: Any) -> SafeString:
        title = one_line(session.title_start or "", _TITLE_LENGTH)
        return format_html(
            "{}{}{}",
            title or note(gettext("No title")),
            short_id(session.session_id),
            under(gettext("tenant %(tenant)s") % {"tenant": session.tenant}) if session.tenant else "",
        )

    @admin.display(description=_("status"))
    def status_and_reason(self, session: Any) -> SafeString:
        reason = reason_of(session)
        return format_html("{}{}", badge(session.status), under(reason) if reason else "")

    @admin.display(description=_("user"), empty_value=NOTHING)
    def user(self, session: Session) -> SafeString | None:
        return None if session.user_id is None else narrow(session.user_id)

    @admin.display(description=_("messages, steps"))
    def length(self, session: Session) -> SafeString:
        steps = ngettext("%(count)s step", "%(count)s steps", session.step_count)
        return format_html(
            "{}{}", number(session.message_count), under(steps % {"count": f"{session.step_count:,}"})
        )

    @admin.display(description=_("cost, tokens"))
    def spent(self, session: Any) -> SafeString:
        total: SessionTotal = session.total
        tokens = ngettext("%(count)s token", "%(count)s tokens", total.tokens) % {
            "count": f"{total.tokens:,}"
        }
        return format_html(
            "{}{}",
            dollars(total.cost_usd, is_partial=total.is_partial),
            under(f"> {tokens}" if total.is_partial else tokens),
        )

    @admin.display(description=_("updated"))
    def changed(self, session: Session) -> SafeString:
        expiry = ""
        if session.expires_at is not None and session.status not in TERMINAL_STATUSES:
            expiry = format_html('<span class="helix-under">{}</span>', _expiry(session.expires_at))
        return format_html("{}{}", distance(session.updated_at), expiry)


def _expiry(at: datetime) -> SafeString:
    words = gettext("expired {}") if at <= moments.now() else gettext("expires {}")
    return format_html(words, distance(at))


def _left_out(found: Found) -> Any:
    if found.is_bounded:
        yield gettext("Words were looked for in the newest %(count)s sessions only.") % {
            "count": f"{NEWEST_SEARCHED:,}"
        }
    if found.is_cut:
        yield gettext("More sessions match than the newest %(count)s. Search for more words, or filter.") % {
            "count": f"{MOST_FOUND:,}"
        }
