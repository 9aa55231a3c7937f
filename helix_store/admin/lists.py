"""Lists with buttons for the operations on their whole table."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse

from helix_store.admin.base import ReadOnlyAdmin
from helix_store.admin.operating import OperatedAdmin

__all__ = ["OperatedList"]


class OperatedList(OperatedAdmin, ReadOnlyAdmin):
    """A list above which the user sees what the user may do to the table."""

    change_list_template = "admin/helix_store/operated_list.html"

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        buttons = self.buttons(request, None, self.table_operations)
        return super().changelist_view(request, {**(extra_context or {}), "table_buttons": buttons})
