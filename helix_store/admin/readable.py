"""Stored values as text that a person can read, and that any page can be encoded with."""

from __future__ import annotations

import json
import re
from typing import Any, Final

__all__ = ["HIDDEN", "hide_secrets", "json_start", "one_line", "printable"]

# A page with a lone surrogate cannot be encoded; marks that turn the reading direction make one text look
# like another.
_NOT_PRINTABLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_write_in_pieces = json.JSONEncoder(indent=2, ensure_ascii=False).iterencode

HIDDEN: Final = "[hidden]"

_NO_SECRETS: Final = frozenset(
    {"trace_id", "span_id", "parent_id", "parent_span_id", "trace_flags", "traceparent", "sampled"}
)


def printable(text: str) -> str:
    """The text with what cannot be seen as escapes."""
    return _NOT_PRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str, limit: int) -> str:
    """The beginning of a text in one line."""
    line = " ".join(printable(text[: 4 * limit]).split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[:limit].rstrip() + "…"


def json_start(value: Any, limit: int) -> tuple[str, bool]:
    """The first ``limit`` characters of a value as indented JSON, and whether there are more.

    The rest is never written. Raises ``RecursionError`` for a value nested deeper than Python's stack.
    """
    pieces: list[str] = []
    length = 0
    for piece in _write_in_pieces(value):
        pieces.append(piece)
        length += len(piece)
        if length > limit:
            return "".join(pieces)[:limit], True
    return "".join(pieces), False


def hide_secrets(tracing: Any) -> Any:
    """A tracing context with every value hidden but those that only identify a trace.

    Vendors put keys and headers there under names of their own, so names that look secret are not enough.
    """
    if isinstance(tracing, dict):
        return {
            key: value if key in _NO_SECRETS and not isinstance(value, dict | list) else hide_secrets(value)
            for key, value in tracing.items()
        }
    if isinstance(tracing, list):
        return [hide_secrets(item) for item in tracing]
    return None if tracing is None else HIDDEN
