"""The pages of long-term memory, in the order of namespaces."""

from __future__ import annotations

from typing import Final

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.amounts import number
from helix_store.admin.base import ReadOnlyAdmin
from helix_store.admin.elements import NOTHING, badge, json_block, link, narrow, note, under
from helix_store.admin.filters import EntryTenantFilter
from helix_store.admin.times import stamp
from helix_store.contrib.langgraph.models import LangGraphMemory
from helix_store.core import moments
from helix_store.reports.payloads import payload_of

__all__ = ["MemoryAdmin"]

_LARGEST_PREVIEW: Final = 262_144


@admin.register(LangGraphMemory)
class MemoryAdmin(ReadOnlyAdmin):
    change_list_template = "admin/helix_store/change_list.html"
    list_display = ("title", "within", "size", "ends", "changed")
    list_filter = (EntryTenantFilter,)
    link_lookups = ("namespace__exact",)
    ordering = ("tenant", "namespace", "key")
    fields = ("tenant", "within", "whole_key", "size", "ends", "created", "changed", "content")
    readonly_fields = fields

    @admin.display(description=_("key"))
    def title(self, memory: LangGraphMemory) -> SafeString:
        return format_html(
            "{}{}", narrow(memory.key or NOTHING), under(memory.tenant) if memory.tenant else ""
        )

    @admin.display(description=_("key"))
    def whole_key(self, memory: LangGraphMemory) -> SafeString:
        return narrow(memory.key or NOTHING)

    @admin.display(description=_("namespace"))
    def within(self, memory: LangGraphMemory) -> SafeString:
        address = self.list_url(LangGraphMemory, of_tenant=memory.tenant, namespace__exact=memory.namespace)
        return link(address, narrow(memory.namespace.removesuffix(".")))

    @admin.display(description=_("bytes"))
    def size(self, memory: LangGraphMemory) -> str:
        return number(memory.size_bytes)

    @admin.display(description=_("expiry"), empty_value=NOTHING)
    def ends(self, memory: LangGraphMemory) -> SafeString | None:
        if memory.expires_at is None:
            return None
        state = badge("expired") if memory.expires_at <= moments.now() else ""
        return format_html("{} {}", stamp(memory.expires_at), state)

    @admin.display(description=_("created"))
    def created(self, memory: LangGraphMemory) -> SafeString:
        return stamp(memory.created_at)

    @admin.display(description=_("updated"))
    def changed(self, memory: LangGraphMemory) -> SafeString:
        return stamp(memory.updated_at)

    @admin.display(description=_("content"))
    def content(self, memory: LangGraphMemory) -> SafeString | str:
        if memory.size_bytes > _LARGEST_PREVIEW:
            return note(str(_("Too long to be shown.")))
        return json_block(payload_of(memory, "value"))
