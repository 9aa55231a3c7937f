"""The lookups that the URL of a list may contain.

Django answers every lookup on a model's own columns. A lookup on a hidden column would reveal whether its
text contains a letter, and a regular expression could keep the database busy for minutes. A list therefore
answers only the lookups of its filters and links, each with one value that the column can hold.
"""

from __future__ import annotations

from typing import Any, Final

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db.models import Field, Model, QuerySet
from django.db.models.constants import LOOKUP_SEP
from django.http import HttpRequest

from helix_store.admin.tenants import keys_in_order
from helix_store.core import validation
from helix_store.core.limits import MAX_TITLE_BYTES
from helix_store.exceptions import InvalidPayload, LimitExceeded

EXACT: Final = f"{LOOKUP_SEP}exact"

_TIMES: Final = frozenset({"updated_at", "created_at", "timestamp"})
_BY_OTHER_INDEXES: Final = frozenset({"q", "expiry", "tag", "waiting"})
"""Parameters whose rows are found by keys, or by an index that does not begin with the tenant."""

_LONGEST_SEARCH: Final = 1_000
"""The maximum length of a search, in characters. SQLite refuses a pattern of more than 50,000 bytes."""


class OrderedChangeList(ChangeList):
    """A list that ignores any requested order, because only the order of its admin has an index.

    That index begins with the tenant. The rows of several tenants are merged by the other columns.
    """

    model_admin: Any

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        self.params.pop(ORDER_VAR, None)
        return list(super().get_ordering(request, queryset))

    def get_queryset(self, request: HttpRequest, *arguments: Any, **more: Any) -> QuerySet[Any]:
        self.root_queryset = self.root_queryset.annotate(**self.model_admin.list_texts)
        return super().get_queryset(request, *arguments, **more)

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        rows = list(self._rows_of_page(request))
        self.result_list = rows
        self.model_admin.complete_rows(request, rows)

    def _rows_of_page(self, request: HttpRequest) -> Any:
        tenants: list[str] | None = getattr(request, "tenants_to_merge", None)
        # Django lists the columns twice.
        tenant, *order = dict.fromkeys(str(name) for name in self.queryset.query.order_by)
        is_by_time = tenant.endswith("tenant") and order[0].removeprefix("-") in _TIMES
        if tenants is None or not is_by_time:
            return self.result_list
        # Other indexes find only a few rows, so the database can sort them.
        shows_all = self.show_all and self.can_show_all
        start = (self.page_num - 1) * self.list_per_page
        stop = start + self.list_per_page
        if shows_all or not _BY_OTHER_INDEXES.isdisjoint(request.GET):
            rows = self.queryset.order_by(*order)
            return rows if shows_all else rows[start:stop]
        keys = keys_in_order(self.queryset, tenants, order, start=start, stop=min(stop, self.result_count))
        return self.root_queryset.filter(pk__in=keys).order_by(*order)


def fields_of(model: type[Model], lookup: str) -> list[Field[Any, Any]]:
    """Return the relations that a lookup follows, then its column; an unknown name returns an empty list."""
    fields: list[Field[Any, Any]] = []
    for name in lookup.removesuffix(EXACT).split(LOOKUP_SEP):
        try:
            field = model._meta.get_field(name)
        except FieldDoesNotExist:
            return []
        if not isinstance(field, Field):
            return []
        fields.append(field)
        if isinstance(field.related_model, type):
            model = field.related_model
    return fields


def check_value(field: Field[Any, Any], values: list[str]) -> None:
    """Raise `IncorrectLookupParameters` unless there is exactly one value and the column can hold it."""
    try:
        (value,) = values
        validation.text(value, field.name, limit=MAX_TITLE_BYTES)
        field.clean(value, None)
    except (ValueError, InvalidPayload, LimitExceeded, ValidationError):
        raise IncorrectLookupParameters from None


def is_searchable(term: str) -> bool:
    """Return whether a column can hold the search text."""
    try:
        validation.text(term, "q", limit=_LONGEST_SEARCH)
    except (InvalidPayload, LimitExceeded):
        return False
    return True
