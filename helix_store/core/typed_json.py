"""JSON text for Python values beyond plain JSON, which preserves value and type.

In addition to plain JSON: ``datetime``, ``date``, ``Decimal``, ``UUID``, ``tuple``, ``set``,
``frozenset``, ``bytes`` and dicts with keys of any of these kinds. Classes must match exactly: a subclass is
refused, because it would be read as its base class. A time zone is read as its offset from UTC.

A tagged value is an object with a single key that begins with ``$``. A plain dict of that form is written as
a ``$dict`` of pairs, as are dicts with other keys, so no dict is read as a tag. The set of tags is closed: no
name in the text is ever imported, called or looked up.
"""

from __future__ import annotations

import base64
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import date, datetime, timedelta, timezone
from decimal import Context, Decimal, DecimalException
from math import isfinite
from typing import Any, Final
from uuid import UUID

from helix_store.core.limits import MAX_DEPTH
from helix_store.core.payloads import decode, encode, join_path
from helix_store.exceptions import IntegrityFault, InvalidPayload, LimitExceeded

__all__ = ["dumps", "loads"]

MAX_EQUAL_HASHES: Final = 32
"""The number of keys of a set or dict that may share a hash, because building it takes quadratic time for
such keys. All multiples of ``2**61 - 1`` have the same hash.
"""

_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_DICT: Final = "$dict"
_SEQUENCES: Final[dict[type, str]] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}


def dumps(value: Any, *, limit: int | None = None, name: str = "max_state_bytes", path: str = "") -> str:
    """Return the exact text of `value`, under the rules and limits of `payloads.encode`.

    Equal sets yield the same text. Raises `InvalidPayload` and `LimitExceeded`, the latter also for a set or
    dict with more than 32 keys of the same hash.
    """
    return encode(_Tagging(path).tagged(value), limit=limit, name=name, path=path)


def loads(text: str) -> Any:
    """Return the value that `dumps` wrote. Raises `IntegrityFault` for any other text."""
    tree = decode(text)
    try:
        return _value_of(tree, 0)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        pass
    # This is raised outside the handler because a parser's error holds the stored text.
    raise IntegrityFault("A stored typed payload is not readable; other rows are not affected.")


def loads_object(text: str) -> dict[Any, Any]:
    """Return `loads` of a dict's text. Raises `IntegrityFault` for any other value."""
    value = loads(text)
    if type(value) is not dict:
        raise IntegrityFault("A stored typed payload is not an object; other rows are not affected.")
    return value


# --- Writing --------------------------------------------------------------------------------------


class _Tagging:
    """A walk over a value that converts each container to plain JSON. It uses one Python frame per level, so
    even the deepest value fits into the interpreter's stack.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._keys: list[str | int] = []
        self._around: set[int] = set()
        # A container that occurs many times is tagged only once, so that a small graph of shared references
        # stays small until `encode` has checked its size.
        self._finished: dict[int, Any] = {}

    def tagged(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _SCALARS:
            tag, write, _ = _SCALARS[kind]
            return {tag: write(value)}
        if id(value) in self._finished:
            return self._finished[id(value)]
        self._enter(value, kind)
        result: Any
        if kind is set or kind is frozenset:
            _refuse_equal_hashes(value)
        if kind is not dict:
            items = []
            for index, item in enumerate(value):
                self._keys.append(index)
                items.append(self.tagged(item))
                self._keys.pop()
            if kind is set or kind is frozenset:
                items.sort(key=encode)
            result = items if kind is list else {_SEQUENCES[kind]: items}
        elif all(type(key) is str for key in value) and not _has_form_of_a_tag(value):
            result = {}
            for key, item in value.items():
                self._keys.append(key)
                result[key] = self.tagged(item)
                self._keys.pop()
        else:
            _refuse_equal_hashes(value)
            pairs = []
            for index, (key, item) in enumerate(value.items()):
                self._keys.append(index)
                pairs.append([self.tagged(key), self.tagged(item)])
                self._keys.pop()
            result = {_DICT: pairs}
        self._around.remove(id(value))
        self._finished[id(value)] = result
        return result

    def _enter(self, value: Any, kind: type) -> None:
        if kind is not dict and kind is not list and kind not in _SEQUENCES:
            raise InvalidPayload(path=self._pointer(), reason=f"{kind.__name__} has no typed form")
        if id(value) in self._around:
            raise InvalidPayload(path=self._pointer(), reason="it contains itself")
        if len(self._around) >= MAX_DEPTH:
            raise LimitExceeded(name="depth", limit=MAX_DEPTH, actual=MAX_DEPTH + 1)
        self._around.add(id(value))

    def _pointer(self) -> str:
        return functools.reduce(join_path, self._keys, self._path)


def _has_form_of_a_tag(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value))[:1] == "$"


def _refuse_equal_hashes(keys: Iterable[Any]) -> None:
    shared = _most_equal_hashes(keys)
    if shared > MAX_EQUAL_HASHES:
        raise LimitExceeded(name="keys with one hash", limit=MAX_EQUAL_HASHES, actual=shared)


# --- Reading --------------------------------------------------------------------------------------


def _value_of(tree: Any, depth: int) -> Any:
    kind = type(tree)
    if kind is list:
        return _values_of(tree, depth)
    if kind is not dict:
        _require(kind is not float or isfinite(tree))
        return tree
    if _has_form_of_a_tag(tree):
        ((tag, content),) = tree.items()
        return _tagged_value(tag, content, depth)
    _require(depth < MAX_DEPTH)
    value = {}
    for key, item in tree.items():
        value[key] = _value_of(item, depth + 1)
    return value


def _values_of(trees: list[Any], depth: int) -> list[Any]:
    _require(depth < MAX_DEPTH)
    values = []
    for tree in trees:
        values.append(_value_of(tree, depth + 1))
    return values


def _tagged_value(tag: str, content: Any, depth: int) -> Any:
    read = _READERS.get(tag)
    if read is not None:
        _require(type(content) is str)
        return read(content)
    build = _BUILDERS.get(tag)
    _require(build is not None and type(content) is list)
    items = _values_of(content, depth + 1)
    value = build(items)  # type: ignore[misc]  # it was required just now
    # Equal items or keys would become one in Python, so `dumps` never writes them.
    _require(len(value) == len(items))
    return value


def _dict_of(pairs: list[Any]) -> dict[Any, Any]:
    _require(all(type(pair) is list and len(pair) == 2 for pair in pairs))
    _require(_most_equal_hashes(key for key, _ in pairs) <= MAX_EQUAL_HASHES)
    return dict(pairs)


def _set_of(items: list[Any]) -> set[Any]:
    _require(_most_equal_hashes(items) <= MAX_EQUAL_HASHES)
    return set(items)


def _most_equal_hashes(keys: Iterable[Any]) -> int:
    """Return the number of keys that share the most frequent hash."""
    return max(Counter(map(hash, keys)).values(), default=0)


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


# --- The closed set -------------------------------------------------------------------------------

_FOLD: Final = " fold"
_DATETIME: Final = re.compile(
    r"([^+]{19,26}?)(?:([+-])([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{6}))?)?)?( fold)?"
)
_DECIMALS: Final = Context(capitals=1)
"""The caller's own decimal context might write it differently."""


def _write_datetime(value: datetime) -> str:
    # This is the second of two equal wall-clock times when clocks go back, which ISO 8601 cannot express.
    return value.isoformat() + (_FOLD if value.fold else "")


def _read_datetime(text: str) -> datetime:
    match = _DATETIME.fullmatch(text)
    if match is None:
        raise ValueError
    wall_clock, sign, hours, minutes, seconds, microseconds, fold = match.groups()
    tzinfo = None
    if sign is not None:
        # CPython's fromisoformat reads an offset of less than a second as UTC.
        offset = timedelta(
            hours=int(hours),
            minutes=int(minutes),
            seconds=int(seconds or 0),
            microseconds=int(microseconds or 0),
        )
        tzinfo = timezone(-offset if sign == "-" else offset)
    return datetime.fromisoformat(wall_clock).replace(tzinfo=tzinfo, fold=0 if fold is None else 1)


def _read_decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except DecimalException as exc:
        raise ValueError from exc


_SCALARS: Final[dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]]] = {
    datetime: ("$datetime", _write_datetime, _read_datetime),
    date: ("$date", date.isoformat, date.fromisoformat),
    Decimal: ("$decimal", _DECIMALS.to_sci_string, _read_decimal),
    UUID: ("$uuid", str, UUID),
    bytes: (
        "$bytes",
        lambda value: base64.b64encode(value).decode("ascii"),
        functools.partial(base64.b64decode, validate=True),
    ),
}


def _exact_reader(write: Callable[[Any], str], read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader that accepts only the text that ``write`` writes. Parsers also accept other forms."""

    def exact(text: str) -> Any:
        value = read(text)
        _require(write(value) == text)
        return value

    return exact


_READERS: Final = {tag: _exact_reader(write, read) for tag, write, read in _SCALARS.values()}
_BUILDERS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    _DICT: _dict_of,
    _SEQUENCES[tuple]: tuple,
    _SEQUENCES[set]: _set_of,
    _SEQUENCES[frozenset]: lambda items: frozenset(_set_of(items)),
}
