"""The records of an export, and the columns that they hold."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache, partial
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Final, Protocol

from django.db import models
from django.db.backends.base.operations import BaseDatabaseOperations

from helix_store.catalogue import RECORD_KEY, Part, Table, declared, tables
from helix_store.core import validation
from helix_store.core.limits import MAX_LANE_BYTES, Limits
from helix_store.core.payloads import Serializable, size_of
from helix_store.core.usage import MAX_COST_UNITS, cost_units
from helix_store.engine.statement import Statement, table, with_clock
from helix_store.exceptions import IntegrityFault, InvalidPayload, LimitExceeded, shown_id
from helix_store.models import Item, Lock, Message, Post, Session, StagedChange, StreamChunk, UsageEntry
from helix_store.models.fields import CostField, IdentifierField, MomentField, PayloadField

Record = dict[str, Any]
"""A JSON object; ``record`` is the name of its kind and comes first."""

_IN_MEMORY: Final = 4_000_000
_in_utf8: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_in_ascii: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Unit:
    """A record and its parts: a session, a stream, the locks of a tenant, the usage of a deleted session.

    Each call of ``records`` reads them from the start; call it before the next unit is read. ``sha256`` is
    the hash of their lines, if it is known.
    """

    kind: str
    tenant: str
    name: str
    records: Callable[[], Iterator[Record]]
    sha256: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return named(self.kind, self.tenant, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Serializable):
    """A failure to export or import something; ``line`` is the line in the file, if there is one."""

    text: str
    line: int | None = None

    def __str__(self) -> str:
        return self.text if self.line is None else f"line {self.line}: {self.text}"


class Source(Protocol):
    """A source of sessions: a database of this app, or a store of another one.

    A unit has the records of `helix_store.transfer.records`, in the same order. The same data must always
    yield the same records, in the same order.
    """

    @property
    def session_count(self) -> int:
        """The number of sessions, for showing progress."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Return a context in which all units show the same moment."""
        ...

    def units(self) -> Iterator[Unit]:
        """Yield all units in order. Read the records of a unit before you request the next one."""
        ...

    def left_out(self, exported: Counts) -> Iterable[Problem]:
        """Yield problems of data outside all units; ``exported`` counts the units that were read."""
        ...


Counts = Counter[str]
"""The number of records by name."""


@dataclass(slots=True)
class ExportSummary:
    """Counts of complete units in ``counts``, by the name of the record, and of other units in ``failed``.

    ``sha256`` is the hash of the file without its last line, or ``None`` if the export was stopped.
    """

    counts: Counts = field(default_factory=Counter)
    failed: int = 0
    sha256: str | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def sessions(self) -> int:
        return self.counts["session"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "records": dict(sorted(self.counts.items())),
            "failed": self.failed,
            "sha256": self.sha256,
            "problems": [str(problem) for problem in self.problems],
        }


@dataclass(slots=True)
class ImportSummary:
    """Units by kind: ``imported``, ``identical`` to stored ones, of another tenant, or with a problem.

    ``records`` counts the rows that were written, by the name of their record.
    """

    imported: Counter[str] = field(default_factory=Counter)
    identical: Counter[str] = field(default_factory=Counter)
    other_tenants: int = 0
    records: Counts = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    is_complete: bool = False

    @property
    def sessions(self) -> int:
        """The number of sessions that are stored as they are in the file."""
        return self.imported["session"] + self.identical["session"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "imported": dict(sorted(self.imported.items())),
            "identical": dict(sorted(self.identical.items())),
            "other_tenants": self.other_tenants,
            "records": dict(sorted(self.records.items())),
            "is_complete": self.is_complete,
            "problems": [str(problem) for problem in self.problems],
        }


def spool() -> IO[bytes]:
    """Return a file for lines that are written once. It is in memory as long as it is small."""
    return SpooledTemporaryFile(_IN_MEMORY)


def lines_from(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a `spool` from the start."""
    file.seek(0)
    # Not ``yield from``, which closes the file if the caller stops before its end.
    for line in file:  # noqa: UP028
        yield line


def line_of(record: Record) -> bytes:
    """Return a record as a line. Raises `TypeError` or `ValueError` if JSON cannot represent it."""
    try:
        return _in_utf8(record).encode() + b"\n"
    except UnicodeEncodeError:
        return _in_ascii(record).encode() + b"\n"


def digest_of(unit: Unit) -> str:
    """Return the SHA-256 of a unit's lines."""
    if unit.sha256 is not None:
        return unit.sha256
    digest = hashlib.sha256()
    for record in unit.records():
        digest.update(line_of(record))
    return digest.hexdigest()


def named(kind: str, tenant: str, name: str) -> str:
    """Return the name of a unit for a message."""
    text = kind.replace("_", " ") + (f" {shown_id(name)}" if name else "")
    return f"{text} of tenant {shown_id(tenant)}" if tenant else text


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

_MAY_BE_EMPTY: Final = frozenset({"workspace_id", "custom_unit", "recorded_for"})
"""Nullable identifiers whose calls accept an empty one, and the session id of usage, which retention clears
when it removes the names.
"""

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
    rules: tuple[_Rule, ...]

    @classmethod
    def of(cls, field: models.Field[Any, Any], table: Table) -> Column:
        write, read = _codec(field)
        return cls(field.name, field.null, write, read, tuple(_rules_of(field, table)))


class RecordFormat:
    """The rows of a table as records. A reference to a checkpoint is a `Reference` in a record."""

    def __init__(self, table: Table) -> None:
        left_out = {*table.implied, *table.not_exported, table.reference}
        self.record = table.record
        self.model = table.model
        self.parent = table.parent
        self.reference = table.reference
        self._check = table.check_import
        self._is_own = table.is_own
        self.columns = tuple(
            Column.of(field, table)
            for field in table.model._meta.concrete_fields
            if field.name not in left_out
        )
        self._written = tuple((column.name, column.write, column.is_nullable) for column in self.columns)
        self.names = frozenset(column.name for column in self.columns)
        self.selected = tuple(column.name for column in self.columns)
        if self.reference is not None:
            parts = ("kind", "namespace", "version", "session_id")
            self.selected += (f"{self.reference}_id", *(f"{self.reference}__{part}" for part in parts))

    def record_of(self, values: tuple[Any, ...], session_key: int | None) -> dict[str, Any]:
        """Return the record of a row of ``selected``, without null values. Raises `IntegrityFault`."""
        record: dict[str, Any] = {RECORD_KEY: self.record}
        for (name, write, is_nullable), value in zip(self._written, values, strict=False):
            if value is not None:
                record[name] = value if write is None else write(value)
            elif not is_nullable:
                raise IntegrityFault(f"The {name} of a row of {self.model.__name__} cannot be read.")
        if self.reference is not None:
            key, *reference, owner = values[len(self.columns) :]
            if key is not None:
                if owner is None or owner != session_key:
                    of_row = f"{self.reference} of a row of {self.model.__name__}"
                    raise IntegrityFault(f"The {of_row} is not a checkpoint of its session.")
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
                if limits is not None:
                    for rule in column.rules:
                        rule(values[column.name], f"/{column.name}", limits)
            elif column.is_nullable:
                values[column.name] = None
            else:
                raise InvalidPayload(path=f"/{column.name}", reason=f"a {self.record} needs this column")
        unknown = record.keys() - self.names - {RECORD_KEY, self.reference}
        if unknown:
            name = min(unknown)
            path = f"/{name}" if name.isidentifier() else ""
            raise InvalidPayload(path=path, reason=f"a {self.record} has no such column")
        # Our own rows in another database of the project may be older than a rule.
        if self._check is not None and not (self._is_own and limits is None):
            try:
                reference = {} if self.reference is None else {self.reference: self.reference_of(record)}
                self._check(values | reference)
            except IntegrityFault as exc:
                raise InvalidPayload(path="", reason=str(exc)) from None
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
    if moment.tzinfo is not UTC:
        moment = moment.astimezone(UTC)
    return moment.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


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


def _rules_of(field: models.Field[Any, Any], table: Table) -> Iterator[_Rule]:
    """Yield the rules for a column: those of this app's columns, and that its table can read the payload."""
    model = field.model
    is_own = model._meta.app_label == Session._meta.app_label
    if isinstance(field, PayloadField):
        if is_own:
            yield partial(_within_limit, _LIMITS.get(model, "max_state_bytes"))
        if table.reads is not None:
            yield partial(_readable, table.reads)
    if not is_own:
        return
    if isinstance(field, IdentifierField):
        # A nullable column has null instead of an empty id.
        may_be_empty = (field.blank and not field.null) or field.name in _MAY_BE_EMPTY
        yield partial(_identified, model is Item, may_be_empty)
    elif field.choices:
        yield partial(_one_of, frozenset(value for value, _ in field.flatchoices))
    elif isinstance(field, models.IntegerField | CostField):
        # Messages, posts, chunks and runs are counted from 1.
        yield partial(_at_least, int(field.name in ("sequence", "turn", "position")))
    elif (check := _TEXTS.get(field.name)) is not None:
        yield partial(_checked, check)


def _checked(check: Callable[[Any, str], object], value: Any, name: str, limits: Limits) -> None:
    check(value, name)


def _readable(reads: Callable[[str], object], value: str, name: str, limits: Limits) -> None:
    try:
        reads(value)
    except IntegrityFault as exc:
        raise InvalidPayload(path=name, reason=str(exc)) from None


def _one_of(known: frozenset[Any], value: Any, name: str, limits: Limits) -> None:
    if value not in known:
        raise InvalidPayload(path=name, reason=f"expected one of {', '.join(sorted(map(str, known)))}")


def _at_least(least: int, value: Any, name: str, limits: Limits) -> None:
    if value < least:
        raise InvalidPayload(path=name, reason=f"expected a number from {least}")


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


@dataclass(frozen=True, slots=True, eq=False)
class ExportedPart:
    """The rows of a table that belong to one parent, in an order in which no two rows are equal."""

    format: RecordFormat
    order: tuple[str, ...]
    only: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """A record and its parts, which are exported and imported together.

    ``identity`` names the two columns that together are unique to a unit.
    """

    identity: tuple[str, str | None]
    records: frozenset[str]


@cache
def format_of(table: Table) -> RecordFormat:
    """Return the record format of a table. Raises `TypeError` if the table cannot be exported."""
    return RecordFormat(table)


def formats() -> dict[str, RecordFormat]:
    """Return the formats of all tables by the name of their records."""
    return {table.record: format_of(table) for table in tables()}


@cache
def parts_of(*of: Table) -> tuple[ExportedPart, ...]:
    """Return the parts of these tables, in the order of an export."""
    return tuple(
        ExportedPart(format_of(table), part.order, part.only)
        for table in of
        for part in table.parts or (Part(table.order),)
    )


def units() -> dict[str, UnitLayout]:
    """Return the units by the name of their first record, in the order of an export.

    Locks come first: a session must not be imported before the token from which its fences start. Rows that
    several sessions share come next.
    """

    def records(*of: Table) -> frozenset[str]:
        return frozenset(table.record for table in of)

    return {
        "locks": UnitLayout(("tenant", None), records(declared(Lock))),
        "tenant_rows": UnitLayout(("tenant", "of"), records(*tables("tenant"))),
        "session": UnitLayout(("tenant", "session_id"), records(*tables("session"))),
        "stream": UnitLayout(("tenant", "stream_id"), records(*tables("stream"))),
        "kept_usage": UnitLayout(("tenant", "session_id"), records(declared(UsageEntry))),
    }


_LOCK: Final = table(Lock)
_RAISE: Final = f"""
    INSERT INTO {_LOCK} (tenant, name, token) VALUES (%(tenant)s, %(name)s, %(token)s)
    ON CONFLICT (tenant, name) DO UPDATE SET token = excluded.token
    WHERE {_LOCK}.token < excluded.token AND ({_LOCK}.expires_at IS NULL OR {_LOCK}.expires_at <= {{now}})
    RETURNING id"""

# If the clock was read before a wait, the lock appears to be held, which errs on the safe side.
RAISE_TOKEN: Final = with_clock(lambda clock: _RAISE.format(now=clock.now))
"""Create a free lock, or increase its token; return no row if it is held or its token is as high already."""

TOKEN: Final = Statement(f"SELECT token FROM {_LOCK} WHERE tenant = %(tenant)s AND name = %(name)s")


def _is_filled(part: ExportedPart) -> str:
    conditions = "".join(f" AND {name} = '{value}'" for name, value in part.only.items())
    parent = part.format.model._meta.get_field(part.format.parent).column  # type: ignore[union-attr]
    return f"EXISTS (SELECT 1 FROM {table(part.format.model)} WHERE {parent} = %(key)s{conditions})"


@cache
def filled_parts(parts: tuple[ExportedPart, ...]) -> Statement:
    """Return a statement that reports which parts of one session or stream have rows; most have none."""
    return Statement(f"SELECT {', '.join(map(_is_filled, parts))}")
