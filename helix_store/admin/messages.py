"""The admin of messages and of items in lanes: a list with the start of each, and a page for each."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.columns import column, json_column, own_column
from helix_store.admin.elements import NOTHING, identifier, note, one_line, text_block
from helix_store.admin.times import stamp
from helix_store.core.transcript import parts_of
from helix_store.models import Item, Message
from helix_store.reports.conversations import said_at_start, text_of
from helix_store.reports.payloads import payload_of, payload_start, read_start

PREVIEW_LENGTH: Final = 180

_UNREADABLE: Final = _("This message cannot be read.")


@admin.register(Message)
class MessageAdmin(SessionChildAdmin):
    list_display = (own_column("sequence"), own_column("role"), "preview", "of_session", "written_at")
    list_display_links = (list_display[0], "preview")
    list_texts = {"payload_start": payload_start()}
    ordering = ("-session_id", "-sequence")
    order_of_session = ("session_id", "sequence")
    fields = ("of_session", "sequence", "role", "written_at", "said", "document")

    written_at = column("created_at", _("created"), stamp)
    document = json_column("payload", _("as stored"))

    @admin.display(description=_("message"))
    def preview(self, message: Any) -> SafeString | str:
        text = message_preview(message.payload_start)
        return note(str(_UNREADABLE)) if text is None else text

    @admin.display(description=_("says"))
    def said(self, message: Message) -> SafeString:
        stored = payload_of(message, "payload") or ""
        whole, _is_cut = read_start(stored, len(stored))
        if whole is None:
            return note(str(_UNREADABLE))
        return text_block("\n\n".join(map(text_of, parts_of(whole))))


def message_preview(start: str) -> str | None:
    """Return the text of a message in one line, or ``None``. ``start`` is the start of its stored text."""
    said = said_at_start(start)
    return None if said is None else one_line(said, PREVIEW_LENGTH)


# --- Items in a session's lanes


def item_preview(start: str) -> str:
    """Return an item's text if it is a message, otherwise its JSON. ``start`` is the start of its text."""
    said = message_preview(start) or ""
    return said if said.strip("…") else one_line(start, PREVIEW_LENGTH)


@admin.register(Item)
class ItemAdmin(SessionChildAdmin):
    list_display = ("lane_name", "item_key", "preview", "of_session", "written_at")
    list_display_links = ("lane_name", "preview")
    list_texts = {"payload_start": payload_start()}
    ordering = ("-pk",)
    order_of_session = ("session_id", "lane", "pk")
    fields = ("of_session", "lane_name", "item_key", "written_at", "document")

    lane_name = column("lane", _("lane"), lambda lane: identifier(lane or NOTHING))
    item_key = column("key", _("key"), lambda key: identifier(key or NOTHING))
    preview = column("payload_start", _("message"), item_preview)
    written_at = column("created_at", _("created"), stamp)
    document = json_column("payload", _("as stored"))
