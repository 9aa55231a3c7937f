"""The one gate between Python values and stored JSON text.

`encode` accepts exactly ``dict`` (``str`` keys), ``list``, ``str``, ``int``, ``float``, ``bool`` and ``None``,
no subclasses and no tuples, so that `decode` gives back the same values, types and key order everywhere.
A scalar has depth 0 and each container adds one.

Stored text is compact JSON with two peculiarities:

- A lone surrogate cannot be encoded as UTF-8 and is written as the JSON escape that it is read back from
  (``\\udc00``). NUL is always an escape in JSON.
- A high surrogate directly before a low one would be read back from such escapes as a single astral
  character. A text that holds such a pair is stored as ``~`` followed by its bytes (UTF-8, surrogates
  included) as Latin-1 characters. No JSON text begins with ``~``.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

from helix_store.core.limits import MAX_DEPTH, MAX_INT_DIGITS, Limits
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidPayload, LimitExceeded

__all__ = [
    "check_metadata",
    "check_tags",
    "check_text",
    "copy_json",
    "decode",
    "encode",
    "join_path",
    "size_of",
]

_CONTAINERS: Final = frozenset({dict, list})
_SIZED: Final = _CONTAINERS | {str}
_ACCEPTED: Final = _SIZED | {int, float, bool, type(None)}

_DEFAULT_LIMIT: Final = Limits().max_state_bytes
_TOO_LONG_INTEGER: Final = 10**MAX_INT_DIGITS
_LONGEST_SHOWN_KEY: Final = 80
_LONGEST_SHOWN_PATH: Final = 1_000

_ADJACENT_SURROGATES: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_NOT_QUERYABLE: Final = re.compile("[\x00\ud800-\udfff]")


def encode(
    value: Any,
    *,
    limit: int | None = None,
    name: str = "max_state_bytes",
    path: str = "",
) -> str:
    """The exact JSON text of `value`, as it is stored.

    `limit` is in bytes of UTF-8 and belongs to the setting `name`; without one, the default of
    ``max_state_bytes`` holds, since nothing may grow without bounds. Raises `InvalidPayload` with a JSON
    pointer that starts with `path`, or `LimitExceeded`.
    """
    if limit is None:
        limit = _DEFAULT_LIMIT
    _check(value, limit, name, path)
    text = _written(value)
    if text is None:
        raise _fault_in(value, path) or InvalidPayload(path=path, reason="Python cannot write it as JSON")
    if not text.isascii():
        text, size = _storable(text)
    else:
        size = len(text)
    if size > limit:
        raise LimitExceeded(name=name, limit=limit, actual=size)
    return text


def decode(text: str) -> Any:
    """The value that `encode` wrote as `text`; `IntegrityFault` for a text that it did not write."""
    try:
        if text[:1] == "~":
            text = text[1:].encode("latin-1").decode("utf-8", "surrogatepass")
        return _read(text)
    except (ValueError, TypeError, RecursionError):
        pass
    # Raised out here since the decoder's own error holds the whole document and would be its context.
    raise IntegrityFault("A stored payload is not readable JSON; other rows are not affected.")


def size_of(text: str) -> int:
    """Bytes of a stored text."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def copy_json(value: Any) -> Any:
    """A detached deep copy of a value that has passed the gate (an unchecked cycle would never end)."""
    if type(value) not in _CONTAINERS:
        return value
    result = value.copy()
    containers = [result]
    for container in containers:
        entries = container.items() if type(container) is dict else enumerate(container)
        for key, item in entries:
            if type(item) in _CONTAINERS:
                container[key] = item = item.copy()
                containers.append(item)
    return result


def join_path(path: str, key: str | int) -> str:
    """`path` with one more JSON pointer segment, cut and made printable."""
    shown = str(key)
    if len(shown) > _LONGEST_SHOWN_KEY:
        shown = shown[: _LONGEST_SHOWN_KEY - 1] + "…"
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)
    return f"{path}/{shown.replace('~', '~0').replace('/', '~1')}"


# --- What is queried, and therefore stored as plain text and jsonb ---------------------------------


def check_text(value: Any, path: str) -> str:
    """`value`, if a text column takes it: a ``str`` without NUL and lone surrogates."""
    if type(value) is not str:
        raise InvalidPayload(path=path, reason=f"expected str, got {type(value).__name__}")
    if _NOT_QUERYABLE.search(value):
        raise InvalidPayload(path=path, reason="NUL and lone surrogates cannot be stored in a text that is queried")
    return value


def check_tags(tags: Any, path: str = "tags") -> list[str]:
    """The tags as a new list."""
    if type(tags) not in (list, tuple):
        raise InvalidPayload(path=path, reason=f"expected a list of str, got {type(tags).__name__}")
    return [check_text(tag, f"{path}/{index}") for index, tag in enumerate(tags)]


def check_metadata(metadata: Any, path: str = "metadata") -> dict[str, str]:
    """The metadata as a new dict."""
    if type(metadata) is not dict:
        raise InvalidPayload(path=path, reason=f"expected a dict of str to str, got {type(metadata).__name__}")
    return {check_text(key, path): check_text(text, join_path(path, key)) for key, text in metadata.items()}


# --- The check ------------------------------------------------------------------------------------


def _check(value: Any, limit: int, name: str, path: str) -> None:
    """Refuse what cannot be stored, one level of nesting at a time.

    ``least`` is a lower bound of the text's length: it stops a small graph of shared references that
    would be written as a huge text, before anything of that size is made.
    """
    least = 0
    values = [value]
    for _ in range(MAX_DEPTH + 1):
        kinds = set(map(type, values))
        if not kinds <= _ACCEPTED:
            _refuse(value, path)
        sized = [item for item in values if type(item) in _SIZED]
        least += len(values) + sum(map(len, sized))
        if int in kinds:
            least += _extra_digits(values, value, path)
        if least > limit:
            raise _fault_in(value, path) or LimitExceeded(name=name, limit=limit, actual=least)
        if not kinds & _CONTAINERS:
            return
        values = []
        keys: list[str] = []
        for container in sized:
            if type(container) is dict:
                keys += container
                values += container.values()
            elif type(container) is list:
                values += container
        if not _ONLY_STR.issuperset(map(type, keys)):
            _refuse(value, path)
        least += 3 * len(keys) + sum(map(len, keys))
    raise _fault_in(value, path) or LimitExceeded(name="depth", limit=MAX_DEPTH, actual=MAX_DEPTH + 1)


_ONLY_STR: Final = frozenset({str})


def _extra_digits(values: list[Any], value: Any, path: str) -> int:
    """At least how many digits the integers beyond 64 bits have."""
    integers = [item for item in values if type(item) is int]
    if max(integers) < 2**63 and min(integers) >= -(2**63):
        return 0
    if any(abs(item) >= _TOO_LONG_INTEGER for item in integers):
        _refuse(value, path)
    return sum(map(_least_digits, integers))


def _least_digits(integer: int) -> int:
    return integer.bit_length() * 30102 // 100_000


def _refuse(value: Any, path: str) -> NoReturn:
    raise _fault_in(value, path) or InvalidPayload(path=path, reason="it changed while it was being written")


def _fault_in(value: Any, path: str) -> HelixStoreError | None:
    """The first thing, in document order, that no limit would allow; each distinct container is read once."""
    seen: set[int] = set()
    open_ids: set[int] = set()
    pending: list[tuple[Any, Any]] = [(value, None)]
    while pending:
        item, trail = pending.pop()
        if item is _CLOSE:
            open_ids.discard(trail)
            continue
        if type(item) not in _CONTAINERS:
            fault = _scalar_fault(item, trail, path)
            if fault is not None:
                return fault
            continue
        if id(item) in open_ids:
            return InvalidPayload(path=_pointer(path, trail), reason="it contains itself")
        if id(item) in seen:
            continue
        seen.add(id(item))
        open_ids.add(id(item))
        pending.append((_CLOSE, id(item)))
        if type(item) is dict:
            for key in item:
                if type(key) is not str:
                    reason = f"dict keys must be str, not {type(key).__name__}"
                    return InvalidPayload(path=_pointer(path, trail), reason=reason)
            pending += [(child, (trail, key)) for key, child in reversed(item.items())]
        else:
            pending += [(item[index], (trail, index)) for index in range(len(item) - 1, -1, -1)]
    return None


_CLOSE: Final = object()


def _scalar_fault(item: Any, trail: Any, path: str) -> HelixStoreError | None:
    kind = type(item)
    if kind not in _ACCEPTED:
        reason = f"{kind.__name__} is not a plain JSON type"
        return InvalidPayload(path=_pointer(path, trail), reason=reason)
    if kind is float and (item != item or item in (float("inf"), float("-inf"))):
        return InvalidPayload(path=_pointer(path, trail), reason="NaN and infinity are not JSON")
    if kind is int and abs(item) >= _TOO_LONG_INTEGER:
        actual = max(MAX_INT_DIGITS + 1, _least_digits(item))
        return LimitExceeded(name="integer digits", limit=MAX_INT_DIGITS, actual=actual)
    return None


def _pointer(path: str, trail: Any) -> str:
    """`path` and the keys of a trail: nested pairs of (trail of the container, key)."""
    keys: list[str | int] = []
    while trail is not None:
        trail, key = trail
        keys.append(key)
    pointer = path
    for key in reversed(keys):
        if len(pointer) > _LONGEST_SHOWN_PATH:
            return pointer + "/…"
        pointer = join_path(pointer, key)
    return pointer


# --- The text -------------------------------------------------------------------------------------


def _refuse_constant(_: str) -> NoReturn:
    raise ValueError("NaN and infinity are not JSON")


_write = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
).encode
_read = json.JSONDecoder(parse_constant=_refuse_constant).decode


def _written(value: Any) -> str | None:
    """The JSON text, or nothing for NaN, infinity and integers that Python refuses to write."""
    try:
        return _write(value)
    except ValueError:
        return None


def _storable(text: str) -> tuple[str, int]:
    """The text as UTF-8 can hold it, and its size."""
    try:
        return text, len(text.encode("utf-8"))
    except UnicodeEncodeError:
        if _ADJACENT_SURROGATES.search(text):
            text = "~" + text.encode("utf-8", "surrogatepass").decode("latin-1")
        else:
            text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        return text, size_of(text)
