"""JSON with the tags of obsku's serializer, read as the types that typed JSON writes.

An object with a ``value`` and a ``__type`` of ``Date``, ``Map``, ``Set`` or ``Buffer`` is a ``datetime``, a
``dict``, a ``set`` or ``bytes``. An object with any other string as ``__type`` is an ordinary object.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from helix_store.core.payload_faults import join_path
from helix_store.core.typed_json import MAX_EQUAL_HASHES
from helix_store.exceptions import InvalidPayload

_TYPE: Final = "__type"
_VALUE: Final = "value"
# A date without a time means midnight UTC, as in JavaScript. A time without a zone would depend on the time
# zone of the reader.
_DATE: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?(Z|[+-][0-9]{2}:[0-9]{2}))?"
)


def revive(text: str, path: str, remarks: list[str]) -> Any:
    """Return the value of JSON text. Raises `InvalidPayload` with a JSON pointer that begins with ``path``.

    A set or map that Python cannot represent becomes a list, and a remark is added.
    """
    try:
        return _value(json.loads(text, parse_constant=_refuse_constant), path, remarks)
    except (ValueError, RecursionError):
        pass
    # This is raised outside the handler: the error of a parser holds the text and would become its context.
    raise InvalidPayload(path=path, reason="it is not JSON, or nested too deeply")


def _value(tree: Any, path: str, remarks: list[str]) -> Any:
    if type(tree) is list:
        return [_value(item, join_path(path, index), remarks) for index, item in enumerate(tree)]
    if type(tree) is not dict:
        return tree
    if _TYPE in tree:
        kind = tree[_TYPE]
        if type(kind) is not str:
            raise InvalidPayload(path=path, reason=f"its {_TYPE} is not a string")
        if kind in _TAGS:
            if _VALUE not in tree:
                raise InvalidPayload(path=path, reason=f"a {kind} needs a {_VALUE}")
            return _TAGS[kind](tree[_VALUE], path, remarks)
    return {key: _value(item, join_path(path, key), remarks) for key, item in tree.items()}


def _date(content: Any, path: str, remarks: list[str]) -> datetime:
    if type(content) is str and _DATE.fullmatch(content):
        try:
            date = datetime.fromisoformat(content)
            return date.replace(tzinfo=UTC) if date.tzinfo is None else date.astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    raise InvalidPayload(path=path, reason="a Date needs a time of the years 1 to 9999 in ISO 8601")


def _buffer(content: Any, path: str, remarks: list[str]) -> bytes:
    if type(content) is str:
        try:
            return base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError):
            pass
    raise InvalidPayload(path=path, reason="a Buffer needs base64")


def _set(content: Any, path: str, remarks: list[str]) -> set[Any] | list[Any]:
    if type(content) is not list:
        raise InvalidPayload(path=path, reason="a Set needs an array")
    items = [_value(item, join_path(path, index), remarks) for index, item in enumerate(content)]
    if _are_different(items):
        return set(items)
    remarks.append(f"the Set at {path} becomes a list, because Python has no set of its members")
    return items


def _map(content: Any, path: str, remarks: list[str]) -> dict[Any, Any] | list[Any]:
    if type(content) is not list or not all(type(entry) is list and len(entry) == 2 for entry in content):
        raise InvalidPayload(path=path, reason="a Map needs an array of pairs")
    pairs = [
        [key, _value(item, join_path(path, index), remarks)] for index, (key, item) in enumerate(content)
    ]
    if _are_different([key for key, _ in pairs]):
        return dict(pairs)
    remarks.append(f"the Map at {path} becomes a list of pairs, because Python has no dict of its keys")
    return pairs


def _are_different(members: list[Any]) -> bool:
    """Return whether Python can hold all members in one set, in which ``1`` and ``True`` are equal."""
    try:
        hashes = Counter(map(hash, members))
        return max(hashes.values(), default=0) <= MAX_EQUAL_HASHES and len(set(members)) == len(members)
    except TypeError:
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_TAGS: Final[dict[str, Callable[[Any, str, list[str]], Any]]] = {
    "Date": _date,
    "Map": _map,
    "Set": _set,
    "Buffer": _buffer,
}
