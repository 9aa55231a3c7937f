"""Claude sessions: the list, and the page of one with its summary."""

from __future__ import annotations

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import column, json_column, narrow, number, stamp
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.core.payloads import size_of
from helix_store.core.validation import milliseconds_to_datetime
from helix_store.reports.payloads import payload_of


@admin.register(ClaudeSession)
class ClaudeSessionAdmin(SessionChildAdmin):
    list_display = ("claude_id", "project", "of_session", "written_at")
    list_display_links = ("claude_id",)
    ordering = ("-id",)
    fields = ("claude_session_id", "project_key", "of_session", "written_at", "size", "document")

    claude_id = column("claude_session_id", _("Claude session"), narrow)
    project = column("project_key", _("project"), narrow)
    document = json_column("summary", _("summary"))
    written_at = column("mtime_ms", _("written"), lambda ms: stamp(milliseconds_to_datetime(ms)))

    @admin.display(description=_("bytes"))
    def size(self, row: ClaudeSession) -> str:
        return number(size_of(payload_of(row, "summary") or ""))
