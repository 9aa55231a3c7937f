"""The admin of streams: their state, their writer, and the number of stored chunks."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.upkeep import PRUNE_STREAMS
from helix_store.admin.amounts import number
from helix_store.admin.elements import (
    NOTHING,
    badge,
    distance,
    format_time,
    json_block,
    narrow,
    one_line,
    short_id,
    under,
)
from helix_store.admin.lists import OperatedList
from helix_store.admin.names import NamedChoicesFilter
from helix_store.core import moments
from helix_store.models import Stream
from helix_store.reports.payloads import payload_of

__all__ = ["StreamAdmin"]

_NAME_LENGTH: Final = 120


@admin.register(Stream)
class StreamAdmin(OperatedList):
    list_display = ("name", "state", "agent", "writer", "chunks", "updated", "ended")
    list_filter = (("status", NamedChoicesFilter),)
    ordering = ("-pk",)
    fields = (
        "stream_id",
        "tenant",
        "state",
        "agent_name",
        "run_id",
        "writer_id",
        "chunks",
        "last_sequence",
        "floor",
        "created",
        "updated_at_exactly",
        "ended_at_exactly",
        "output_document",
        "error_document",
    )
    readonly_fields = (
        "state",
        "chunks",
        "created",
        "updated_at_exactly",
        "ended_at_exactly",
        "output_document",
        "error_document",
    )
    table_operations = (PRUNE_STREAMS,)

    @admin.display(description=_("stream"))
    def name(self, stream: Stream) -> SafeString:
        return format_html("{}{}", short_id(stream.stream_id), under(stream.tenant) if stream.tenant else "")

    @admin.display(description=_("status"))
    def state(self, stream: Stream) -> SafeString:
        return badge(stream.status)

    @admin.display(description=_("agent"))
    def agent(self, stream: Stream) -> SafeString:
        return narrow(one_line(stream.agent_name, _NAME_LENGTH))

    @admin.display(description=_("writer"), empty_value=NOTHING)
    def writer(self, stream: Stream) -> str | None:
        if stream.status != "active" or stream.lease_expires_at is None:
            return None
        return gettext("alive") if stream.lease_expires_at > moments.now() else gettext("lost")

    @admin.display(description=_("chunks"))
    def chunks(self, stream: Stream) -> SafeString:
        return number(stream.last_sequence - stream.floor)

    @admin.display(description=_("updated"))
    def updated(self, stream: Stream) -> SafeString:
        return distance(stream.updated_at)

    @admin.display(description=_("ended"), empty_value=NOTHING)
    def ended(self, stream: Stream) -> SafeString | None:
        return None if stream.ended_at is None else distance(stream.ended_at)

    @admin.display(description=_("created"))
    def created(self, stream: Stream) -> str:
        return format_time(stream.created_at)

    @admin.display(description=_("updated"))
    def updated_at_exactly(self, stream: Stream) -> str:
        return format_time(stream.updated_at)

    @admin.display(description=_("ended"))
    def ended_at_exactly(self, stream: Stream) -> str:
        return NOTHING if stream.ended_at is None else format_time(stream.ended_at)

    @admin.display(description=_("output"))
    def output_document(self, stream: Any) -> SafeString | str:
        return json_block(payload_of(stream, "output"))

    @admin.display(description=_("error"))
    def error_document(self, stream: Any) -> SafeString | str:
        return json_block(payload_of(stream, "error"))
