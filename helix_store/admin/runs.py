"""The admin of runs. A run is one turn of a session."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.columns import column, own_column
from helix_store.admin.elements import NOTHING, badge, json_block, one_line, short_id, stacked, text_block
from helix_store.admin.filters import NamedChoicesFilter
from helix_store.admin.times import distance, duration, format_time
from helix_store.core import moments
from helix_store.models import Run
from helix_store.reports.payloads import payload_of, said_by, start_of, traceback_of

_REASON_LENGTH = 60


@admin.register(Run)
class RunAdmin(SessionChildAdmin):
    list_display = ("name", "of_session", own_column("turn"), "outcome", "steps", "started", "lasted")
    list_filter = (("status", NamedChoicesFilter),)
    list_texts = {"reason_start": start_of("completion_reason", _REASON_LENGTH)}
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
        "started_exactly",
        "ended_exactly",
        "lasted",
        "error_document",
    )

    name = column("run_id", _("run"), short_id)
    steps = column("step_count", _("steps"), int)
    started = column("started_at", _("started"), distance)
    started_exactly = column("started_at", _("started"), format_time)
    ended_exactly = column("ended_at", _("ended"), format_time)
    status_badge = column("status", _("status"), badge)

    @admin.display(description=_("outcome"))
    def outcome(self, run: Any) -> SafeString:
        return stacked(badge(run.status), one_line(run.reason_start or "", _REASON_LENGTH))

    @admin.display(description=_("duration"))
    def lasted(self, run: Run) -> str:
        """Return how long a run lasted, or has lasted so far if it has not ended."""
        return duration((run.ended_at or moments.now()) - run.started_at)

    @admin.display(description=_("completion reason"))
    def reason(self, run: Run) -> SafeString | str:
        return text_block(payload_of(run, "completion_reason") or NOTHING)

    @admin.display(description=_("error"))
    def error_document(self, run: Run) -> SafeString | str:
        stored = payload_of(run, "error")
        trace = traceback_of(stored)
        # This is text with line breaks, which JSON would escape.
        return json_block(stored) if trace is None else text_block(f"{trace}{said_by(stored)}")
