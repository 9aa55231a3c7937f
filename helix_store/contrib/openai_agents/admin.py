"""The page of runs that wait for an approval. Texts may hold credentials, so they are not shown."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import OF_SESSION, SessionChildAdmin
from helix_store.admin.elements import identifier
from helix_store.admin.times import stamp
from helix_store.contrib.openai_agents.models import OpenAIRunState

__all__ = ["RunStateAdmin"]


@admin.register(OpenAIRunState)
class RunStateAdmin(SessionChildAdmin):
    list_display = ("name", "of_session", "answered_by", "until", "resumed", "size", "written_at")
    ordering = ("-pk",)
    fields = ("name", "of_session", "answered_by", "until", "resumer", "resumed", "size", "written_at")
    readonly_fields = fields

    def get_ordering(self, request: HttpRequest) -> tuple[Any, ...]:
        return ("session_id", "pk") if OF_SESSION in request.GET else self.ordering

    @admin.display(description=_("run state"))
    def name(self, state: OpenAIRunState) -> SafeString:
        return identifier(state.state_id)

    @admin.display(description=_("owner"), empty_value="-")
    def answered_by(self, state: OpenAIRunState) -> SafeString | None:
        return identifier(state.owner) if state.owner else None

    @admin.display(description=_("claimed by"), empty_value="-")
    def resumer(self, state: OpenAIRunState) -> SafeString | None:
        return identifier(state.claim_owner) if state.claim_owner else None

    @admin.display(description=_("deadline"), empty_value="-")
    def until(self, state: OpenAIRunState) -> SafeString | None:
        return stamp(state.deadline) if state.deadline else None

    @admin.display(description=_("resumed"), empty_value="-")
    def resumed(self, state: OpenAIRunState) -> SafeString | None:
        return stamp(state.resumed_at) if state.resumed_at else None

    @admin.display(description=_("bytes"))
    def size(self, state: OpenAIRunState) -> str:
        return f"{state.size_bytes:,}"

    @admin.display(description=_("created"))
    def written_at(self, state: OpenAIRunState) -> SafeString:
        return stamp(state.created_at)
