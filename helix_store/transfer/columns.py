"""Conversion of columns to JSON values and back, which gives the same row the same text in any database."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any, Final

from django.db import models
from django.db.backends.base.operations import BaseDatabaseOperations

from helix_store.catalogue import RECORD_KEY, Table
from helix_store.core import validation
from helix_store.core.limits import MAX_LANE_BYTES, Limits
from helix_store.core.payloads import size_of
from helix_store.core.usage import MAX_COST_UNITS, cost_units
from helix_store.exceptions import IntegrityFault, InvalidPayload, LimitExceeded
from helix_store.models import Item, Message, Post, Session, StagedChange, StreamChunk
from helix_store.models.fields import CostField, IdentifierField, MomentField, PayloadField

_Reader = Callable[[Any], Any]
_Writer = Callable[[Any], Any] | None
_COST: Final = re.compile(r"-?\d{1,7}\.\d{12}")
_NOT_STORABLE: Final = re.compile("[\x00\ud800-\udfff]")

_Rule = Callable[[Any, str, Limits], object]
"""Raises `InvalidPayload` or `LimitExceeded` for an invalid value of this column. It is not ``None``."""

_TEXTS: Final[Mapping[str, Callable[[Any, str], object]]] = {
    "title": validation.title,
    "directory": validation.directory,
    "failure_reason": validation.reason,
    "reason": validation.reason,
    "completion_reason": validation.reason,
    "checkpoint_id": validation.checkpoint_id,
    "parent_checkpoint_id": validation.checkpoint_id,
    "tags": validation.tags,
    "metadata": validation.metadata,
}
_LIMITS: Final[Mapping[type[models.Model], str]] = {
    Message: "max_message_bytes",
    Post: "max_message_bytes",
    StagedChange: "max_staged_bytes",
    StreamChunk: "max_chunk_bytes",
}

Reference = tuple[str, str, int]
"""A checkpoint within its session: kind, namespace, version.

In an export, it replaces the database's key.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a record. ``write`` is ``None`` if the value is already a JSON value."""

    name: str
    is_nullable: bool
    write: _Writer
    read: _Reader
    rule: _Rule | None

    @classmethod
    def of(cls, field: models.Field[Any, Any]) -> Column:
        write, read = _codec(field)
        return cls(field.name, field.null, write, read, _rule_of(field))


class RecordFormat:
    """The rows of a table as records. A reference to a checkpoint is a `Reference` in a record."""

    def __init__(self, table: Table) -> None:
        left_out = {*table.implied, *table.not_exported, table.reference}
        self.record = table.record
        self.model = table.model
        self.parent = table.parent
        self.reference = table.reference
        self._check = table.check_import
        self.columns = tuple(
            Column.of(field) for field in table.model._meta.concrete_fields if field.name not in left_out
        )
        self.names = frozenset(column.name for column in self.columns)
        self.selected = tuple(column.name for column in self.columns)
        if self.reference is not None:
            parts = ("kind", "namespace", "version", "session_id")
            self.selected += (f"{self.reference}_id", *(f"{self.reference}__{part}" for part in parts))

    def record_of(self, values: tuple[Any, ...], session_key: int | None) -> dict[str, Any]:
        """Return the record of a row of ``selected``, without null values. Raises `IntegrityFault`."""
        record: dict[str, Any] = {RECORD_KEY: self.record}
        for column, value in zip(self.columns, values, strict=False):
            if value is not None:
                record[column.name] = value if column.write is None else column.write(value)
            elif not column.is_nullable:
                raise IntegrityFault(f"The {column.name} of a row of {self.model.__name__} cannot be read.")
        if self.reference is not None:
            key, *reference, owner = values[len(self.columns) :]
            if key is not None:
                if owner is None or owner != session_key:
                    name = f"{self.reference} of a row of {self.model.__name__}"
                    raise IntegrityFault(f"The {name} is not a checkpoint of its session.")
                record[self.reference] = reference
        return record

    def record_from(self, row: models.Model, reference: Reference | None = None) -> dict[str, Any]:
        """Return the record of a row that is not stored yet. Raises `IntegrityFault`."""
        values = tuple(getattr(row, column.name) for column in self.columns)
        if self.reference is not None:
            values += (None,) * 5 if reference is None else (0, *reference, 0)
        return self.record_of(values, 0)

    def values_of(self, record: Mapping[str, Any], limits: Limits | None) -> dict[str, Any]:
        """Return the checked columns of a record, without the reference. Raises `InvalidPayload`.

        With ``limits``, it accepts only values that the stores accept, and can also raise `LimitExceeded`.
        """
        values = {}
        for column in self.columns:
            value = record.get(column.name)
            if value is not None:
                try:
                    values[column.name] = column.read(value)
                except (TypeError, ValueError, OverflowError) as exc:
                    raise InvalidPayload(path=f"/{column.name}", reason=str(exc)) from None
                if limits is not None and column.rule is not None:
                    column.rule(values[column.name], f"/{column.name}", limits)
            elif column.is_nullable:
                values[column.name] = None
            else:
                raise InvalidPayload(path=f"/{column.name}", reason=f"a {self.record} needs this column")
        unknown = record.keys() - self.names - {RECORD_KEY, self.reference}
        if unknown:
            name = min(unknown)
            path = f"/{name}" if name.isidentifier() else ""
            raise InvalidPayload(path=path, reason=f"a {self.record} has no such column")
        if self._check is not None:
            self._check(values)
        return values

    def reference_of(self, record: Mapping[str, Any]) -> Reference | None:
        """Return the checkpoint that a record refers to. Raises `InvalidPayload`."""
        match record.get(self.reference or ""):
            case None:
                return None
            case [str() as kind, str() as namespace, int() as version]:
                return kind, namespace, version
        raise InvalidPayload(path=f"/{self.reference}", reason="expected a kind, a namespace and a version")


# --- Values ----------------------------------------------------------------------------------------


def _codec(field: models.Field[Any, Any]) -> tuple[_Writer, _Reader]:
    """Return the functions that write and read a field's values. Add every new field class here."""
    match field:
        case models.JSONField():
            return _sorted, _document
        case CostField():
            return "{:f}".format, _cost
        case models.FloatField():
            return float, _number
        case models.BooleanField():
            return None, partial(_exactly, bool)
        case models.IntegerField():
            bounds = BaseDatabaseOperations.integer_field_ranges[field.get_internal_type()]
            return None, partial(_whole_number, *bounds)
        case models.BinaryField():
            return _base64_text, _bytes
        case MomentField():
            return _moment_text, _moment
        case models.CharField() | models.TextField():
            return None, partial(_text, field.max_length)
    raise TypeError(f"The {type(field).__name__} {field.name} has no known form in an export.")


def _sorted(value: Any) -> Any:
    """Return a document with sorted keys: PostgreSQL does not keep their order."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _document(value: Any) -> Any:
    if not isinstance(value, dict | list):
        raise TypeError("expected an object or an array")
    return value


def _cost(value: Any) -> Decimal:
    if not _COST.fullmatch(_exactly(str, value)) or abs(cost_units(Decimal(value))) > MAX_COST_UNITS:
        raise ValueError("expected an amount of dollars with 12 decimal places")
    return Decimal(value)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError("expected a number")
    return float(value)


def _whole_number(least: int, most: int, value: Any) -> int:
    if not least <= _exactly(int, value) <= most:
        raise ValueError(f"expected a whole number from {least} to {most}")
    return int(value)


def _base64_text(value: Any) -> str:
    # PostgreSQL drivers may return a memoryview.
    return base64.b64encode(value).decode("ascii")


def _bytes(value: Any) -> bytes:
    content = base64.b64decode(_exactly(str, value), validate=True)
    if _base64_text(content) != value:
        raise ValueError("expected the canonical base64 form (RFC 4648) of these bytes")
    return content


def _moment_text(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _moment(value: Any) -> datetime:
    moment = datetime.fromisoformat(_exactly(str, value))
    if moment.tzinfo is None or _moment_text(moment) != value:
        raise ValueError("expected a time like 2026-01-31T12:00:00.000000Z")
    return moment.astimezone(UTC)


def _text(max_length: int | None, value: Any) -> str:
    if _NOT_STORABLE.search(_exactly(str, value)):
        raise ValueError("a database cannot store NUL and lone surrogates in text")
    if max_length is not None and len(value) > max_length:
        raise ValueError(f"expected at most {max_length} characters")
    return str(value)


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected a value of type {kind.__name__}")
    return value


# --- Values that an import accepts, according to the rules of the stores' calls -----------------------


def _rule_of(field: models.Field[Any, Any]) -> _Rule | None:
    """Return the rule for a column of this app, or ``None`` if every value of its type is accepted."""
    model = field.model
    if model._meta.app_label != Session._meta.app_label:
        return None
    if isinstance(field, PayloadField):
        return partial(_within_limit, _LIMITS.get(model, "max_state_bytes"))
    if isinstance(field, IdentifierField):
        # Retention clears the session id of usage when it removes the names.
        may_be_empty = bool(field.blank) or field.name == "recorded_for"
        return partial(_identified, model is Item, may_be_empty)
    check = _TEXTS.get(field.name)
    return None if check is None else lambda value, name, limits: check(value, name)


def _within_limit(limit_name: str, value: str, name: str, limits: Limits) -> None:
    limit = getattr(limits, limit_name)
    if len(value) > limit or size_of(value) > limit:
        raise LimitExceeded(name=limit_name, limit=limit, actual=size_of(value))


def _identified(is_of_item: bool, may_be_empty: bool, value: str, name: str, limits: Limits) -> None:
    if not value and may_be_empty:
        return
    if is_of_item:
        validation.text(value, name, limit=MAX_LANE_BYTES)
    else:
        validation.identifier(value, name)
