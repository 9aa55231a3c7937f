"""The start of a stored message: its content, as far as the first characters contain it."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from django.db.models.functions import Substr

from helix_store.core.payloads import decode
from helix_store.core.transcript import CutText
from helix_store.exceptions import IntegrityFault
from helix_store.reports.payloads import PayloadText

PREVIEW_SOURCE: Final = 1_500
"""The number of characters of the stored text that are read for a preview."""

_DEEPEST: Final = 8
"""The levels of a message that was cut off that are read; below them, its text is shown as it is stored."""

_BETWEEN: Final = re.compile(r"[\s,:]*")
_CUT_ESCAPE: Final = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)$")
_read_value = json.JSONDecoder().raw_decode


def payload_start(limit: int = PREVIEW_SOURCE) -> PayloadText:
    """Return the start of the column ``payload``, and one more character if there are more."""
    return PayloadText(Substr("payload", 1, limit + 1))


def start_text(start: str | bytes) -> str:
    """Return the start of a payload that a statement has read; on SQLite it must be cast to a blob.

    SQLite stores any bytes as text, and fails to return bytes that are not UTF-8.
    """
    return start if isinstance(start, str) else start.decode(errors="replace")


def read_start(start: str, limit: int = PREVIEW_SOURCE) -> tuple[dict[str, Any] | None, bool]:
    """Return the message of a `payload_start`, or ``None`` if it is unreadable, and whether it is cut off."""
    is_cut = len(start) > limit
    try:
        message = message_start(start) if is_cut else decode(start)
    except (IntegrityFault, RecursionError):
        return None, is_cut
    return (message if isinstance(message, dict) else None), is_cut


def said_at_start(start: str) -> str | None:
    """Return the content of a message whose stored text begins with ``start``, or ``None`` if unreadable.

    A text of more than `PREVIEW_SOURCE` characters is treated as cut off.
    """
    message, is_cut = read_start(start)
    if message is None:
        return None
    return " ".join(message_parts(message)) + ("…" if is_cut else "")


def message_parts(message: dict[str, Any]) -> list[str]:
    """Return the texts, followed by the tool calls."""
    return _texts(message.get("content")) + [f"→ {name}({arguments})" for name, arguments in _calls(message)]


def _texts(content: Any) -> list[str]:
    """Return plain text, or the text of each content part. A part without text is represented by its type."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [_text_of_part(part) for part in content]
    return [] if content is None else [json.dumps(content, ensure_ascii=False)]


def _text_of_part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    for key in ("text", "thinking", "content"):
        if isinstance(part.get(key), str):
            return str(part[key])
    return f"[{part.get('type', 'part')}]"


def _calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    return [
        (str(function.get("name", "?")), str(function.get("arguments", "")))
        for function in functions
        if isinstance(function, dict)
    ]


def message_start(start: str) -> dict[str, Any] | None:
    """Return the readable start of a message that was cut off, including the text at the cut.

    Return ``None`` if nothing can be read.
    """
    if start[:1] == "~":
        start = start[1:].encode("latin-1", "replace").decode("utf-8", "replace")
    try:
        message, _ = _read_cut(start, 0, _DEEPEST)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and message else None


def _read_cut(text: str, position: int, depth: int) -> tuple[Any, int]:
    """Return the value at a position and the position after it, which is the end if the value is cut off."""
    try:
        return _read_value(text, position)
    except ValueError:
        if depth and text[position : position + 1] in ("{", "["):
            return _members_of_cut(text, position, depth - 1), len(text)
        return _cut_value(text[position:]), len(text)


def _members_of_cut(text: str, position: int, depth: int) -> dict[str, Any] | list[Any]:
    """Return the members of an object or list that is cut off, with the readable part of the last one."""
    found: dict[str, Any] = {}
    items: list[Any] = []
    is_object = text[position] == "{"
    position = _after_separator(text, position + 1)
    try:
        while position < len(text):
            if is_object:
                key, position = _read_value(text, position)
                if not isinstance(key, str):
                    break
                value, position = _read_cut(text, _after_separator(text, position), depth)
                found[key] = value
            else:
                value, position = _read_cut(text, position, depth)
                items.append(value)
            position = _after_separator(text, position)
    except ValueError:
        pass  # The cut is in a key.
    return found if is_object else items


def _after_separator(text: str, position: int) -> int:
    match = _BETWEEN.match(text, position)
    return position if match is None else match.end()


def _cut_value(rest: str) -> str:
    """Return the start of a text without its quotes, or any other value as it is written."""
    if rest[:1] != '"':
        return rest
    if dangling := _CUT_ESCAPE.search(rest):
        rest = rest[: dangling.start(1)]
    return CutText(json.loads(rest + '"'))
