"""Read-only pages for threads and for long-term memory. Lists read neither bodies nor values."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Length
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import ReadOnlyAdmin, SessionChildAdmin
from helix_store.admin.elements import (
    NOTHING,
    badge,
    column,
    identifier,
    json_block,
    link,
    narrow,
    note,
    number,
    short_id,
    stamp,
    text_block,
    under,
)
from helix_store.admin.filters import EntryTenantFilter
from helix_store.contrib.langgraph.catalogue import PLAIN_TYPES
from helix_store.contrib.langgraph.models import (
    LangGraphCheckpoint,
    LangGraphMemory,
    LangGraphValue,
    LangGraphWrite,
)
from helix_store.core import moments
from helix_store.reports.payloads import payload_of

_LARGEST_PREVIEW: Final = 262_144
_LONGEST_PREVIEW: Final = 20_000
_ENCODER: Final = json.JSONEncoder(indent=2, ensure_ascii=False, default=repr)


class _StoredAdmin(SessionChildAdmin):
    """A page of rows with one column of bytes, shown as the plain data that the strict serializer reads."""

    stored: ClassVar[str]
    ordering = ("-pk",)

    size = column("stored_bytes", _("bytes"), number)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: Any = super().get_queryset(request).defer(self.stored)
        # PostgreSQL computes the number of bytes without reading the value.
        measured: QuerySet[Any] = rows.annotate(stored_bytes=Length(self.stored))
        return measured

    @admin.display(description=_("content"))
    def content(self, row: Any) -> SafeString:
        if row.stored_bytes > _LARGEST_PREVIEW:
            return note(str(_("Too long to be shown.")))
        shown = _shown(row.type, bytes(getattr(row, self.stored)))
        return note(str(_("Only the application can read this."))) if shown is None else text_block(shown)


def _shown(kind: str, blob: bytes) -> str | None:
    """Return a stored value as text, or ``None`` for encrypted, pickled or damaged bytes."""
    if kind not in PLAIN_TYPES:
        return None
    try:
        from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

        value = JsonPlusSerializer(allowed_msgpack_modules=None).loads_typed((kind, blob))
        text = _written(value)
    except Exception:  # noqa: BLE001  what damaged bytes raise depends on where they are damaged
        return None
    return text if len(text) <= _LONGEST_PREVIEW else f"{text[:_LONGEST_PREVIEW]}…"


def _written(value: Any) -> str:
    """Return the start of a value as indented JSON; what JSON cannot represent is written as in Python.

    The rest is not written: the lines of a deep value could be hundreds of times as long as what is stored.
    """
    pieces, length = [], 0
    try:
        for piece in _ENCODER.iterencode(value):
            pieces.append(piece)
            length += len(piece)
            if length > _LONGEST_PREVIEW:
                break
        return "".join(pieces)
    except TypeError:
        # This is a key that is not a string.
        return repr(value)


@admin.register(LangGraphCheckpoint)
class CheckpointAdmin(_StoredAdmin):
    stored = "body"
    list_display = ("shown_id", "namespace", "source", "step", "size", "of_session", "written_at")
    fields = (
        "of_session",
        "checkpoint_id",
        "namespace",
        "parent_id",
        "run_id",
        "source",
        "step",
        "written_at",
        "type",
        "size",
        "content",
    )

    shown_id = column("checkpoint_id", _("checkpoint id"), short_id)
    written_at = column("created_at", _("created"), stamp)


@admin.register(LangGraphValue)
class ValueAdmin(_StoredAdmin):
    stored = "blob"
    list_display = ("channel", "number", "namespace", "type", "size", "of_session")
    fields = ("of_session", "channel", "whole_version", "namespace", "type", "size", "content")

    number = column("short_version", _("version"), short_id)
    whole_version = column("version", _("version"), identifier)


@admin.register(LangGraphWrite)
class WriteAdmin(_StoredAdmin):
    stored = "blob"
    list_display = ("channel", "shown_id", "shown_task", "position", "type", "size", "of_session")
    fields = (
        "of_session",
        "channel",
        "checkpoint_id",
        "namespace",
        "task_id",
        "task_path",
        "position",
        "type",
        "size",
        "content",
    )

    shown_id = column("checkpoint_id", _("checkpoint id"), short_id)
    shown_task = column("task_id", "task id", short_id)


def _expiry(at: datetime) -> SafeString:
    return format_html("{} {}", stamp(at), badge("expired") if at <= moments.now() else "")


@admin.register(LangGraphMemory)
class MemoryAdmin(ReadOnlyAdmin):
    change_list_template = "admin/helix_store/change_list.html"
    list_display = ("title", "within", "size", "ends", "changed")
    list_filter = (EntryTenantFilter,)
    link_lookups = ("namespace__exact",)
    ordering = ("tenant", "namespace", "key")
    fields = ("tenant", "within", "whole_key", "size", "ends", "created", "changed", "content")

    whole_key = column("key", _("key"), lambda key: narrow(key or NOTHING))
    size = column("size_bytes", _("bytes"), number)
    created = column("created_at", _("created"), stamp)
    changed = column("updated_at", _("updated"), stamp)
    ends = column("expires_at", _("expiry"), _expiry)

    @admin.display(description=_("key"))
    def title(self, memory: LangGraphMemory) -> SafeString:
        return format_html(
            "{}{}", narrow(memory.key or NOTHING), under(memory.tenant) if memory.tenant else ""
        )

    @admin.display(description=_("namespace"))
    def within(self, memory: LangGraphMemory) -> SafeString:
        address = self.list_url(LangGraphMemory, of_tenant=memory.tenant, namespace__exact=memory.namespace)
        return link(address, narrow(memory.namespace.removesuffix(".")))

    @admin.display(description=_("content"))
    def content(self, memory: LangGraphMemory) -> SafeString | str:
        if memory.size_bytes > _LARGEST_PREVIEW:
            return note(str(_("Too long to be shown.")))
        return json_block(payload_of(memory, "value"))
