"""Messages: the history of a session, line by line."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Substr
from django.utils.safestring import SafeString

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import json_block, link, note
from helix_store.admin.previews import PREVIEW_SOURCE, message_preview
from helix_store.models import Message, Session

__all__ = ["MessageAdmin"]


@admin.register(Message)
class MessageAdmin(SessionChildAdmin):
    list_columns = ("sequence", "role", "created_at", "session__session_id")
    list_display = ("sequence", "role", "preview", "of_session", "created_at")
    list_display_links = ("sequence", "preview")
    ordering = ("session_id", "sequence")
    fields = ("of_session", "sequence", "role", "created_at", "document")
    readonly_fields = ("of_session", "document")

    def list_heads(self, queryset: QuerySet[Any]) -> QuerySet[Any]:
        heads: QuerySet[Any] = (
            super().list_heads(queryset).annotate(payload_start=Substr("payload", 1, PREVIEW_SOURCE + 1))
        )
        return heads

    @admin.display(description="session", ordering="session")
    def of_session(self, message: Message) -> SafeString:
        return link(self.page_url(Session, message.session_id), message.session.session_id)

    @admin.display(description="message")
    def preview(self, message: Any) -> SafeString | str:
        text = message_preview(message.payload_start)
        return note("This message cannot be read.") if text is None else text

    @admin.display(description="message")
    def document(self, message: Message) -> SafeString | str:
        return json_block(message.payload)
