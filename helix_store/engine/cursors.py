"""Page cursors: opaque, signed, and bound to the query that returned them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from django.core import signing

from helix_store.exceptions import InvalidCursor

_SALT = "helix_store.cursor"
_LONGEST = 4_096


def _fingerprint(query: object) -> str:
    text = json.dumps(query, sort_keys=True, default=lambda value: [type(value).__name__, str(value)])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def write_cursor(position: list[Any], *, query: object) -> str:
    """Return a cursor for the page after ``position``. The next call must repeat ``query``."""
    return signing.dumps([_fingerprint(query), *position], salt=_SALT)


def read_cursor(cursor: str, *, query: object) -> list[Any]:
    """Return the position in a cursor. Raises `InvalidCursor` if it is forged or belongs to another query."""
    if not isinstance(cursor, str) or len(cursor) > _LONGEST:
        raise InvalidCursor
    try:
        fingerprint, *position = signing.loads(cursor, salt=_SALT)
    except (signing.BadSignature, ValueError, TypeError) as exc:
        raise InvalidCursor from exc
    if fingerprint != _fingerprint(query):
        raise InvalidCursor("The cursor belongs to another query; start from the first page.")
    return list(position)
