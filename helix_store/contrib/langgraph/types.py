"""The types of stored bytes that an import accepts. This module does not import LangGraph."""

from __future__ import annotations

from typing import Any, Final

from helix_store.core import validation
from helix_store.exceptions import InvalidPayload

PLAIN_TYPES: Final = frozenset({"bytearray", "bytes", "msgpack", "null"})
"""The types that the default serializer writes. Reading them never builds an object that the bytes name."""

_registered: Final[set[str]] = set()


def register_types(*types: str) -> None:
    """Make imports and moves accept rows of these types, which a serializer of the project writes.

    Call it in ``AppConfig.ready()``. The types of LangGraph's default serializer are known, even with a
    cipher, such as ``msgpack+aes``. Raises `InvalidPayload` for a name that no column can hold.
    """
    _registered.update(validation.identifier(each, "types") for each in types)


def importable_type(value: Any, name: str = "type") -> str:
    """Return the type of a row to import. Raises `InvalidPayload` if the saver could not read it."""
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
