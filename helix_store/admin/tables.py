"""Locks and usage entries: plain lists and pages."""

from __future__ import annotations

from django.contrib import admin

from helix_store.admin.base import ReadOnlyAdmin
from helix_store.admin.elements import NOTHING
from helix_store.models import Lock, UsageEntry

__all__ = ["LockAdmin", "UsageEntryAdmin"]


@admin.register(Lock)
class LockAdmin(ReadOnlyAdmin):
    list_display = ("name", "tenant", "owner", "token", "acquired_at", "expires_at")
    ordering = ("tenant", "name")
    fields = ("tenant", "name", "owner", "token", "acquired_at", "expires_at")


@admin.register(UsageEntry)
class UsageEntryAdmin(ReadOnlyAdmin):
    list_display = ("timestamp", "kind", "recorded_for", "spent_on", "total_tokens", "amount", "cost_usd")
    list_filter = ("kind",)
    ordering = ("-tenant", "-timestamp", "-id")
    exclude = ("session",)

    @admin.display(description="spent on")
    def spent_on(self, entry: UsageEntry) -> str:
        named = entry.model or entry.tool_name or entry.agent_type
        return named or " ".join(filter(None, (entry.custom_type, entry.custom_name))) or NOTHING
