"""Reading payload columns, so that one damaged text does not break a whole page.

SQLite stores any bytes as text, and a statement that fetches text which is not UTF-8 fails. So pages fetch a
row without its payloads, and the payloads as bytes.
"""

from __future__ import annotations

from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, Model, QuerySet, TextField

from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.models.fields import PayloadField
from helix_store.sessions.deltas import apply_deltas

__all__ = ["PayloadText", "payload_of", "whole_state", "with_payloads", "without_payloads"]

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


class PayloadText(Func):
    """A payload, or a part of one, that can be fetched even if it is damaged."""

    template = "%(expressions)s"
    arity = 1
    output_field = _TextOrUnreadable()

    def as_sqlite(self, compiler: Any, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return super().as_sql(compiler, connection, template="CAST(%(expressions)s AS BLOB)", **context)


def without_payloads(queryset: QuerySet[Any], *, session: bool = False) -> QuerySet[Any]:
    """Rows without their payloads; with ``session`` also without those of the joined session."""
    joined = [f"session__{column}" for column in _columns(Session)] if session else []
    return queryset.defer(*_columns(queryset.model), *joined)


def with_payloads(queryset: QuerySet[Any]) -> QuerySet[Any]:
    """Rows with their payloads, so that `payload_of` needs no query."""
    rows: QuerySet[Any] = without_payloads(queryset).annotate(**_texts(queryset.model))
    return rows


def payload_of(row: Any, column: str) -> str | None:
    """The text of a payload column. The first call for a row reads all of its payloads by one query."""
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
    return {column + _SUFFIX: PayloadText(column) for column in _columns(model)}


def _columns(model: type[Model]) -> list[str]:
    return [field.name for field in model._meta.concrete_fields if isinstance(field, PayloadField)]
