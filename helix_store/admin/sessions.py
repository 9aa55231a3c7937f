"""The admin of sessions: the list, with its filters and its orders."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from helix_store.actions.sessions import DELETE, MARK_FAILED, Interrupt
from helix_store.admin.checkpointers import GraphSessions, SnapshotThreads
from helix_store.admin.columns import column, dollars, number, own_column
from helix_store.admin.elements import badge, narrow, one_line, stacked
from helix_store.admin.filters import (
    ORDERS,
    AgentTypeFilter,
    ChangedFilter,
    ExpiryFilter,
    OrderFilter,
    SessionStatusFilter,
    TagFilter,
    TenantFilter,
    WaitingFilter,
)
from helix_store.admin.operating import list_action
from helix_store.admin.reasons import read_open_tools, reason_of
from helix_store.admin.session_page import CHILDREN_OF, SessionPage
from helix_store.admin.session_table import SessionTable, export_sessions
from helix_store.core.transcript import ConversationMessage
from helix_store.models import Session, UsageEntry
from helix_store.reports.conversations import line_of, outlined
from helix_store.usage.reports import SessionTotal, session_totals

_LAST_LENGTH: Final = 80


class InterruptMany(Interrupt):
    """An interrupt that asks for confirmation first, because one click must not stop fifty agents."""

    is_destructive = True
    warning = _("The agents of these sessions stop at their next step, and can continue.")


@admin.register(Session)
class SessionAdmin(SessionPage, SessionTable):
    list_display = (
        "name",
        own_column("agent_type"),
        "status_and_reason",
        "user",
        "length",
        "spent",
        "changed",
    )
    list_filter = (
        ("status", SessionStatusFilter),
        WaitingFilter,
        ExpiryFilter,
        ChangedFilter,
        AgentTypeFilter,
        TenantFilter,
        TagFilter,
        OrderFilter,
    )
    orders = ORDERS
    link_lookups = CHILDREN_OF
    actions = (*map(list_action, (InterruptMany(), MARK_FAILED, DELETE)), export_sessions)
    of_other_models = {**SessionPage.of_other_models, "spent": UsageEntry}
    side_lists: ClassVar = {"graphs": GraphSessions, "snapshots": SnapshotThreads}

    user = column("user_id", _("user"), narrow)

    def complete_rows(self, request: HttpRequest, rows: list[Any]) -> None:
        """Set the reason for each session's wait, and the amount that it has spent."""
        read_open_tools(rows)
        found = outlined(rows, self.alias, partial(self.may_view, request))
        for session in rows:
            session.outline = found[session.pk]
        if not self.may_view(request, UsageEntry):
            return
        totals = session_totals([session.pk for session in rows], using=self.alias)
        for session in rows:
            session.total = totals[session.pk]

    @admin.display(description=_("status"))
    def status_and_reason(self, session: Any) -> SafeString:
        return stacked(badge(session.status), reason_of(session))

    @admin.display(description=_("session"))
    def name(self, session: Any) -> SafeString:
        last: ConversationMessage | None = session.outline.last
        said = one_line(line_of((last and last.parts) or ()), _LAST_LENGTH)
        return stacked(super().name(session), said)

    @admin.display(description=_("messages, steps"))
    def length(self, session: Any) -> SafeString:
        steps = ngettext("%(count)s step", "%(count)s steps", session.step_count)
        messages = number(session.outline.count, is_partial=session.outline.is_partial)
        return stacked(messages, steps % {"count": f"{session.step_count:,}"})

    @admin.display(description=_("cost, tokens"))
    def spent(self, session: Any) -> SafeString:
        total: SessionTotal = session.total
        tokens = ngettext("%(count)s token", "%(count)s tokens", total.tokens) % {
            "count": f"{total.tokens:,}"
        }
        cost = dollars(total.cost_usd, is_partial=total.is_partial)
        return stacked(cost, f"> {tokens}" if total.is_partial else tokens)
