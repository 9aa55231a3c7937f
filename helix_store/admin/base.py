"""The base of all pages: read-only, without payloads in lists, and without counts of whole tables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast
from urllib.parse import urlencode

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.safestring import SafeString

from helix_store.admin.elements import identifier, link
from helix_store.admin.payloads import without_payloads
from helix_store.models import Session

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    AnyPaginator = Paginator[Any]
else:
    ModelAdmin = admin.ModelAdmin
    AnyPaginator = Paginator

__all__ = ["OF_SESSION", "BoundedPaginator", "ReadOnlyAdmin", "SessionChildAdmin"]

OF_SESSION: Final = "session__id__exact"
"""The filter of a list for the rows of one session."""

_KEY: Final = re.compile("[0-9]{1,18}")


class BoundedPaginator(AnyPaginator):
    """Counts and shows the first rows only: to count a large table takes longer than to show a page."""

    max_rows = 10_000

    @cached_property
    def _seen_rows(self) -> int:
        rows = cast("QuerySet[Any]", self.object_list).order_by()
        return rows[: self.max_rows + 1].count()

    @cached_property
    def count(self) -> int:
        return min(self._seen_rows, self.max_rows)

    @property
    def has_unseen_rows(self) -> bool:
        return self._seen_rows > self.max_rows


class ReadOnlyAdmin(ModelAdmin):
    """A page without add, change and delete, whatever permissions the user has.

    Payloads may be megabytes: only the pages that show them read them. Columns are not sortable, because most
    have no index.
    """

    actions = None
    list_per_page = 50
    paginator = BoundedPaginator
    show_facets = admin.ShowFacets.NEVER
    show_full_result_count = False
    sortable_by = ()

    class Media:
        css: ClassVar[dict[str, list[str]]] = {"all": ["helix_store/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return without_payloads(super().get_queryset(request))

    def page_url(self, model: type[Model], key: Any) -> str:
        """The page of one row."""
        return self._url(model, "change", key)

    def list_url(self, model: type[Model], **filters: Any) -> str:
        """The list of a model, filtered by exact values."""
        return f"{self._url(model, 'changelist')}?{urlencode(filters)}"

    def _url(self, model: type[Model], view: str, *arguments: Any) -> str:
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_{view}"
        return reverse(name, args=arguments, current_app=self.admin_site.name)


class SessionChildAdmin(ReadOnlyAdmin):
    """A page of rows that belong to a session; rows of deleted sessions are not shown.

    A list of one session's rows shows the session once, above the list.
    """

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return without_payloads(super().get_queryset(request).select_related("session"), session=True)

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        columns = super().get_list_display(request)
        return [column for column in columns if column != "of_session" or OF_SESSION not in request.GET]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        above = {"of_session": self._named_session(request.GET.get(OF_SESSION, ""))}
        return super().changelist_view(request, above | (extra_context or {}))

    def _named_session(self, key: str) -> SafeString | None:
        # The list reports an invalid key. Python refuses to parse numbers of thousands of digits.
        session = Session.objects.filter(pk=key).only("session_id").first() if _KEY.fullmatch(key) else None
        return None if session is None else self.session_link(session)

    @admin.display(description="session")
    def of_session(self, row: Any) -> SafeString:
        return self.session_link(row.session)

    def session_link(self, session: Session) -> SafeString:
        return link(self.page_url(Session, session.pk), identifier(session.session_id))
