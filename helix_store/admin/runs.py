"""Runs: the turns of a session."""

from __future__ import annotations

from django.contrib import admin
from django.utils.safestring import SafeString

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import badge, json_block, link
from helix_store.models import Run, Session

__all__ = ["RunAdmin"]


@admin.register(Run)
class RunAdmin(SessionChildAdmin):
    list_columns = (
        "run_id",
        "turn",
        "status",
        "step_count",
        "completion_reason",
        "started_at",
        "ended_at",
        "session__session_id",
    )
    list_display = (
        "run_id",
        "of_session",
        "turn",
        "status_badge",
        "step_count",
        "completion_reason",
        "started_at",
        "ended_at",
    )
    list_filter = ("status",)
    ordering = ("-session_id", "-turn")
    fields = (
        "run_id",
        "of_session",
        "turn",
        "status_badge",
        "completion_reason",
        "step_count",
        "start_sequence",
        "fencing_token",
        "started_at",
        "ended_at",
        "error_document",
    )
    readonly_fields = ("of_session", "status_badge", "error_document")

    @admin.display(description="session", ordering="session")
    def of_session(self, run: Run) -> SafeString:
        return link(self.page_url(Session, run.session_id), run.session.session_id)

    @admin.display(description="status")
    def status_badge(self, run: Run) -> SafeString:
        return badge(run.status)

    @admin.display(description="error")
    def error_document(self, run: Run) -> SafeString | str:
        return json_block(run.error)
