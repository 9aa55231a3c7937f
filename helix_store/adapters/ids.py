"""Session ids for the ids of a framework, which may be longer or consist of several parts."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Final

from helix_store.core import validation
from helix_store.exceptions import InvalidPayload

_LONGEST_NAME: Final = 80
_NOT_READABLE: Final = re.compile(r"[^A-Za-z0-9._:@/+-]+")
_DERIVED: Final = re.compile(r".*~[0-9a-f]{32}", re.DOTALL)


def session_id_for(*parts: str) -> str:
    """Return the session id for a framework's id, which is the same in every process.

    A single part that is a valid session id is used unchanged. Everything else becomes a readable form of at
    most 80 characters, ``~`` and 32 hexadecimal digits of the SHA-256 of the parts. A single part that
    already looks like this is also converted, so that no one can construct an id that collides with another.
    Raises `InvalidPayload` if there are no parts, or if a part is not a string.
    """
    for index, part in enumerate(parts):
        if type(part) is not str:
            raise InvalidPayload(path=f"parts/{index}", reason=f"expected str, got {type(part).__name__}")
    if not any(parts):
        raise InvalidPayload(path="parts", reason="expected an id that is not empty")
    if len(parts) == 1 and not _DERIVED.fullmatch(parts[0]):
        try:
            return validation.identifier(parts[0], "session_id")
        except InvalidPayload:
            pass
    # JSON distinguishes ("a", "bc") from ("ab", "c"), and writes a lone surrogate as ASCII.
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    name = _NOT_READABLE.sub("-", ".".join(part[:_LONGEST_NAME] for part in parts))[:_LONGEST_NAME]
    return f"{name}~{digest}"
