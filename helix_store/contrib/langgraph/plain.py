"""The types of stored values, and values as plain data. Nothing here imports LangGraph, or builds objects of
a type that the bytes name: an object is read as its fields.
"""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any, Final

from helix_store.core import validation
from helix_store.exceptions import InvalidPayload

PLAIN_TYPES: Final = frozenset({"bytearray", "bytes", "msgpack", "null"})
"""The types that the default serializer writes. Reading them never builds an object that the bytes name."""

_registered: Final[set[str]] = set()

HEADER_BYTES: Final = 11
"""The number of bytes at the start of a value from which `length_of` reads its length."""

_FIXED_LIST: Final = 0x90
_LIST_16: Final = 0xDC
_LIST_32: Final = 0xDD
_SNAPSHOT: Final = 7
"""The code that LangGraph uses to wrap the value of a `DeltaChannel`."""
_WRAPPED: Final = {0xD4: 0, 0xD5: 0, 0xD6: 0, 0xD7: 0, 0xD8: 0, 0xC7: 1, 0xC8: 2, 0xC9: 4}
"""The first byte of a wrapped value, and the number of bytes of the length that follows it."""


def register_types(*types: str) -> None:
    """Let imports and moves accept rows of these types, which one of the project's own serializers writes.

    Call it in ``AppConfig.ready()``. The types of LangGraph's default serializer are known, even with a
    cipher, such as ``msgpack+aes``. Raises `InvalidPayload` for a name that no column can hold.
    """
    _registered.update(validation.identifier(each, "types") for each in types)


def importable_type(value: Any, name: str = "type") -> str:
    """Return the type of an imported row. Raises `InvalidPayload` if the saver could not read it."""
    kind = validation.identifier(value, name)
    plain, has_cipher, cipher = kind.partition("+")
    if kind in _registered or (plain in PLAIN_TYPES and bool(has_cipher) == bool(cipher)):
        return kind
    known = ", ".join(sorted(PLAIN_TYPES))
    raise InvalidPayload(
        path=name,
        reason=f"expected one of {known}, or one of these with a cipher; if a serializer of your own writes "
        "other types, name them with register_types",
    )


def length_of(kind: str, header: bytes) -> int | None:
    """Return the length of a stored list from its first bytes, or ``None`` for any other value."""
    if kind != "msgpack" or not (header := _unwrapped(header)):
        return None
    if header[0] & 0xF0 == _FIXED_LIST:
        return header[0] & 0x0F
    size = {_LIST_16: 2, _LIST_32: 4}.get(header[0])
    return None if size is None else int.from_bytes(header[1 : 1 + size])


def items_of(kind: str, blob: bytes, first: int, limit: int) -> list[Any] | None:
    """Return ``limit`` items of a stored list from the index ``first``, as values that JSON can represent.

    Return ``None`` if the value is not a list that LangGraph's serializer has written without a cipher.
    """
    if kind != "msgpack":
        return None
    try:
        # It is installed with LangGraph; without LangGraph there is nothing to read.
        import ormsgpack

        def unpack(data: bytes, hook: Any) -> Any:
            return ormsgpack.unpackb(data, ext_hook=hook, option=ormsgpack.OPT_NON_STR_KEYS)

        def fields(_code: int, data: bytes) -> Any:
            """Return the fields of an object: the bytes contain its module, its class and its fields."""
            value = unpack(data, fields)
            match value:
                case [str(), str(), fields_of_object, *_]:
                    return fields_of_object
            return value

        # Objects are left as bytes on other pages.
        items = unpack(_unwrapped(blob), lambda code, data: ormsgpack.Ext(code, data))
        if not isinstance(items, list):
            return None
        page = ormsgpack.packb(items[first : first + limit], option=ormsgpack.OPT_NON_STR_KEYS)
        return [_json(item) for item in unpack(page, fields)]
    except Exception:  # noqa: BLE001  what damaged bytes raise depends on where they are damaged
        return None


def _unwrapped(data: bytes) -> bytes:
    """Return the value inside a snapshot of a channel that is stored as deltas, and other data unchanged."""
    size = _WRAPPED.get(data[0]) if data else None
    if size is None or data[1 + size : 2 + size] != bytes([_SNAPSHOT]):
        return data
    return data[2 + size :]


def _json(value: Any) -> Any:
    return json.loads(json.dumps(_with_text_keys(value), default=_written))


def _with_text_keys(value: Any) -> Any:
    """Return a value whose objects have only keys that JSON can represent."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else _written(key): _with_text_keys(each)
            for key, each in value.items()
        }
    return [_with_text_keys(each) for each in value] if isinstance(value, list | tuple) else value


def _written(value: Any) -> str:
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)
