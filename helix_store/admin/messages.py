"""The admin of messages: the list with a preview of each message, and the page of one message."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import OF_SESSION, SessionChildAdmin
from helix_store.admin.elements import (
    json_block,
    note,
    one_line,
    text_block,
)
from helix_store.admin.labels import column
from helix_store.admin.times import stamp
from helix_store.core.payloads import decode
from helix_store.exceptions import IntegrityFault
from helix_store.models import Message
from helix_store.reports.payloads import payload_of
from helix_store.reports.previews import message_parts, payload_start, said_at_start

__all__ = ["PREVIEW_LENGTH", "MessageAdmin", "message_preview", "message_text"]

PREVIEW_LENGTH: Final = 180

_UNREADABLE: Final = _("This message cannot be read.")


@admin.register(Message)
class MessageAdmin(SessionChildAdmin):
    list_display = (column("sequence"), column("role"), "preview", "of_session", "written_at")
    list_display_links = (list_display[0], "preview")
    ordering = ("-session_id", "-sequence")
    fields = ("of_session", "sequence", "role", "written_at", "said", "document")
    readonly_fields = ("of_session", "written_at", "said", "document")

    def get_ordering(self, request: HttpRequest) -> tuple[Any, ...]:
        """Show the newest messages first, but order the messages of one session by sequence."""
        return ("session_id", "sequence") if OF_SESSION in request.GET else self.ordering

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        messages: QuerySet[Any] = super().get_queryset(request).annotate(payload_start=payload_start())
        return messages

    @admin.display(description=_("created"))
    def written_at(self, message: Message) -> SafeString:
        return stamp(message.created_at)

    @admin.display(description=_("message"))
    def preview(self, message: Any) -> SafeString | str:
        text = message_preview(message.payload_start)
        return note(str(_UNREADABLE)) if text is None else text

    @admin.display(description=_("says"))
    def said(self, message: Message) -> SafeString:
        text = message_text(payload_of(message, "payload") or "")
        return note(str(_UNREADABLE)) if text is None else text_block(text)

    @admin.display(description=_("as stored"))
    def document(self, message: Message) -> SafeString | str:
        return json_block(payload_of(message, "payload"))


def message_preview(start: str) -> str | None:
    """Return the text of a message in one line, or ``None``. ``start`` is the start of its stored text."""
    said = said_at_start(start)
    return None if said is None else one_line(said, PREVIEW_LENGTH)


def message_text(stored: str) -> str | None:
    """Return the whole text of a message, one paragraph per part, or ``None`` if it is unreadable."""
    try:
        message = decode(stored)
    except IntegrityFault:
        return None
    return "\n\n".join(message_parts(message)) if isinstance(message, dict) else None
