r"""The one gate between Python values and stored JSON text.

`encode` accepts exactly ``dict`` (with ``str`` keys), ``list``, ``str``, ``int``, ``float``, ``bool`` and
``None``, but no subclasses and no tuples, so that `decode` returns the same values, types and key order
everywhere. A scalar has depth 0 and each container adds one.

Stored text is compact JSON, in which NUL is an escape, as always in JSON. Lone surrogates, which UTF-8 cannot
hold, take one of two forms:

- They are written as JSON escapes (``\udc00``), which any JSON reader understands.
- The escapes of a high surrogate and the low one after it would be read back as a single astral character.
  Text that holds such a pair is stored as ``~`` followed by its bytes (UTF-8, surrogates
  included) as Latin-1 characters. No JSON text begins with ``~``.

The message of a refusal names the fault and its path, and does not show the value. Only refused values are
searched for it, so that part of the code is exact and bounded rather than fast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from decimal import Decimal, InvalidOperation
from enum import Enum
from functools import cache, partial
from math import isfinite
from types import NoneType, UnionType
from typing import (
    Any,
    Final,
    NoReturn,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from helix_store.core.limits import MAX_BIGINT, MAX_CALL_BYTES, MAX_DEPTH, MAX_INT_DIGITS, Limits
from helix_store.exceptions import IntegrityFault, InvalidPayload, LimitExceeded

__all__ = ["decode", "encode"]


TOO_LONG_INTEGER: Final = 10**MAX_INT_DIGITS

_CONTAINERS: Final = frozenset({dict, list})
_ACCEPTED: Final = _CONTAINERS | {str, int, float, bool, type(None)}
_LONGEST_SHOWN_KEY: Final = 80
_LONGEST_SHOWN_PATH: Final = 1_000


def refuse_faults(value: Any, path: str) -> None:
    """Raise for the first fault in document order; return if the value has none.

    Each container is read once, so cycles and shared references do not take extra time.
    """
    pending: list[Iterator[tuple[str | int, Any]]] = [enumerate([value])]
    keys: list[str | int] = []
    around: dict[int, None] = {}
    seen: set[int] = set()
    while pending:
        for key, item in pending[-1]:
            reason = _reason_against(item)
            if id(item) in around:
                reason = "it contains itself"
            if reason is not None:
                raise InvalidPayload(path=_pointer(path, [*keys, key]), reason=reason)
            if type(item) not in _CONTAINERS or id(item) in seen:
                continue
            seen.add(id(item))
            around[id(item)] = None
            keys.append(key)
            pending.append(iter(item.items()) if type(item) is dict else enumerate(item))
            break
        else:
            pending.pop()
            if keys:
                keys.pop()
                around.popitem()


def join_path(path: str, key: object) -> str:
    """Return `path` with one more JSON pointer segment (RFC 6901), cut and made printable."""
    return f"{path}/{shown_key(key).replace('~', '~0').replace('/', '~1')}"


def shown_key(key: object) -> str:
    """Return a key or an index as short, printable text, or the name of the type of any other object."""
    if type(key) is int and abs(key) <= MAX_BIGINT:
        return str(key)
    if type(key) is not str:
        return type(key).__name__
    shown = key if len(key) <= _LONGEST_SHOWN_KEY else key[: _LONGEST_SHOWN_KEY - 1] + "…"
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)
    return shown


def least_digits(integer: int) -> int:
    """Return a lower bound of the number of decimal digits, because counting them takes quadratic time."""
    return integer.bit_length() * 30102 // 100_000


def _reason_against(item: Any) -> str | None:
    """Return the reason why a value cannot be stored. Only the keys of a container are checked."""
    kind = type(item)
    if kind is dict:
        odd_kinds = (type(key) for key in item if type(key) is not str)
        return next((f"keys must be str, not {odd.__name__}" for odd in odd_kinds), None)
    if kind is float and not isfinite(item):
        return "NaN and infinity are not JSON"
    if kind is int and abs(item) >= TOO_LONG_INTEGER:
        actual = max(MAX_INT_DIGITS + 1, least_digits(item))
        raise LimitExceeded(name="integer digits", limit=MAX_INT_DIGITS, actual=actual)
    return None if kind in _ACCEPTED else f"{kind.__name__} is not a plain JSON type"


def _pointer(path: str, keys: Sequence[str | int]) -> str:
    # The first key is the index in the list that wraps the value.
    for key in keys[1:]:
        if len(path) > _LONGEST_SHOWN_PATH:
            return path + "/…"
        path = join_path(path, key)
    return path


_DEFAULT_LIMIT: Final = Limits().max_state_bytes
_MIN_BIGINT: Final = -MAX_BIGINT

_ADJACENT_SURROGATES: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def encode(
    value: Any,
    *,
    limit: int | None = None,
    name: str = "max_state_bytes",
    path: str = "",
) -> str:
    """Return the exact JSON text of `value`, as it is stored.

    `limit` is in bytes of UTF-8 and belongs to the setting `name`; the default is the value of
    ``max_state_bytes``, because nothing may grow without a bound. Raises `InvalidPayload`, whose path
    consists of `path` and a JSON pointer from there, or `LimitExceeded`.
    """
    if limit is None:
        limit = _DEFAULT_LIMIT
    check_value(value, limit=limit, name=name, path=path)
    try:
        text = write_json(value)
    except ValueError:  # NaN and infinity
        text = None
    # This is raised outside the handler because the writer's own error would become its context.
    if text is None:
        _refuse(value, path)
    size = len(text)
    if not text.isascii():
        text, size = _storable(text)
    if size > limit:
        raise LimitExceeded(name=name, limit=limit, actual=size)
    return text


def encode_all(values: Sequence[Any], *, limit: int, name: str, path: str) -> list[str]:
    """Return `encode` of each of the values of one call; ``path`` is the path of the sequence."""
    texts = (
        encode(value, limit=limit, name=name, path=f"{path}/{index}") for index, value in enumerate(values)
    )
    # A few values cannot exceed the limit of a call, so they need not be counted.
    return list(texts) if len(values) * limit <= MAX_CALL_BYTES else within_one_call(texts, limit=limit)


def within_one_call(texts: Iterable[str], *, limit: int) -> list[str]:
    """Return the texts that one call stores, each of at most ``limit`` bytes. Raises `LimitExceeded`."""
    taken = []
    size = 0
    for text in texts:
        size += size_of(text)
        check_call_bytes(size, limit=limit)
        taken.append(text)
    return taken


def check_call_bytes(size: int, *, limit: int) -> None:
    """Raise `LimitExceeded` if one call would store too many bytes; ``limit`` applies to a single value."""
    most = max(limit, MAX_CALL_BYTES)
    if size > most:
        raise LimitExceeded(name="bytes in one call", limit=most, actual=size)


def decode(text: str) -> Any:
    """Return the value that `encode` wrote as `text`. Raises `IntegrityFault` if it cannot be read."""
    try:
        if text[:1] == "~":
            text = text[1:].encode("latin-1").decode("utf-8", "surrogatepass")
        return _read(text)
    except (ValueError, TypeError, RecursionError):
        pass
    # This is raised outside the handler because the decoder's error holds the whole document.
    raise IntegrityFault("A stored payload is not readable JSON; other rows are not affected.")


def decode_optional(text: str | None) -> Any:
    """Return `decode` of some text, or ``None`` if there is none."""
    return None if text is None else decode(text)


def decode_all(texts: Sequence[str]) -> list[Any]:
    """Return `decode` of each text.

    They are read as one document, because each document has a high fixed cost.
    """
    joined = ",".join(texts)
    if "~" not in joined or all(map(is_plain_json, texts)):
        try:
            values = _read(f"[{joined}]")
        except (ValueError, RecursionError):
            values = []
        if len(values) == len(texts):
            return cast("list[Any]", values)
    return [decode(text) for text in texts]


def decode_object(text: str) -> dict[str, Any]:
    """Return `decode` of an object's text. Raises `IntegrityFault` for any other value."""
    value = decode(text)
    if type(value) is not dict:
        raise IntegrityFault("A stored payload is not a JSON object; other rows are not affected.")
    return value


def is_plain_json(text: str) -> bool:
    """Return whether every reader can parse stored text as JSON, so that it can be part of a larger text."""
    return not text.startswith("~")


def join_fields(start: str, texts: Mapping[str, str]) -> str:
    """Return the stored text of an object with the fields of ``start``, and further fields whose values are
    stored text. ``start`` is a plain JSON object with at least one field. The result may be larger and deeper
    than what `encode` accepts, because each text was within the limits.
    """
    if all(map(is_plain_json, texts.values())):
        fields = "".join(f',"{name}":{text}' for name, text in texts.items())
        return f"{start[:-1]}{fields}}}"
    fields = "".join(f',"{name}":{_in_form_for_pairs(text)}' for name, text in texts.items())
    return f"~{_in_form_for_pairs(start)[:-1]}{fields}}}"


def _in_form_for_pairs(text: str) -> str:
    """Return stored text in the form for adjacent surrogates, without its mark."""
    return text.encode("utf-8").decode("latin-1") if is_plain_json(text) else text[1:]


def size_of(*texts: str) -> int:
    """Return the total number of bytes of stored text."""
    size = 0
    for text in texts:
        size += len(text) if text.isascii() else len(text.encode("utf-8"))
    return size


def copy_json(value: Any) -> Any:
    """Return a deep copy of a value that has passed the payload gate; with a cycle, this would never end."""
    if type(value) not in _CONTAINERS:
        return value
    result = value.copy()
    containers = [result]
    for container in containers:
        entries = container.items() if type(container) is dict else enumerate(container)
        for key, item in entries:
            if type(item) in _CONTAINERS:
                container[key] = copied = item.copy()
                containers.append(copied)
    return result


# --- The check ------------------------------------------------------------------------------------


def check_value(value: Any, *, limit: int, path: str, name: str = "max_state_bytes") -> None:
    """Refuse values that cannot be stored, one level of nesting at a time.

    ``least`` is a lower bound of the text's length: it stops a small graph of shared references that would be
    written as huge text before text of that size is created. The writer refuses NaN and infinity. Every write
    passes this check: in measurements, one plain loop was faster than any combination of built-ins.
    """
    # Every value counts as two bytes: its own and a comma or bracket, although the outermost one has none.
    least = -1
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for container in level:
            items = container
            if type(container) is dict:
                for key in container:
                    if type(key) is not str:
                        _refuse(value, path)
                    least += len(key)
                items = container.values()
            for item in items:
                kind = type(item)
                if kind is str:
                    least += len(item)
                elif kind is dict or kind is list:
                    inner.append(item)
                elif kind is int:
                    if not _MIN_BIGINT <= item <= MAX_BIGINT:
                        if abs(item) >= TOO_LONG_INTEGER:
                            _refuse(value, path)
                        least += least_digits(item) - 1
                elif kind is not float and kind is not bool and item is not None:
                    _refuse(value, path)
            least += 2 * len(container)
            if least > limit:
                refuse_faults(value, path)
                raise LimitExceeded(name=name, limit=limit, actual=least)
        if not inner:
            return
        level = inner
    refuse_faults(value, path)
    raise LimitExceeded(name="depth", limit=MAX_DEPTH, actual=MAX_DEPTH + 1)


def _refuse(value: Any, path: str) -> NoReturn:
    refuse_faults(value, path)
    raise InvalidPayload(path=path, reason="Python cannot write it as JSON")


# --- The text -------------------------------------------------------------------------------------


def _refuse_constant(_: str) -> NoReturn:
    raise ValueError("NaN and infinity are not JSON")


write_json: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
).encode
_read = json.JSONDecoder(parse_constant=_refuse_constant).decode


def _storable(text: str) -> tuple[str, int]:
    """Return the text in a form that UTF-8 can hold, and its size."""
    try:
        return text, len(text.encode("utf-8"))
    except UnicodeEncodeError:
        if _ADJACENT_SURROGATES.search(text):
            text = "~" + text.encode("utf-8", "surrogatepass").decode("latin-1")
        else:
            text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        return text, size_of(text)


T = TypeVar("T")

_Reader = Callable[[str, Any], Any]
"""Converts a plain value. The first argument is the path that errors report."""


def exact_cost(cost: Decimal) -> str:
    """Return a cost as plain digits, without an exponent and without trailing zeros."""
    digits = f"{cost:f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


class Serializable:
    """A dataclass that converts to and from a dict of plain JSON values by field name."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build it from the result of `to_dict`. Raises `InvalidPayload` for unknown and missing keys."""
        if not isinstance(data, Mapping):
            raise InvalidPayload(
                path="", reason=f"expected a dict of {cls.__name__}, got {type(data).__name__}"
            )
        readers = _readers(cls)  # type: ignore[arg-type]  # a class is hashable
        for name in data:
            if name not in readers:
                raise InvalidPayload(path=join_path("", name), reason=f"{cls.__name__} has no such field")
        missing = [
            field.name
            for field in fields(cls)  # type: ignore[arg-type]
            if field.name not in data and field.default is MISSING and field.default_factory is MISSING
        ]
        if missing:
            raise InvalidPayload(path=f"/{missing[0]}", reason=f"{cls.__name__} needs this field")
        values: dict[str, Any] = {
            name: value if (reader := readers[name]) is None else reader(join_path("", name), value)
            for name, value in data.items()
        }
        return cls(**values)


@cache
def _readers(cls: type) -> dict[str, _Reader | None]:
    """Return a function that converts the values of each field, or ``None`` for plain values."""
    hints = get_type_hints(cls)
    return {field.name: _reader(hints[field.name]) for field in fields(cls)}


def _reader(hint: Any) -> _Reader | None:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        return _reader(options[0]) if len(options) == 1 else None
    if origin in (list, dict):
        reader = _reader(get_args(hint)[-1])
        return None if reader is None else partial(_read_items, reader)
    if isinstance(hint, type) and issubclass(hint, datetime | Decimal | Enum | Serializable):
        return partial(_read_value, hint)
    return None


def _read_items(reader: _Reader, path: str, value: Any) -> Any:
    if isinstance(value, list):
        return [reader(join_path(path, index), item) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: reader(join_path(path, key), item) for key, item in value.items()}
    return value


def _read_value(cls: type, path: str, value: Any) -> Any:
    if value is None or isinstance(value, cls):
        return value
    try:
        return _rebuilt(cls, value)
    except InvalidPayload as exc:
        raise InvalidPayload(path=path + exc.path, reason=exc.reason) from exc
    except (TypeError, ValueError, InvalidOperation) as exc:
        raise InvalidPayload(path=path, reason=f"not a {cls.__name__}") from exc


def _rebuilt(cls: type, value: Any) -> Any:
    if issubclass(cls, Serializable):
        return cls.from_dict(value)
    if issubclass(cls, datetime):
        return cls.fromisoformat(value)
    if issubclass(cls, Decimal):
        # A float is not converted, because the check of the value will refuse it.
        return cls(value) if isinstance(value, str) else value
    return cls(value)  # type: ignore[call-arg]  # an enum looks its member up


def _plain(value: Any) -> Any:
    if isinstance(value, Serializable):
        return value.to_dict()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return exact_cost(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


class Page(Sequence[T]):
    """A page of a list, which is a sequence of its items. The first field of the dataclass holds them."""

    __slots__ = ()

    @property
    def _items(self) -> list[T]:
        items: list[T] = getattr(self, fields(self)[0].name)  # type: ignore[arg-type]
        return items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._items[index]
