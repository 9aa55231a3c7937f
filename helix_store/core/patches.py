"""JSON patches (RFC 6902 operations, with RFC 6901 pointers or Immer's arrays as paths), merges of changes
into a document, and the staged changes that are made of both.

Equality of JSON values differs from Python's, in which ``True == 1``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, cast

from helix_store.core.limits import Limits
from helix_store.core.payloads import check_value, copy_json, encode, shown_key, size_of
from helix_store.core.types import JSON, StagedChanges
from helix_store.exceptions import InvalidPayload, LimitExceeded, PatchError

__all__ = ["apply_patches", "merge_changes"]


MAX_OPERATIONS: Final = 10_000
"""The largest number of operations in a patch."""

MAX_COPIED_BYTES: Final = 8 * 1024 * 1024
"""The largest sum of bytes that ``copy`` operations may copy. Each of them can double a document."""

_MOST_BYTES: Final = 64 * 1024 * 1024
"""Of a document that `apply_patches` and `merge_changes` take from elsewhere than a store."""

MAX_MOVED_ELEMENTS: Final = 2**26
"""The largest total number of list elements that insertions and removals may move. Inserting at the front of
a list moves all its elements. While patches are applied, the session stays locked; on SQLite, the database is
locked for all writers.
"""

_ROOT: Final = "document"
_MOVED: Final = "moved list elements"
_OPERATION_WORD: Final = re.compile("[A-Za-z]{1,32}")

_Segment: TypeAlias = str | int

_REFUSED_SEGMENTS: Final = frozenset({"__proto__", "constructor", "prototype"})
"""They are harmless in Python, but give access to prototypes in a JavaScript program that reads states."""

_LARGEST_INDEX: Final = 10**15
_INDEX: Final = re.compile("0|[1-9][0-9]{0,14}")
_BROKEN_ESCAPE: Final = re.compile("~(?![01])")


def apply_patches(document: JSON, patches: list[Any], *, limits: Limits | None = None) -> JSON:
    """Return a copy of the document with all operations applied, in order.

    The input is not changed and the result shares no references with it. A path is a JSON pointer
    (``"/notes/0"``) or an array (``["notes", 0]``); an array path may also replace a list's ``"length"``
    with a smaller one. The whole document can be replaced, not removed. Raises `PatchError` for the first
    operation that cannot be applied, and `LimitExceeded` for more than 10,000 operations, more than 8 MiB
    of copies, more than 2**26 list elements moved by insertions and removals, nesting beyond 200 or a
    result larger than ``max_state_bytes``. Raises `InvalidPayload` for a document that is no JSON.
    """
    _require_json(document)
    patched = PatchedCopy(document, limits=limits or Limits())
    patched.apply(patches)
    patched.check_limits()
    return patched.document


def check_operation_count(patches: list[Any]) -> None:
    """Raise `LimitExceeded` for more operations than one patch may have."""
    if len(patches) > MAX_OPERATIONS:
        raise LimitExceeded(name="patch operations", limit=MAX_OPERATIONS, actual=len(patches))


def check_staged_patches(patches: list[Any], *, limits: Limits) -> None:
    """Raise `LimitExceeded` for a patch that moves too many elements of lists that it adds itself.

    The lists in the document, and the other limits, are checked when the patch is applied. The patch must
    have passed the payload gate.
    """
    known = PatchedCopy({}, limits=limits)
    # The patch itself holds no more: an element takes two bytes, and half of the known ones may be copies.
    known._copied_bytes = MAX_COPIED_BYTES - limits.max_staged_bytes
    if len(patches) * limits.max_staged_bytes <= MAX_MOVED_ELEMENTS:
        return
    try:
        known.apply_to_known(patches)
    except LimitExceeded as exc:
        if exc.name == _MOVED:
            raise


class PatchedCopy:
    """A private copy of a document that patches modify in place. Do not use it after an error."""

    def __init__(self, document: JSON, *, limits: Limits) -> None:
        # The document is a member of an object, so operations on the whole document need no special case.
        self._holder = {_ROOT: copy_json(document)}
        self._limits = limits
        self._copied_bytes = 0
        self._moved_elements = 0

    @property
    def document(self) -> JSON:
        return self._holder[_ROOT]

    def apply(self, patches: list[Any]) -> None:
        """Apply all operations of one patch. Raises `PatchError` and `LimitExceeded`."""
        if not isinstance(patches, list):
            raise PatchError(index=0, op="unknown", reason="a patch is a list of operations")
        check_operation_count(patches)
        for index, operation in enumerate(patches):
            try:
                self._apply_one(operation)
            except _Refused as exc:
                raise PatchError(index=index, op=_operation_name(operation), reason=str(exc)) from exc

    def apply_to_known(self, patches: list[Any]) -> None:
        """Apply the operations that do not need the document, of which only the patch's own additions are
        known. Each member that remains is the same in any document, so no count is too high. Raises
        `LimitExceeded`.
        """
        for operation in patches:
            try:
                self._apply_one(operation)
            except _Refused:
                self._forget(operation)

    def _forget(self, operation: Any) -> None:
        """Delete the members that an operation would change if the document had them."""
        for pointer in ("path", "from"):
            with suppress(_Refused, TypeError, KeyError):
                segments = _read_path(operation[pointer])
                document = self.document
                if not segments or type(document) is not dict:
                    self._holder[_ROOT] = {}
                elif isinstance(segments[0], str):
                    document.pop(segments[0], None)

    def check_limits(self) -> None:
        """Raise `LimitExceeded` if the document could not be stored as it is now."""
        encode(self.document, limit=self._limits.max_state_bytes)

    def _apply_one(self, operation: Any) -> None:
        if not isinstance(operation, dict):
            raise _Refused("an operation is an object")
        name = operation.get("op")
        if not isinstance(name, str) or name not in _OPERATIONS:
            raise _Refused("'op' must be add, remove, replace, move, copy or test")
        if "path" not in operation:
            raise _Refused("'path' is missing")
        _OPERATIONS[name](self, operation, _read_path(operation["path"]))

    def _add(self, operation: dict[str, Any], path: list[_Segment]) -> None:
        self._put(path, self._copied(_value(operation)))

    def _remove(self, operation: dict[str, Any], path: list[_Segment]) -> None:
        if not path:
            raise _Refused("the whole document cannot be removed; replace it")
        self._pop(path)

    def _replace(self, operation: dict[str, Any], path: list[_Segment]) -> None:
        value = _value(operation)
        container, segment = self._locate(path)
        if segment == "length" and type(container) is list and isinstance(operation["path"], list):
            _truncate(container, value)
        else:
            container[_existing(container, segment)] = self._copied(value)

    def _move(self, operation: dict[str, Any], path: list[_Segment]) -> None:
        source = _source(operation)
        if _is_same_or_inside(path, source):
            self._get(source)
            if len(path) > len(source):
                raise _Refused("a value cannot be moved into itself")
            return
        self._put(path, self._pop(source))

    def _copy(self, operation: dict[str, Any], path: list[_Segment]) -> None:
        value = self._get(_source(operation))
        self._copied_bytes += size_of(encode(value, limit=MAX_COPIED_BYTES, name="copied bytes"))
        if self._copied_bytes > MAX_COPIED_BYTES:
            raise LimitExceeded(name="copied bytes", limit=MAX_COPIED_BYTES, actual=self._copied_bytes)
        self._put(path, copy_json(value))

    def _test(self, operation: dict[str, Any], path: list[_Segment]) -> None:
        value = _value(operation)
        if not json_equal(self._get(path), value):
            raise _Refused("the value at the path is different")

    def _copied(self, value: Any) -> JSON:
        """Return a copy of a value, which must be storable."""
        try:
            encode(value, limit=self._limits.max_state_bytes, path="value")
        except InvalidPayload as exc:
            raise _Refused(f"{exc.path}: {exc.reason}") from exc
        return copy_json(value)

    def _locate(self, path: list[_Segment]) -> tuple[Any, _Segment]:
        """Return the container that the last segment points into, and that segment."""
        container: Any = self._holder
        segment: _Segment = _ROOT
        for following in path:
            container = container[_existing(container, segment)]
            segment = following
        return container, segment

    def _get(self, path: list[_Segment]) -> Any:
        container, segment = self._locate(path)
        return container[_existing(container, segment)]

    def _pop(self, path: list[_Segment]) -> Any:
        container, segment = self._locate(path)
        key = _existing(container, segment)
        if type(container) is list:
            self._count_moved(len(container) - cast("int", key))
        return container.pop(key)

    def _put(self, path: list[_Segment], value: Any) -> None:
        container, segment = self._locate(path)
        if type(container) is list:
            end = len(container)
            index = end if segment == "-" else _list_index(segment, end + 1)
            self._count_moved(end - index)
            container.insert(index, value)
        else:
            _require_object(container)
            container[_member_name(segment)] = value

    def _count_moved(self, elements: int) -> None:
        self._moved_elements += elements
        if self._moved_elements > MAX_MOVED_ELEMENTS:
            raise LimitExceeded(name=_MOVED, limit=MAX_MOVED_ELEMENTS, actual=self._moved_elements)


_OPERATIONS: Final = {
    "add": PatchedCopy._add,
    "remove": PatchedCopy._remove,
    "replace": PatchedCopy._replace,
    "move": PatchedCopy._move,
    "copy": PatchedCopy._copy,
    "test": PatchedCopy._test,
}


def _existing(container: Any, segment: _Segment) -> _Segment:
    """Return the index or member name of an existing value."""
    if type(container) is list:
        return _list_index(segment, len(container))
    _require_object(container)
    name = _member_name(segment)
    if name not in container:
        raise _Refused(f"there is no member {_shown(name)}")
    return name


def _require_object(container: Any) -> None:
    if type(container) is not dict:
        raise _Refused("the path leads into a value that is neither an object nor an array")


def _truncate(items: list[Any], length: Any) -> None:
    """Shorten a list as Immer's ``["list", "length"]`` does.

    JSON cannot represent the holes that a longer list would have.
    """
    if type(length) is not int or not 0 <= length <= len(items):
        raise _Refused("a new 'length' must be a whole number from 0 to the current length")
    del items[length:]


def _value(operation: dict[str, Any]) -> Any:
    if "value" not in operation:
        raise _Refused("'value' is missing; null is a value")
    return operation["value"]


def _source(operation: dict[str, Any]) -> list[_Segment]:
    if "from" not in operation:
        raise _Refused("'from' is missing")
    return _read_path(operation["from"])


def _operation_name(operation: Any) -> str:
    """Return `PatchError.op`: the operation's name, or ``"unknown"`` if it is not safe to display."""
    name = operation.get("op") if isinstance(operation, dict) else None
    return name if isinstance(name, str) and _OPERATION_WORD.fullmatch(name) else "unknown"


def json_equal(left: Any, right: Any) -> bool:
    """Compare two JSON values: a bool is not a number, 1 equals 1.0, and the order of keys does not matter.
    It takes as long as reading ``left`` does, without recursion. Values of other types are unequal.
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


# --- Paths -----------------------------------------------------------------------------------------


class _Refused(ValueError):
    """The reason why an operation cannot be applied; `PatchError` adds its index."""


def _read_path(path: Any) -> list[_Segment]:
    """Split a path into its segments; an empty list refers to the whole document."""
    if isinstance(path, str):
        segments = _pointer_segments(path)
    elif isinstance(path, list):
        segments = path
        for segment in segments:
            if type(segment) is int:
                if not 0 <= segment < _LARGEST_INDEX:
                    raise _Refused("an index in the path is negative or too large")
            elif type(segment) is not str:
                raise _Refused("a path array holds only keys (text) and indexes (whole numbers)")
    else:
        raise _Refused("a path is a JSON pointer or an array of keys and indexes")
    for segment in segments:
        if segment in _REFUSED_SEGMENTS:
            raise _Refused(f"{_shown(segment)} is not allowed in a path")
    return segments


def _is_same_or_inside(segments: list[_Segment], parent: list[_Segment]) -> bool:
    """Return whether a path is ``parent`` or leads into it, regardless of the form of either path."""
    return [str(segment) for segment in segments[: len(parent)]] == [str(segment) for segment in parent]


def _list_index(segment: _Segment, end: int) -> int:
    """Return the index below ``end`` that a segment refers to.

    Text must be a number as JavaScript prints it: JavaScript reads "01", "-1" and "x" as property names.
    """
    if isinstance(segment, str):
        if not _INDEX.fullmatch(segment):
            raise _Refused(f"{_shown(segment)} is not an array index")
        segment = int(segment)
    if segment >= end:
        raise _Refused(f"index {segment} is outside the array")
    return segment


def _member_name(segment: _Segment) -> str:
    """Return the object member that a segment refers to. A number is refused: it is an index of an array."""
    if isinstance(segment, int):
        raise _Refused(f"index {segment} leads into an object; its members are named by strings")
    return segment


def _shown(segment: _Segment) -> str:
    return repr(shown_key(segment))


def _pointer_segments(pointer: str) -> list[_Segment]:
    if pointer == "":
        return []
    if not pointer.startswith("/"):
        raise _Refused("a JSON pointer is empty or starts with '/'")
    if _BROKEN_ESCAPE.search(pointer):
        raise _Refused("'~' in a JSON pointer is followed by '0' or '1'")
    return [segment.replace("~1", "/").replace("~0", "~") for segment in pointer.split("/")[1:]]


def merge_changes(
    document: dict[str, Any],
    changes: dict[str, Any],
    array_replacements: Iterable[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of the document with the changes merged in, and warnings.

    A new value replaces the stored value of its top-level key. An array is appended to a stored array unless
    its key is in ``array_replacements``. An array replaces a stored value of another type, with a warning.
    The result shares no references with the input. Raises `InvalidPayload` for values that are no JSON.
    """
    _require_json(document)
    _require_json(changes)
    return merge_checked(document, changes, array_replacements)


def merge_checked(
    document: dict[str, Any], changes: dict[str, Any], array_replacements: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """`merge_changes` for values that have passed the payload gate."""
    merged: dict[str, Any] = copy_json(_object(document, "the document"))
    incoming: dict[str, Any] = copy_json(_object(changes, "the changes"))
    return merged, _merge_into(merged, incoming, array_replacements)


def _require_json(value: Any) -> None:
    """Raise `InvalidPayload` for a value that is no JSON: copying a cycle would never end."""
    check_value(value, limit=_MOST_BYTES, path="")


def promote_staged(
    document: dict[str, Any],
    staged: Iterable[StagedChanges],
    *,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """Return a copy of ``custom_state`` with all staged changes applied, in the order given.

    If a change has patches and a merge, only the patches are applied. The input is not changed and the result
    shares no references with it. Raises `PatchError` for the first operation that cannot be applied or whose
    result is not an object, and `LimitExceeded` as `apply_patches` does, but counts the copies of all changes
    together.
    """
    promoted = _promoted(document, staged, limits or Limits())
    promoted.check_limits()
    return _object(promoted.document, "the document")


def with_staged(
    document: dict[str, Any], staged: Sequence[StagedChanges], *, limits: Limits
) -> dict[str, Any]:
    """Return the result of `promote_staged`, for a caller that checks the limits when it encodes it. The
    result shares references with the document, which does not change, and with the staged changes.
    """
    if any(change.patches for change in staged):
        return _object(_promoted(document, staged, limits).document, "the document")
    promoted = dict(_object(document, "the document"))
    merged = [_object(change.merge_changes, "the changes") for change in staged if change.merge_changes]
    for key in {key for changes in merged for key in changes}:
        if isinstance(promoted.get(key), list):
            promoted[key] = promoted[key].copy()
    for changes in merged:
        _merge_into(promoted, changes, ())
    return promoted


def _promoted(document: dict[str, Any], staged: Iterable[StagedChanges], limits: Limits) -> PatchedCopy:
    promoted = PatchedCopy(_object(document, "the document"), limits=limits)
    for change in staged:
        if change.patches:
            promoted.apply(change.patches)
            if not isinstance(promoted.document, dict):
                # The last operation that targets the whole document has replaced the object.
                index = max(index for index, each in enumerate(change.patches) if not each["path"])
                op = change.patches[index]["op"]
                raise PatchError(index=index, op=op, reason="custom_state must stay an object")
        elif change.merge_changes is not None:
            changes = copy_json(_object(change.merge_changes, "the changes"))
            _merge_into(promoted.document, changes, ())
    return promoted


def _merge_into(
    document: dict[str, Any], incoming: dict[str, Any], array_replacements: Iterable[str]
) -> list[str]:
    if isinstance(array_replacements, str):
        raise InvalidPayload(path="", reason="array_replacements must be a collection of keys, not a string")
    replacements = frozenset(array_replacements)
    warnings = []
    for key, value in incoming.items():
        if key in document and isinstance(value, list) and key not in replacements:
            stored = document[key]
            if isinstance(stored, list):
                stored.extend(value)
                continue
            warnings.append(f"{shown_key(key)!r} had a value that is not an array; it was replaced")
        document[key] = value
    return warnings


def _object(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidPayload(path="", reason=f"{name} must be a dict, not {type(value).__name__}")
    return value
