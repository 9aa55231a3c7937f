"""How payloads, statuses and times are shown and compared.

Reading of free text and JSON columns, as a whole or only from the start, so that one damaged text does not
break a whole page.

SQLite stores any bytes as text, and a statement fails if it fetches text that is not valid UTF-8. Pages
therefore fetch a row without these columns, and then the columns as bytes. The columns may also be long.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal
from zoneinfo import ZoneInfo

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, IntegerField, JSONField, Model, QuerySet, TextField
from django.db.models.functions import Cast, Substr
from django.utils import timezone

from helix_store.core.limits import MAX_DEPTH
from helix_store.core.payloads import decode
from helix_store.core.transcript import CutText, visible, visible_json
from helix_store.core.types import SessionState
from helix_store.exceptions import IntegrityFault
from helix_store.models import Session
from helix_store.models.fields import PayloadField
from helix_store.sessions.deltas import apply_delta

TONES: Final = {
    "active": "info",
    "running": "info",
    "paused": "waiting",
    "interrupted": "waiting",
    "suspended_client_tool": "waiting",
    "suspended_awaiting_children": "waiting",
    "suspended_step_partial": "waiting",
    "completed": "good",
    "failed": "bad",
    "ended": "good",
    "held": "info",
    "reached": "bad",
    "resumed": "good",
    "expired": "bad",
    "crashed": "bad",
    "abandoned": "bad",
    "over_budget": "bad",
    "effect_unknown": "bad",
    "unanswered": "waiting",
    "waiting": "waiting",
}


NOTHING: Final = "-"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def project_zone() -> ZoneInfo:
    """Return the time zone of the project, ``TIME_ZONE``."""
    return ZoneInfo(timezone.get_default_timezone_name())


def time_argument(given: str | datetime) -> datetime:
    """Parse an ISO 8601 date or time for argparse, in the project's time zone unless it specifies one."""
    try:
        value = given if isinstance(given, datetime) else datetime.fromisoformat(given)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(
            f"expected a date or time such as 2026-11-22T12:00, got {given!r}"
        ) from exc
    return value if value.tzinfo else timezone.make_aware(value)


def moment(value: datetime | None, *, seconds: bool = False) -> str:
    """Return a time with its offset, in the project's time zone: ``2026-11-22 11:22 UTC``."""
    if value is None:
        return NOTHING
    local = timezone.localtime(value)
    text = local.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M")
    offset = local.utcoffset()
    # "CST" has four meanings, but an offset has only one.
    return f"{text} {local.strftime('%z')[:3]}:{local.strftime('%z')[3:5]}" if offset else f"{text} UTC"


def epoch_moment(milliseconds: int | None, *, seconds: bool = False) -> str:
    """Return the `moment` of epoch milliseconds, or the number itself if it is outside the calendar."""
    if milliseconds is None:
        return NOTHING
    try:
        return moment(_EPOCH + timedelta(milliseconds=milliseconds), seconds=seconds)
    except OverflowError:
        return str(milliseconds)


_REST_OF_STRING: Final = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_TOKEN: Final = re.compile(
    r'("[^"\\]*(?:\\.[^"\\]*)*"?)|((?:[^"\[\]{}:,]+,){1,24})|(\[\]|\{\})|([\[{])|([\]}])|(,)|(:)', re.DOTALL
)
"""A string, several numbers or other short values, an empty container, or a character of the structure."""
_DEEPEST: Final = 12
"""The level from which lines are no longer indented further; they begin with the number of their level."""
_STARTS: Final = ("{", "[", '"')
_LINE: Final = 40
"""The number of characters after which a list of short values continues on another line."""


def starts_of_parts(text: str, length: int) -> list[int]:
    """Return the positions at which the parts of a text begin, none of them in the middle of an escape."""
    starts = [0]
    for start in range(length, len(text), length):
        before = text[:start]
        backslashes = len(before) - len(before.rstrip("\\"))
        starts.append(start - backslashes % 2)
    return starts


def laid_out(text: str, start: int, end: int) -> str:
    """Return a part of compact JSON text in lines, with invisible characters as escapes."""
    outside = _STRING.sub("", text[:start])
    in_string = outside.rfind('"')
    if in_string >= 0:
        outside = outside[:in_string]
    depth = sum(map(outside.count, "[{")) - sum(map(outside.count, "]}"))
    part = text[start:end]
    head = ""
    if in_string >= 0 and (match := _REST_OF_STRING.match(part)):
        head, part = match[0], part[match.end() :]
    return visible_json(head + _in_lines(part, depth))


def _in_lines(text: str, depth: int) -> str:
    pieces: list[str] = []
    at, line_start = 0, 0
    for match in _TOKEN.finditer(text):
        string, values, _, opening, closing, comma, colon = match.groups()
        if string or not (values or opening or closing or comma or colon):
            continue
        pieces.append(text[at : match.start()])
        at = match.end()
        if opening:
            depth += 1
            pieces += (opening, _indent(depth))
            line_start = at
        elif closing:
            depth -= 1
            pieces += (_indent(depth), closing)
            line_start = at
        elif colon:
            pieces.append(": ")
        else:
            pieces.append(values.replace(",", ", ").rstrip() if values else ",")
            if at - line_start > _LINE or text[at : at + 1] in _STARTS or text[at - 2] in "}]":
                pieces.append(_indent(depth))
                line_start = at
            else:
                pieces.append(" ")
    pieces.append(text[at:])
    return "".join(pieces)


def has_levels(text: str) -> bool:
    """Return whether lines that `laid_out` returns begin with the number of their level."""
    return f"{_indent(_DEEPEST)}(" in text


def _indent(depth: int) -> str:
    if depth <= _DEEPEST:
        return "\n" + "  " * depth
    return "\n" + "  " * _DEEPEST + f"({depth}) "


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

PAGE_BYTES: Final = 16 * 1024 * 1024
"""The maximum number of bytes of long messages that a page reads as a whole."""

_STRUCTURE: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?$)|[\[\]{},]', re.DOTALL)
"""A string, which may be cut off, or a character that separates values."""
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


class _Bytes(Func):
    """The size of a payload in bytes, which PostgreSQL knows without reading the payload."""

    function = "octet_length"
    arity = 1
    output_field = IntegerField()

    def as_sqlite(self, compiler: Any, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        return super().as_sql(
            compiler, connection, template="length(CAST(%(expressions)s AS BLOB))", **context
        )


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


def whole_payloads(
    model: type[Model], alias: str, starts: Collection[tuple[int, str]], limit: int
) -> dict[int, str]:
    """Return the whole payloads of rows of which a page has read `payload_start`, by key.

    ``starts`` are the keys and starts. A result behind a long text of the same message must not be lost, so
    payloads that were cut off are read as a whole, the shortest first, up to `PAGE_BYTES` for all of them.
    """
    found = {key: start for key, start in starts if len(start) <= limit}
    cut = [key for key, start in starts if len(start) > limit]
    if not cut:
        return found
    rows = model._base_manager.using(alias).filter(pk__in=cut)
    sizes = rows.values_list("pk", _Bytes("payload"))
    left, chosen = PAGE_BYTES, []
    for key, size in sorted(sizes, key=lambda each: (each[1], each[0])):
        if size > left:
            break
        left -= size
        chosen.append(key)
    if chosen:
        found.update(rows.filter(pk__in=chosen).values_list("pk", PayloadText("payload")))
    return found


def message_in(text: str) -> dict[str, Any] | None:
    """Return the message in the whole text of a payload, or ``None`` if it is unreadable."""
    return read_start(text, len(text))[0]


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
        return _completed(start)
    except ValueError as exc:
        raise IntegrityFault("The text is not JSON.") from exc


def _completed(text: str) -> Any:
    """Return the value of JSON text that was cut off. Each character is read at most a few times.

    ``_read_cut`` alone would read a document once for each of its levels.
    """
    opened: list[tuple[int, int]] = []
    for token in _STRUCTURE.finditer(text):
        char = token[0]
        if char in "[{":
            opened.append((token.start(), token.end()))
        elif char in "]}":
            if opened:
                opened.pop()
        elif char == "," and opened:
            opened[-1] = opened[-1][0], token.end()
    if not opened:
        return _read_cut(text, 0, MAX_DEPTH)[0]
    last = opened[:MAX_DEPTH][-1][1]
    found: Any = None
    for position, rest in reversed(opened[:MAX_DEPTH]):
        closing = "}" if text[position] == "{" else "]"
        try:
            members = json.loads(text[position:rest].rstrip(", ") + closing)
        except ValueError:
            # The text is damaged before the cut.
            return _read_cut(text, 0, MAX_DEPTH)[0]
        _add_last(members, text, rest, found, is_innermost=rest == last)
        found = members
    return found


def _add_last(members: Any, text: str, position: int, inner: Any, *, is_innermost: bool) -> None:
    """Add the last member of an object or a list, as far as it was not cut off."""
    position = _after_separator(text, position)
    key = None
    if isinstance(members, dict):
        try:
            key, position = _read_value(text, position)
        except ValueError:
            return
        position = _after_separator(text, position)
    if position >= len(text) and key is None:
        return
    value = _read_cut(text, position, 0)[0] if is_innermost else inner
    if isinstance(members, list):
        members.append(value)
    elif isinstance(key, str):
        members[key] = value


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


_OF_EACH_WRITE: Final = frozenset({"version", "message_count", "created_at", "updated_at"})
_MISSING: Final = object()

_MOST_CHANGES: Final = 2_000
_LONGEST_PATHS: Final = 1_000_000
"""The maximum number of characters of the pointers of changes that people read one after the other."""
_ROWS: Final = 200
"""The maximum number of rows of one page of a difference."""
_PAGE: Final = 60_000
"""The number of characters after which a page of a difference ends."""
_VALUE: Final = 600
"""The longest value that is shown whole; of others, what differs and ``_AROUND`` characters around it."""
_AROUND: Final = 80
_PIECE: Final = 2_000
"""The maximum number of characters in one cell: more text that differs takes several rows."""

_write_compact: Final = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A difference. ``before`` is missing if the value was added, ``after`` if it was removed."""

    op: Literal["add", "remove", "replace"]
    path: str
    before: Any = None
    after: Any = None

    def to_dict(self) -> dict[str, Any]:
        values = {"before": self.before, "after": self.after}
        if self.op != "replace":
            del values["before" if self.op == "add" else "after"]
        return {"op": self.op, "path": self.path, **values}


def comparable(state: SessionState) -> dict[str, Any]:
    """Return a state as JSON values, without the fields that every write changes."""
    return {name: value for name, value in state.to_dict().items() if name not in _OF_EACH_WRITE}


def shown_state(state: SessionState) -> dict[str, Any]:
    """Return a comparable state without its tracing context, which may contain vendors' keys."""
    return {name: value for name, value in comparable(state).items() if name != "tracing_context"}


_Pairs = Iterator[tuple[str, Any, Any]]
"""The values in two containers, after the last part of the pointer to their place."""


def changes_between(before: Any, after: Any) -> Iterator[Change]:
    """Yield the changes that lead from one JSON value to the other, in document order.

    Array items are compared by position, after equal items at the start and at the end have been skipped.
    """
    # The iterators of the containers that lead to a place: values may be too deep for nested generators.
    whole = [] if _is_same_scalar(before, after) else [("", before, after)]
    levels: list[tuple[str, _Pairs]] = [("", iter(whole))]
    while levels:
        prefix, pairs = levels[-1]
        found = next(pairs, None)
        if found is None:
            levels.pop()
            continue
        part, old, new = found
        if old is _MISSING:
            yield Change(op="add", path=prefix + part, after=new)
        elif new is _MISSING:
            yield Change(op="remove", path=prefix + part, before=old)
        elif type(old) is dict and type(new) is dict:
            levels.append((prefix + part, _pairs_of_objects(old, new)))
        elif type(old) is list and type(new) is list:
            levels.append((prefix + part, _pairs_of_arrays(old, new)))
        else:
            yield Change(op="replace", path=prefix + part, before=old, after=new)


def few_changes(before: Any, after: Any) -> list[Change] | None:
    """Return the changes between two values, or ``None`` if they are too many for a person to read."""
    found, length = [], 0
    for change in changes_between(before, after):
        found.append(change)
        length += len(change.path)
        if len(found) > _MOST_CHANGES or length > _LONGEST_PATHS:
            return None
    return found


def _part_of_pointer(key: str | int) -> str:
    """Return the part of a JSON pointer for a key, whole: a key that is cut could look like another one."""
    return f"/{str(key).replace('~', '~0').replace('/', '~1')}"


def _pairs_of_objects(before: dict[str, Any], after: dict[str, Any]) -> _Pairs:
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key, _MISSING), after.get(key, _MISSING)
        if not _is_same_scalar(old, new):
            yield _part_of_pointer(key), old, new


def _pairs_of_arrays(before: list[Any], after: list[Any]) -> _Pairs:
    start = end = 0
    if len(before) != len(after):
        # The items that stayed in their places, which may not be those with the same index from the start.
        shorter = min(len(before), len(after))
        while start < shorter and _is_same(before[start], after[start]):
            start += 1
        while end < shorter - start and _is_same(before[-1 - end], after[-1 - end]):
            end += 1
    for index in range(start, max(len(before), len(after)) - end):
        old = before[index] if index < len(before) - end else _MISSING
        new = after[index] if index < len(after) - end else _MISSING
        if not _is_same_scalar(old, new):
            yield f"/{index}", old, new


def _is_same_scalar(old: Any, new: Any) -> bool:
    """Return whether two values are the same, and no containers."""
    return type(old) is type(new) and type(old) not in (dict, list) and bool(old == new)


def _is_same(before: Any, after: Any) -> bool:
    """Return whether two values are the same JSON. ``1``, ``True`` and ``1.0`` are all different."""
    if type(before) is not type(after) or before != after:
        return False
    return type(before) not in (dict, list) or next(changes_between(before, after), None) is None


# --- The rows of a difference -------------------------------------------------------------------------


def difference_pages(changes: Iterable[Change]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a difference in pages. All that differs is on one of them."""
    page: list[dict[str, Any]] = []
    length = 0
    for change in changes:
        for row in _rows_of(change):
            if len(page) == _ROWS or length > _PAGE:
                yield page
                page, length = [], 0
            page.append(row)
            length += sum(len(text) for text in row.values() if text is not None)
    if page:
        yield page


def _rows_of(change: Change) -> Iterator[dict[str, Any]]:
    """Yield the rows that show what differs in one place, whole."""
    before, after = _texts_of(change)
    for at in range(0, max(len(before or ""), len(after or ""), 1), _PIECE):
        yield {
            "op": change.op,
            "path": visible(change.path),
            "before": None if before is None else visible_json(before[at : at + _PIECE]),
            "after": None if after is None else visible_json(after[at : at + _PIECE]),
        }


def _texts_of(change: Change) -> tuple[str | None, str | None]:
    values = [change.before, change.after]
    starts = [json_start(value, _VALUE) for value in values]
    if not any(is_cut for _, is_cut in starts):
        texts = [text for text, _ in starts]
    else:
        texts = [_write_compact(value) for value in values]
    if change.op == "add":
        return None, texts[1]
    if change.op == "remove":
        return texts[0], None
    if max(map(len, texts)) > _VALUE:
        return _around_difference(*texts)
    return texts[0], texts[1]


def _around_difference(before: str, after: str) -> tuple[str, str]:
    """Return what differs between two texts, and the characters around it."""
    start = _common_start(before, after)
    most = min(len(before), len(after)) - start
    end = _common_start(before[: -most - 1 : -1], after[: -most - 1 : -1]) if most else 0
    return _cut_out(before, start, end), _cut_out(after, start, end)


def _cut_out(text: str, start: int, end: int) -> str:
    first, last = max(start - _AROUND, 0), min(len(text) - end + _AROUND, len(text))
    return ("…" if first else "") + text[first:last] + ("…" if last < len(text) else "")


def _common_start(first: str, second: str) -> int:
    """Return the length of the common start of two texts. Comparing single characters would be too slow."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def has_several_pages(changes: Iterable[Change]) -> bool:
    """Return whether not all changes are on the first page of a difference."""
    pages = difference_pages(changes)
    return next(pages, None) is not None and next(pages, None) is not None
