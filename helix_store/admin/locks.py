"""Locks: who holds what, and until when."""

from __future__ import annotations

from django.contrib import admin

from helix_store.admin.base import ReadOnlyAdmin
from helix_store.models import Lock

__all__ = ["LockAdmin"]


@admin.register(Lock)
class LockAdmin(ReadOnlyAdmin):
    list_display = ("name", "tenant", "owner", "token", "acquired_at", "expires_at")
    ordering = ("tenant", "name")
    fields = ("tenant", "name", "owner", "token", "acquired_at", "expires_at")
