"""What the address of a list may ask the database.

Django answers every lookup on a model's own columns. A lookup on a hidden column tells whether its text
contains a letter, and a regular expression may keep the database busy for minutes. So a list answers only the
lookups of its filters and links, each with one value that the column can hold.
"""

from __future__ import annotations

from typing import Any, Final

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.core.exceptions import FieldDoesNotExist, SuspiciousOperation, ValidationError
from django.db.models import Field, Model, QuerySet
from django.db.models.constants import LOOKUP_SEP
from django.http import HttpRequest

from helix_store.core import validation
from helix_store.core.limits import MAX_TITLE_BYTES
from helix_store.exceptions import InvalidPayload, LimitExceeded

__all__ = [
    "EXACT",
    "OrderedChangeList",
    "check_value",
    "fields_of",
    "is_searchable",
    "refuse_surrogates",
]

EXACT: Final = f"{LOOKUP_SEP}exact"

_LONGEST_SEARCH: Final = 1_000
"""Characters. SQLite refuses a pattern of more than 50,000 bytes."""


class OrderedChangeList(ChangeList):
    """A list that ignores a requested order: only the order of its admin has an index."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        self.params.pop(ORDER_VAR, None)
        return list(super().get_ordering(request, queryset))


def fields_of(model: type[Model], lookup: str) -> list[Field[Any, Any]]:
    """The relations that a lookup passes, then the column that it compares; nothing for other names."""
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
    """Raise `IncorrectLookupParameters`, unless there is one value and the column can hold it."""
    try:
        (value,) = values
        validation.text(value, field.name, limit=MAX_TITLE_BYTES)
        field.clean(value, None)
    except (ValueError, InvalidPayload, LimitExceeded, ValidationError):
        raise IncorrectLookupParameters from None


def is_searchable(term: str) -> bool:
    """Whether a column can hold the text that is searched."""
    try:
        validation.text(term, "q", limit=_LONGEST_SEARCH)
    except (InvalidPayload, LimitExceeded):
        return False
    return True


def refuse_surrogates(request: HttpRequest) -> None:
    """Refuse parameters that no page can repeat in its links. The client names their character set."""
    for name, values in request.GET.lists():
        for text in (name, *values):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise SuspiciousOperation("A parameter holds a lone surrogate.") from None
