"""The admin of items in a session's lanes: the list with the start of each item, and the page of one item."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.columns import column, json_column
from helix_store.admin.elements import NOTHING, identifier, one_line
from helix_store.admin.messages import message_preview
from helix_store.admin.times import stamp
from helix_store.models import Item
from helix_store.reports.previews import payload_start

_PREVIEW_LENGTH = 180


def item_preview(start: str) -> str:
    """Return an item's text if it is a message, otherwise its JSON. ``start`` is the start of its text."""
    return message_preview(start) or one_line(start, _PREVIEW_LENGTH)


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
    written_at = column("created_at", _("created"), stamp)
    document = json_column("payload", _("as stored"))

    @admin.display(description=_("message"))
    def preview(self, item: Any) -> SafeString | str:
        return item_preview(item.payload_start)
