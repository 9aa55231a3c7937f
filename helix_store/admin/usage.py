"""The admin of usage entries: the list, and a link to the report."""

from __future__ import annotations

from functools import partial

from django.contrib import admin
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import ReadOnlyAdmin
from helix_store.admin.columns import column, dollars, number
from helix_store.admin.elements import NOTHING, badge, link, narrow, one_line, short_id
from helix_store.admin.filters import EntryTenantFilter, NamedChoicesFilter
from helix_store.admin.times import format_time
from helix_store.admin.usage_report import csv_response, report_response
from helix_store.models import Session, UsageEntry

_LONGEST_NAME = 120


@admin.register(UsageEntry)
class UsageEntryAdmin(ReadOnlyAdmin):
    list_display = (
        "at",
        "kind_badge",
        "session_name",
        "of_session",
        "spent_on",
        "tokens",
        "cost",
        "quantity",
    )
    list_filter = (("kind", NamedChoicesFilter), EntryTenantFilter)
    ordering = ("-tenant", "-timestamp", "-id")
    of_other_models = {"of_session": Session}
    fieldsets = (
        (None, {"fields": ("at", "kind_badge", "cost", "session_name", "of_session", "success")}),
        (
            _("Spent on"),
            {"fields": ("model", "tool_name", "agent_type", "custom_type", "custom_name", "quantity")},
        ),
        (
            _("Tokens"),
            {
                "fields": (
                    "total_tokens",
                    "prompt_tokens",
                    "completion_tokens",
                    "reasoning_tokens",
                    "cached_tokens",
                    "duration_ms",
                )
            },
        ),
        (
            _("Recorded by"),
            {
                "fields": (
                    "tenant",
                    "user_id",
                    "session_agent_type",
                    "run_id",
                    "step_count",
                    "source_type",
                    "source_name",
                    "sub_session_id",
                    "entry_id",
                )
            },
        ),
    )
    change_list_template = "admin/helix_store/usage_list.html"

    at = column("timestamp", _("time"), format_time)
    kind_badge = column("kind", _("kind"), badge)
    session_name = column("recorded_for", _("session"), short_id)
    tokens = column("total_tokens", _("tokens"), number)

    def get_urls(self) -> list[URLPattern]:
        wrapped = self.admin_site.admin_view
        report, rows = wrapped(partial(report_response, self)), wrapped(partial(csv_response, self))
        return [
            path("report/", report, name="helix_store_usageentry_report"),
            path("csv/", rows, name="helix_store_usageentry_csv"),
            *super().get_urls(),
        ]

    @admin.display(description=_("session page"))
    def of_session(self, entry: UsageEntry) -> SafeString | str:
        # This needs no lookup: the key refers to a session, or is null if the session has been deleted.
        if entry.session_id is None:
            return NOTHING
        return link(self.page_url(Session, entry.session_id), gettext("open"))

    @admin.display(description=_("spent on"))
    def spent_on(self, entry: UsageEntry) -> SafeString | str:
        named = entry.model or entry.tool_name or entry.agent_type
        named = named or " ".join(filter(None, (entry.custom_type, entry.custom_name)))
        return narrow(one_line(named, _LONGEST_NAME)) if named else NOTHING

    @admin.display(description=_("cost, USD"))
    def cost(self, entry: UsageEntry) -> SafeString:
        return dollars(entry.cost_usd)

    @admin.display(description=_("amount"))
    def quantity(self, entry: UsageEntry) -> str:
        if entry.amount is None:
            return NOTHING
        return f"{entry.amount:,g} {one_line(entry.custom_unit or '', 20)}".strip()
