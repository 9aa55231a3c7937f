"""The pages of long-term memory, in the order of namespaces."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import ReadOnlyAdmin
from helix_store.admin.columns import column, number
from helix_store.admin.elements import NOTHING, badge, json_block, link, narrow, note, under
from helix_store.admin.filters import EntryTenantFilter
from helix_store.admin.times import stamp
from helix_store.contrib.langgraph.models import LangGraphMemory
from helix_store.core import moments
from helix_store.reports.payloads import payload_of

_LARGEST_PREVIEW: Final = 262_144


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
    readonly_fields = fields

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
