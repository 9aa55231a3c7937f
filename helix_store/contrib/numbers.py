"""Payloads with numbers that JSON cannot represent: Python reads 1e400 as infinity, and writes NaN."""

from __future__ import annotations

import json
from typing import Any, Final

from helix_store.exceptions import IntegrityFault

__all__ = ["as_payload", "from_payload", "with_numbers_as_text"]

_AS_TEXT: Final = "~json"
"""The only field of a payload that holds its document as text."""


def as_payload(document: Any) -> Any:
    """Return a document as a payload, unchanged unless it would be read as the text of another one."""
    return with_numbers_as_text(document) if _is_text(document) else document


def with_numbers_as_text(document: Any) -> Any:
    """Return a document as text in a payload, or unchanged if text would change it."""
    try:
        text = json.dumps(document)
        return {_AS_TEXT: text} if repr(json.loads(text)) == repr(document) else document
    except (TypeError, ValueError, RecursionError):
        return document


def from_payload(payload: Any) -> Any:
    """Return the document of a payload. Raises `IntegrityFault` for text that cannot be read."""
    if not _is_text(payload):
        return payload
    try:
        return json.loads(payload[_AS_TEXT])
    except (TypeError, ValueError, RecursionError):
        pass
    # Raised here, because the parser's error holds the whole text and would become the context.
    raise IntegrityFault("A stored document is not readable JSON; other rows are not affected.")


def _is_text(payload: Any) -> bool:
    return isinstance(payload, dict) and payload.keys() == {_AS_TEXT}
