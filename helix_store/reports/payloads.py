"""Reading of free text and JSON columns, as a whole or only from the start, so that one damaged text does not
break a whole page.

SQLite stores any bytes as text, and a statement fails if it fetches text that is not valid UTF-8. Pages
therefore fetch a row without these columns, and then the columns as bytes. The columns may also be long.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, JSONField, Model, QuerySet, TextField
from django.db.models.functions import Cast, Substr

from helix_store.core.limits import MAX_DEPTH
from helix_store.core.payloads import decode
from helix_store.core.transcript import CutText
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.models.fields import PayloadField
from helix_store.sessions.deltas import apply_delta

_UNREADABLE: Final = ""
"""The replacement for text that is not valid UTF-8.

Stored payloads are never empty, so an empty one is also unreadable.
"""

_SUFFIX: Final = "_text"

_write_in_pieces = json.JSONEncoder(indent=2, ensure_ascii=False).iterencode

PREVIEW_SOURCE: Final = 1_500
"""The maximum number of characters of the stored text that are read for a preview."""

DOCUMENT_LIMIT: Final = 200_000
"""The maximum number of characters of a document that a page reads if it shows only the start."""

_BETWEEN: Final = re.compile(r"[\s,:]*")
_CUT_ESCAPE: Final = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)$")
_read_value = json.JSONDecoder().raw_decode


class _TextOrUnreadable(TextField):  # type: ignore[type-arg]  # not a generic class at run time
    errors = "strict"

    def from_db_value(self, value: Any, expression: Any, connection: BaseDatabaseWrapper) -> str | None:
        try:
            text: str | None = value.decode(errors=self.errors) if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            return _UNREADABLE
        return text


class _TextWithReplacements(_TextOrUnreadable):
    errors = "replace"


class PayloadText(Func):
    """A payload, or a part of one, that can be fetched even if it is damaged."""

    template = "%(expressions)s"
    arity = 1
    output_field: TextField[Any, Any] = _TextOrUnreadable()

    def as_sqlite(self, compiler: Any, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return super().as_sql(compiler, connection, template="CAST(%(expressions)s AS BLOB)", **context)


class FreeText(PayloadText):
    """Text that is not JSON, or a part of it. Bytes that are not valid UTF-8 are replaced."""

    output_field = _TextWithReplacements()


def start_of(column: str, limit: int) -> FreeText:
    """Return the start of some text: one character more than `one_line` reads for a line of ``limit``."""
    return FreeText(Substr(column, 1, 4 * limit + 1))


def said_by(error: str | None) -> str:
    """Return the type and message of an exception, from the start of a run's stored error."""
    try:
        found = _start_of_cut(error or "")
    except (IntegrityFault, RecursionError):
        return ""
    said = [found.get(name) for name in ("type", "message")] if isinstance(found, dict) else ()
    return ": ".join(each for each in said if isinstance(each, str))


def traceback_of(error: str | None) -> str | None:
    """Return the traceback from a run's stored error, if it has one."""
    try:
        document = None if error is None else decode(error)
    except (IntegrityFault, RecursionError):
        return None
    found = document.get("traceback") if isinstance(document, dict) else None
    return found if type(found) is str else None


def without_payloads(queryset: QuerySet[Any], *, session: bool = False) -> QuerySet[Any]:
    """Return rows without their free text and JSON. With ``session``, do the same for its columns."""
    joined = [f"session__{column}" for column in _columns(Session)] if session else []
    return queryset.defer(*_columns(queryset.model), *joined)


def with_payloads(queryset: QuerySet[Any]) -> QuerySet[Any]:
    """Return rows with their free text and JSON, so that `payload_of` needs no further query."""
    rows: QuerySet[Any] = without_payloads(queryset).annotate(**_texts(queryset.model))
    return rows


def payload_of(row: Any, column: str) -> str | None:
    """Return the text of a deferred column. The first call for a row reads all its columns in one query."""
    if column + _SUFFIX not in row.__dict__:
        same_row = type(row)._base_manager.using(row._state.db).filter(pk=row.pk)
        row.__dict__.update(same_row.values(**_texts(type(row))).get())
    text: str | None = row.__dict__[column + _SUFFIX]
    return text


def json_start(value: Any, limit: float) -> tuple[str, bool]:
    """Return the first ``limit`` characters of a value as indented JSON, and whether there are more.

    The rest is never serialized. Raise ``RecursionError`` if a value is nested too deeply for Python's stack.
    """
    pieces: list[str] = []
    length = 0
    for piece in _write_in_pieces(value):
        pieces.append(piece)
        length += len(piece)
        if length > limit:
            return "".join(pieces)[: int(limit)], True
    return "".join(pieces), False


def whole_state(payload: str, base: str | None) -> str:
    """Return the state that a delta and its base produce, or the stored delta if it cannot be applied."""
    try:
        return apply_delta(base or _UNREADABLE, payload)
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


# --- The start of a stored message: its content, as far as the first characters contain it


def payload_start(limit: int = PREVIEW_SOURCE) -> PayloadText:
    """Return the start of the column ``payload``, plus one character if it is longer."""
    return PayloadText(Substr("payload", 1, limit + 1))


def start_text(start: str | bytes) -> str:
    """Return the start of a payload that a statement reads; on SQLite, the column must be cast to a blob.

    SQLite stores any bytes as text, and fails to return bytes that are not UTF-8.
    """
    return start if isinstance(start, str) else start.decode(errors="replace")


def read_start(start: str, limit: int = PREVIEW_SOURCE) -> tuple[dict[str, Any] | None, bool]:
    """Return the message of a `payload_start`, or ``None`` if it is unreadable, and whether it is cut off."""
    is_cut = len(start) > limit
    try:
        message = _start_of_cut(start) if is_cut else decode(start)
    except (IntegrityFault, RecursionError):
        return None, is_cut
    return (message if isinstance(message, dict) and (message or not is_cut) else None), is_cut


def document_start(column: str) -> PayloadText:
    """Return the start of a document that `document_of` reads."""
    return PayloadText(Substr(Cast(column, TextField()), 1, DOCUMENT_LIMIT + 1))


def document_of(text: str) -> Any:
    """Return a stored document, or the readable start of a `document_start` that was cut off.

    Raise `IntegrityFault` or ``RecursionError`` if it cannot be read.
    """
    return _start_of_cut(text) if len(text) == DOCUMENT_LIMIT + 1 else decode(text)


def _start_of_cut(start: str) -> Any:
    """Return the readable start of a document that was cut off, including the text before the cut."""
    if start[:1] == "~":
        start = start[1:].encode("latin-1", "replace").decode("utf-8", "replace")
    try:
        return _read_cut(start, 0, MAX_DEPTH)[0]
    except ValueError as exc:
        raise IntegrityFault("The text is not JSON.") from exc


def _read_cut(text: str, position: int, depth: int) -> tuple[Any, int]:
    """Return the value at a position and the position after it, which is the end if the value was cut off."""
    try:
        return _read_value(text, position)
    except ValueError:
        if depth and text[position : position + 1] in ("{", "["):
            return _members_of_cut(text, position, depth - 1), len(text)
        return _cut_value(text[position:]), len(text)


def _members_of_cut(text: str, position: int, depth: int) -> dict[str, Any] | list[Any]:
    """Return the members of an object or list that was cut off, with the readable part of the last one."""
    found: dict[str, Any] = {}
    items: list[Any] = []
    is_object = text[position] == "{"
    position = _after_separator(text, position + 1)
    try:
        while position < len(text):
            if is_object:
                key, position = _read_value(text, position)
                if not isinstance(key, str):
                    break
                value, position = _read_cut(text, _after_separator(text, position), depth)
                found[key] = value
            else:
                value, position = _read_cut(text, position, depth)
                items.append(value)
            position = _after_separator(text, position)
    except ValueError:
        pass  # The cut is inside a key.
    return found if is_object else items


def _after_separator(text: str, position: int) -> int:
    match = _BETWEEN.match(text, position)
    return position if match is None else match.end()


def _cut_value(rest: str) -> str:
    """Return the start of a string without its quotes, or any other value as it is written."""
    if rest[:1] != '"':
        return rest
    if dangling := _CUT_ESCAPE.search(rest):
        rest = rest[: dangling.start(1)]
    return CutText(json.loads(rest + '"'))
