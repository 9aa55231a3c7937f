"""Messages: the history of a session, line by line."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Substr
from django.http import HttpRequest
from django.utils.safestring import SafeString

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import (
    json_block,
    note,
    text_block,
)
from helix_store.admin.payloads import PayloadText, payload_of
from helix_store.admin.previews import (
    PREVIEW_SOURCE,
    message_preview,
    message_text,
)
from helix_store.models import Message

__all__ = ["MessageAdmin"]

_UNREADABLE = "This message cannot be read."


@admin.register(Message)
class MessageAdmin(SessionChildAdmin):
    list_display = ("sequence", "role", "preview", "of_session", "created_at")
    list_display_links = ("sequence", "preview")
    ordering = ("session_id", "sequence")
    fields = ("of_session", "sequence", "role", "created_at", "said", "document")
    readonly_fields = ("of_session", "said", "document")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        start = PayloadText(Substr("payload", 1, PREVIEW_SOURCE + 1))
        messages: QuerySet[Any] = super().get_queryset(request).annotate(payload_start=start)
        return messages

    @admin.display(description="message")
    def preview(self, message: Any) -> SafeString | str:
        text = message_preview(message.payload_start)
        return note(_UNREADABLE) if text is None else text

    @admin.display(description="says")
    def said(self, message: Message) -> SafeString:
        text = message_text(payload_of(message, "payload") or "")
        return note(_UNREADABLE) if text is None else text_block(text)

    @admin.display(description="as stored")
    def document(self, message: Message) -> SafeString | str:
        return json_block(payload_of(message, "payload"))
