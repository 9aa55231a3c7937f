"""Lists with buttons for the operations on the whole table, and with links to related lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path

from helix_store.admin.operating import OperatedAdmin

__all__ = ["OperatedList"]


class OperatedList(OperatedAdmin):
    """A list that shows, above its rows, the operations that the user may run on the table."""

    heading: ClassVar[Any] = ""
    """The title of a side list."""

    side_lists: ClassVar[Mapping[str, type[OperatedList]]] = {}
    """Lists of some of the table's rows, with their own columns, by the last part of their address."""

    change_list_template = "admin/helix_store/operated_list.html"

    def get_urls(self) -> list[URLPattern]:
        pages = {name: page(self.model, self.admin_site) for name, page in self.side_lists.items()}
        return [
            *(
                path(
                    f"{name}/",
                    self.admin_site.admin_view(page.changelist_view),
                    name=f"{self.opts.app_label}_{self.opts.model_name}_{name}",
                )
                for name, page in pages.items()
            ),
            *super().get_urls(),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        context = {
            # The operations use the stores of the project, regardless of the database that this site shows.
            "table_buttons": []
            if hasattr(self.admin_site, "database")
            else self.buttons(request, None, self.table_operations),
            "side_links": [
                (page.heading, self.view_url(self.model, name)) for name, page in self.side_lists.items()
            ],
            **(extra_context or {}),
        }
        return super().changelist_view(request, context)
