"""The admin of streams: their state, their writer, and the number of stored chunks."""

from __future__ import annotations

from typing import Final

from django.contrib import admin
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.upkeep import PRUNE_STREAMS
from helix_store.admin.columns import column, json_column, number
from helix_store.admin.elements import NOTHING, badge, narrow, one_line, short_id, stacked
from helix_store.admin.filters import NamedChoicesFilter
from helix_store.admin.operating import OperatedAdmin
from helix_store.admin.times import distance, format_time
from helix_store.core import moments
from helix_store.models import Stream

_NAME_LENGTH: Final = 120


@admin.register(Stream)
class StreamAdmin(OperatedAdmin):
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
    table_operations = (PRUNE_STREAMS,)

    state = column("status", _("status"), badge)
    agent = column("agent_name", _("agent"), lambda name: narrow(one_line(name, _NAME_LENGTH)))
    created = column("created_at", _("created"), format_time)
    updated = column("updated_at", _("updated"), distance)
    updated_at_exactly = column("updated_at", _("updated"), format_time)
    ended = column("ended_at", _("ended"), distance)
    ended_at_exactly = column("ended_at", _("ended"), format_time)
    output_document = json_column("output", _("output"))
    error_document = json_column("error", _("error"))

    @admin.display(description=_("stream"))
    def name(self, stream: Stream) -> SafeString:
        return stacked(short_id(stream.stream_id), stream.tenant)

    @admin.display(description=_("writer"), empty_value=NOTHING)
    def writer(self, stream: Stream) -> str | None:
        if stream.status != "active" or stream.lease_expires_at is None:
            return None
        return gettext("alive") if stream.lease_expires_at > moments.now() else gettext("lost")

    @admin.display(description=_("chunks"))
    def chunks(self, stream: Stream) -> SafeString:
        return number(stream.last_sequence - stream.floor)
