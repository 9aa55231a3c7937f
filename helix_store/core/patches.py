"""Equality of JSON values, which is not Python's: there ``True == 1``."""

from __future__ import annotations

import re
from typing import Any, Final

from helix_store.core.limits import Limits
from helix_store.core.patch_paths import (
    Refused,
    Segment,
    is_same_or_inside,
    list_index,
    member_name,
    read_path,
    shown,
)
from helix_store.core.payloads import (
    copy_json,
    encode,
    size_of,
)
from helix_store.core.types import JSON
from helix_store.exceptions import (
    InvalidPayload,
    LimitExceeded,
    PatchError,
)

__all__ = ["MAX_COPIED_BYTES", "MAX_OPERATIONS", "PatchedCopy", "apply_patches", "json_equal"]


def json_equal(left: Any, right: Any) -> bool:
    """Compare two JSON values: a bool is not a number, 1 equals 1.0, the order of members does not count.

    Takes no longer than reading ``left``, and nesting does not matter. Values of other types are unequal.
    """
    pending = [(left, right)]
    while pending:
        one, other = pending.pop()
        kind = type(one)
        if kind is dict:
            if type(other) is not dict or one.keys() != other.keys():
                return False
            pending.extend((item, other[key]) for key, item in one.items())
        elif kind is list:
            if type(other) is not list or len(one) != len(other):
                return False
            pending.extend(zip(one, other, strict=True))
        elif kind is int or kind is float:
            if type(other) not in (int, float) or one != other:
                return False
        elif type(other) is not kind or one != other:
            return False
    return True


MAX_OPERATIONS: Final = 10_000
"""Most operations of one patch."""

MAX_COPIED_BYTES: Final = 8 * 1024 * 1024
"""Most bytes that ``copy`` operations may copy together. Each can double a document."""

_ROOT: Final = "document"
_OPERATION_WORD: Final = re.compile("[A-Za-z]{1,32}")


def apply_patches(document: JSON, patches: list[Any], *, limits: Limits | None = None) -> JSON:
    """Return a copy of the document with all operations applied, in order.

    The input is never changed and the result shares nothing with it. A path is a JSON pointer
    (``"/notes/0"``) or an array (``["notes", 0]``); an array path may also replace a list's ``"length"``
    by a smaller one. The whole document can be replaced, not removed. Raises `PatchError` for the first
    operation that cannot be applied, and `LimitExceeded` for more than 10,000 operations, more than 8 MiB
    of copies, nesting beyond 200 or a result larger than ``max_state_bytes``.
    """
    patched = PatchedCopy(document, limits=limits or Limits())
    patched.apply(patches)
    patched.check_limits()
    return patched.document


class PatchedCopy:
    """A private copy of a document that patches change in place. After an error, throw it away."""

    def __init__(self, document: JSON, *, limits: Limits) -> None:
        # With the document as a member, operations on the whole of it need no code of their own.
        self._holder = {_ROOT: copy_json(document)}
        self._limits = limits
        self._copied_bytes = 0

    @property
    def document(self) -> JSON:
        return self._holder[_ROOT]

    def apply(self, patches: list[Any]) -> None:
        """Apply all operations of one patch. Raises `PatchError` and `LimitExceeded`."""
        if not isinstance(patches, list):
            raise PatchError(index=0, op="unknown", reason="a patch is a list of operations")
        if len(patches) > MAX_OPERATIONS:
            raise LimitExceeded(name="patch operations", limit=MAX_OPERATIONS, actual=len(patches))
        for index, operation in enumerate(patches):
            try:
                self._apply_one(operation)
            except Refused as exc:
                raise PatchError(index=index, op=_operation_name(operation), reason=str(exc)) from exc

    def check_limits(self) -> None:
        """Raise `LimitExceeded` if the document could not be stored as it is now."""
        encode(self.document, limit=self._limits.max_state_bytes)

    def _apply_one(self, operation: Any) -> None:
        if not isinstance(operation, dict):
            raise Refused("an operation is an object")
        name = operation.get("op")
        if not isinstance(name, str) or name not in _OPERATIONS:
            raise Refused("'op' is none of add, remove, replace, move, copy and test")
        if "path" not in operation:
            raise Refused("'path' is missing")
        _OPERATIONS[name](self, operation, read_path(operation["path"]))

    def _add(self, operation: dict[str, Any], path: list[Segment]) -> None:
        self._put(path, self._taken(_value(operation)))

    def _remove(self, operation: dict[str, Any], path: list[Segment]) -> None:
        if not path:
            raise Refused("the whole document cannot be removed; replace it")
        self._pop(path)

    def _replace(self, operation: dict[str, Any], path: list[Segment]) -> None:
        value = _value(operation)
        container, segment = self._locate(path)
        if segment == "length" and type(container) is list and isinstance(operation["path"], list):
            _truncate(container, value)
        else:
            container[_existing(container, segment)] = self._taken(value)

    def _move(self, operation: dict[str, Any], path: list[Segment]) -> None:
        source = _source(operation)
        if is_same_or_inside(path, source):
            self._get(source)
            if len(path) > len(source):
                raise Refused("a value cannot be moved into itself")
            return
        self._put(path, self._pop(source))

    def _copy(self, operation: dict[str, Any], path: list[Segment]) -> None:
        value = self._get(_source(operation))
        self._copied_bytes += size_of(encode(value, limit=MAX_COPIED_BYTES, name="copied bytes"))
        if self._copied_bytes > MAX_COPIED_BYTES:
            raise LimitExceeded(name="copied bytes", limit=MAX_COPIED_BYTES, actual=self._copied_bytes)
        self._put(path, copy_json(value))

    def _test(self, operation: dict[str, Any], path: list[Segment]) -> None:
        value = _value(operation)
        if not json_equal(self._get(path), value):
            raise Refused("the value at the path is another one")

    def _taken(self, value: Any) -> JSON:
        """A copy of a value that could be stored."""
        try:
            encode(value, limit=self._limits.max_state_bytes, path="value")
        except InvalidPayload as exc:
            raise Refused(f"{exc.path}: {exc.reason}") from exc
        return copy_json(value)

    def _locate(self, path: list[Segment]) -> tuple[Any, Segment]:
        """The container that the last segment is about, and that segment."""
        container: Any = self._holder
        segment: Segment = _ROOT
        for following in path:
            container = container[_existing(container, segment)]
            segment = following
        return container, segment

    def _get(self, path: list[Segment]) -> Any:
        container, segment = self._locate(path)
        return container[_existing(container, segment)]

    def _pop(self, path: list[Segment]) -> Any:
        container, segment = self._locate(path)
        key = _existing(container, segment)
        return container.pop(key)

    def _put(self, path: list[Segment], value: Any) -> None:
        container, segment = self._locate(path)
        if type(container) is list:
            end = len(container)
            container.insert(end if segment == "-" else list_index(segment, end + 1), value)
        else:
            _require_object(container)
            container[member_name(segment)] = value


_OPERATIONS: Final = {
    "add": PatchedCopy._add,
    "remove": PatchedCopy._remove,
    "replace": PatchedCopy._replace,
    "move": PatchedCopy._move,
    "copy": PatchedCopy._copy,
    "test": PatchedCopy._test,
}


def _existing(container: Any, segment: Segment) -> Segment:
    """The index or member name of a value that is there."""
    if type(container) is list:
        return list_index(segment, len(container))
    _require_object(container)
    name = member_name(segment)
    if name not in container:
        raise Refused(f"there is no member {shown(name)}")
    return name


def _require_object(container: Any) -> None:
    if type(container) is not dict:
        raise Refused("the path leads into a value that is neither an object nor an array")


def _truncate(items: list[Any], length: Any) -> None:
    """Shorten a list as Immer's ``["list", "length"]`` does. Growing would leave holes, which JSON lacks."""
    if type(length) is not int or not 0 <= length <= len(items):
        raise Refused("a new 'length' is a whole number from 0 to the present length")
    del items[length:]


def _value(operation: dict[str, Any]) -> Any:
    if "value" not in operation:
        raise Refused("'value' is missing; null is a value")
    return operation["value"]


def _source(operation: dict[str, Any]) -> list[Segment]:
    if "from" not in operation:
        raise Refused("'from' is missing")
    return read_path(operation["from"])


def _operation_name(operation: Any) -> str:
    """What `PatchError.op` says: the operation's own word, unless it is none that could be shown."""
    name = operation.get("op") if isinstance(operation, dict) else None
    return name if isinstance(name, str) and _OPERATION_WORD.fullmatch(name) else "unknown"
