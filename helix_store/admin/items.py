"""The admin of items in a session's lanes: the list with the start of each item, and the page of one item."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import OF_SESSION, SessionChildAdmin
from helix_store.admin.elements import identifier, json_block, one_line
from helix_store.admin.messages import message_preview
from helix_store.admin.times import stamp
from helix_store.models import Item
from helix_store.reports.payloads import payload_of
from helix_store.reports.previews import payload_start

__all__ = ["ItemAdmin", "item_preview"]

_PREVIEW_LENGTH = 180


def item_preview(start: str) -> str:
    """Return an item's text if it is a message, otherwise its JSON. ``start`` is the start of its text."""
    return message_preview(start) or one_line(start, _PREVIEW_LENGTH)


@admin.register(Item)
class ItemAdmin(SessionChildAdmin):
    list_display = ("lane_name", "item_key", "preview", "of_session", "written_at")
    list_display_links = ("lane_name", "preview")
    ordering = ("-pk",)
    fields = ("of_session", "lane_name", "item_key", "written_at", "document")
    readonly_fields = ("of_session", "lane_name", "item_key", "written_at", "document")

    def get_ordering(self, request: HttpRequest) -> tuple[Any, ...]:
        """Show the newest items first, but order the items of one session by lane and insertion."""
        return ("session_id", "lane", "pk") if OF_SESSION in request.GET else self.ordering

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        items: QuerySet[Any] = super().get_queryset(request).annotate(payload_start=payload_start())
        return items

    @admin.display(description=_("lane"))
    def lane_name(self, item: Item) -> SafeString:
        return identifier(item.lane or "-")

    @admin.display(description=_("key"))
    def item_key(self, item: Item) -> SafeString:
        return identifier(item.key or "-")

    @admin.display(description=_("created"))
    def written_at(self, item: Item) -> SafeString:
        return stamp(item.created_at)

    @admin.display(description=_("message"))
    def preview(self, item: Any) -> SafeString | str:
        return item_preview(item.payload_start)

    @admin.display(description=_("as stored"))
    def document(self, item: Item) -> SafeString | str:
        return json_block(payload_of(item, "payload"))
