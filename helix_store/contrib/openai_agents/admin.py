"""The page of runs that wait for an approval. Their text may contain credentials, so it is not shown."""

from __future__ import annotations

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import column, identifier, number, stamp
from helix_store.contrib.openai_agents.models import OpenAIRunState


@admin.register(OpenAIRunState)
class RunStateAdmin(SessionChildAdmin):
    list_display = ("name", "of_session", "answered_by", "until", "resumed", "size", "written_at")
    ordering = ("-pk",)
    order_of_session = ("session_id", "pk")
    fields = ("name", "of_session", "answered_by", "until", "resumer", "resumed", "size", "written_at")

    name = column("state_id", _("run state"), identifier)
    answered_by = column("owner", _("owner"), identifier)
    resumer = column("claim_owner", _("claimed by"), identifier)
    until = column("deadline", _("deadline"), stamp)
    resumed = column("resumed_at", _("resumed"), stamp)
    size = column("size_bytes", _("bytes"), number)
    written_at = column("created_at", _("created"), stamp)
