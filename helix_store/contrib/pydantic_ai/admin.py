"""Conversations and their entries in the admin: read-only, with only previews of payloads in lists."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import PayloadDownload, SessionChildAdmin
from helix_store.admin.elements import (
    NOTHING,
    column,
    identifier,
    json_column,
    link,
    note,
    number,
    one_line,
    stamp,
)
from helix_store.contrib.pydantic_ai.catalogue import entry_message
from helix_store.contrib.pydantic_ai.models import Conversation, ConversationEntry
from helix_store.reports.payloads import PREVIEW_SOURCE, payload_start

_PREVIEW_LENGTH: Final = 180


@admin.register(Conversation)
class ConversationAdmin(SessionChildAdmin):
    list_display = ("of_session", "scope", "revision", "saved")
    list_display_links = ("revision",)
    ordering = ("-pk",)
    fields = ("of_session", "scope", "saved", "revision", "newest", "left_at", "entries", "record")

    saved = column("updated_at", _("updated"), stamp)
    newest = column("head_id", _("newest entry"), identifier)
    left_at = json_column("branches", _("left branches"))
    record = json_column("document", _("as stored"))

    @admin.display(description=_("entries"))
    def entries(self, conversation: Conversation) -> SafeString | str:
        address = self.list_url(
            ConversationEntry, tenant__exact=conversation.tenant, family__exact=conversation.family
        )
        return link(address, str(_("of this conversation and its forks"))) if address else NOTHING


@admin.register(ConversationEntry)
class ConversationEntryAdmin(PayloadDownload):
    list_display = ("entry_id", "preview", "kind", "size", "stored")
    list_display_links = ("entry_id", "preview")
    link_lookups = ("tenant__exact", "family__exact")
    ordering = ("-pk",)
    fields = ("entry_id", "parent_id", "tenant", "family", "kind", "size", "stored", "document", "download")

    size = column("size_bytes", _("bytes"), number)
    stored = column("created_at", _("created"), stamp)
    document = json_column("payload", _("as stored"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        entries: QuerySet[Any] = super().get_queryset(request).annotate(payload_start=payload_start())
        return entries

    @admin.display(description=_("message"))
    def preview(self, entry: Any) -> SafeString | str:
        message = entry_message(1, entry.pk, entry.created_at, entry.payload_start, PREVIEW_SOURCE)
        if message.parts is None:
            return note(str(_("This message cannot be read.")))
        said = (f"→ {part.name}" if part.kind == "call" else part.text for part in message.parts)
        return one_line(" ".join(said), _PREVIEW_LENGTH)
