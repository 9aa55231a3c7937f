"""Payloads of items with numbers that JSON has not: Python reads 1e400 as infinity, and writes NaN."""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["as_payload", "from_payload", "with_numbers_as_text"]

_AS_TEXT: Final = "~json"
"""The only field of a payload that holds its document as text."""


def as_payload(document: Any) -> Any:
    """A document as a payload: as it is, unless it would be read as text of another one."""
    return with_numbers_as_text(document) if _is_text(document) else document


def with_numbers_as_text(document: Any) -> Any:
    """A document as text in a payload; as it is, if text would change it."""
    try:
        text = json.dumps(document)
        return {_AS_TEXT: text} if repr(json.loads(text)) == repr(document) else document
    except (TypeError, ValueError, RecursionError):
        return document


def from_payload(payload: Any) -> Any:
    """The document of a payload."""
    return json.loads(payload[_AS_TEXT]) if _is_text(payload) else payload


def _is_text(payload: Any) -> bool:
    return isinstance(payload, dict) and payload.keys() == {_AS_TEXT}
