"""Runs: the turns of a session."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import (
    NOTHING,
    badge,
    format_time,
    identifier,
    json_block,
    one_line,
    text_block,
    under,
)
from helix_store.admin.payloads import payload_of, start_of
from helix_store.models import Run

__all__ = ["RunAdmin"]

_REASON_LENGTH = 60


@admin.register(Run)
class RunAdmin(SessionChildAdmin):
    list_display = ("name", "of_session", "turn", "outcome", "steps", "started", "ended")
    list_filter = ("status",)
    ordering = ("-session_id", "-turn")
    fields = (
        "run_id",
        "of_session",
        "turn",
        "status_badge",
        "reason",
        "step_count",
        "start_sequence",
        "fencing_token",
        "started_at",
        "ended_at",
        "error_document",
    )
    readonly_fields = ("of_session", "status_badge", "reason", "error_document")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        start = start_of("completion_reason", _REASON_LENGTH)
        runs: QuerySet[Any] = super().get_queryset(request).annotate(reason_start=start)
        return runs

    @admin.display(description="run")
    def name(self, run: Run) -> SafeString:
        return identifier(run.run_id)

    @admin.display(description="steps")
    def steps(self, run: Run) -> int:
        return run.step_count

    @admin.display(description="outcome")
    def outcome(self, run: Any) -> SafeString:
        reason = one_line(run.reason_start or "", _REASON_LENGTH)
        return format_html("{}{}", badge(run.status), under(reason) if reason else "")

    @admin.display(description="started")
    def started(self, run: Run) -> str:
        return format_time(run.started_at)

    @admin.display(description="ended", empty_value=NOTHING)
    def ended(self, run: Run) -> str | None:
        return None if run.ended_at is None else format_time(run.ended_at)

    @admin.display(description="status")
    def status_badge(self, run: Run) -> SafeString:
        return badge(run.status)

    @admin.display(description="completion reason")
    def reason(self, run: Run) -> SafeString | str:
        return text_block(payload_of(run, "completion_reason") or NOTHING)

    @admin.display(description="error")
    def error_document(self, run: Run) -> SafeString | str:
        return json_block(payload_of(run, "error"))
