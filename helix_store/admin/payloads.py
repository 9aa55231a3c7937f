"""Reading columns of free text and JSON, so that one damaged text does not break a whole page.

SQLite stores any bytes as text, and a statement that fetches text which is not UTF-8 fails. So pages fetch a
row without these columns, and the columns as bytes. They may also be long.
"""

from __future__ import annotations

from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, JSONField, Model, QuerySet, TextField
from django.db.models.functions import Substr

from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.models.fields import PayloadField
from helix_store.sessions.deltas import apply_deltas

__all__ = [
    "FreeText",
    "PayloadText",
    "payload_of",
    "start_of",
    "whole_state",
    "with_payloads",
    "without_payloads",
]

_UNREADABLE: Final = ""
"""Replaces text that is not UTF-8. No payload is empty, so this cannot be read either."""

_SUFFIX: Final = "_text"


class _TextOrUnreadable(TextField):  # type: ignore[type-arg]  # not a generic class at run time
    def from_db_value(self, value: Any, expression: Any, connection: BaseDatabaseWrapper) -> str | None:
        try:
            text: str | None = value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            return _UNREADABLE
        return text


class _TextWithReplacements(TextField):  # type: ignore[type-arg]  # not a generic class at run time
    def from_db_value(self, value: Any, expression: Any, connection: BaseDatabaseWrapper) -> str | None:
        text: str | None = value.decode(errors="replace") if isinstance(value, bytes) else value
        return text


class PayloadText(Func):
    """A payload, or a part of one, that can be fetched even if it is damaged."""

    template = "%(expressions)s"
    arity = 1
    output_field: TextField[Any, Any] = _TextOrUnreadable()

    def as_sqlite(self, compiler: Any, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return super().as_sql(compiler, connection, template="CAST(%(expressions)s AS BLOB)", **context)


class FreeText(PayloadText):
    """Text that is no JSON, or a part of it, with replacements for bytes that are no UTF-8."""

    output_field = _TextWithReplacements()


def start_of(column: str, limit: int) -> FreeText:
    """The start of a text: the characters that `one_line` reads for a line of ``limit``, and one more."""
    return FreeText(Substr(column, 1, 4 * limit + 1))


def without_payloads(queryset: QuerySet[Any], *, session: bool = False) -> QuerySet[Any]:
    """Rows without their free text and JSON; with ``session`` also without those of the joined session."""
    joined = [f"session__{column}" for column in _columns(Session)] if session else []
    return queryset.defer(*_columns(queryset.model), *joined)


def with_payloads(queryset: QuerySet[Any]) -> QuerySet[Any]:
    """Rows with their free text and JSON, so that `payload_of` needs no query."""
    rows: QuerySet[Any] = without_payloads(queryset).annotate(**_texts(queryset.model))
    return rows


def payload_of(row: Any, column: str) -> str | None:
    """The text of such a column. The first call for a row reads all of them by one query."""
    if column + _SUFFIX not in row.__dict__:
        same_row = type(row)._base_manager.using(row._state.db).filter(pk=row.pk)
        row.__dict__.update(same_row.values(**_texts(type(row))).get())
    text: str | None = row.__dict__[column + _SUFFIX]
    return text


def whole_state(payload: str, base: str | None) -> str:
    """The state of a delta and its base, or the stored delta if it cannot be applied."""
    try:
        return apply_deltas(base or _UNREADABLE, [payload])
    except IntegrityFault:
        return payload


def _texts(model: type[Model]) -> dict[str, PayloadText]:
    return {
        field.name + _SUFFIX: (PayloadText if isinstance(field, PayloadField | JSONField) else FreeText)(
            field.name
        )
        for field in _fields(model)
    }


def _columns(model: type[Model]) -> list[str]:
    return [field.name for field in _fields(model)]


def _fields(model: type[Model]) -> list[Any]:
    return [field for field in model._meta.concrete_fields if isinstance(field, TextField | JSONField)]
