"""What a message says: all of it, or one line from no more than the beginning of its stored text."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from helix_store.admin.readable import one_line
from helix_store.core.payloads import decode
from helix_store.exceptions import IntegrityFault

__all__ = ["PREVIEW_SOURCE", "message_preview", "message_text"]

PREVIEW_SOURCE: Final = 1_500
"""Characters of the stored text that a preview needs."""

_PREVIEW_LENGTH: Final = 180

_BETWEEN: Final = re.compile(r"[\s,:]*")
_CUT_ESCAPE: Final = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)$")
_read_value = json.JSONDecoder().raw_decode


def message_preview(start: str) -> str | None:
    """The preview of a message whose stored text begins with ``start``, or ``None`` when it cannot be read.

    A text of more than `PREVIEW_SOURCE` characters is taken as cut there.
    """
    try:
        message = _read_start(start) if len(start) > PREVIEW_SOURCE else decode(start)
    except IntegrityFault:
        return None
    if not isinstance(message, dict):
        return None
    line = one_line(" ".join(_parts(message)), _PREVIEW_LENGTH)
    return f"{line}…" if len(start) > PREVIEW_SOURCE and not line.endswith("…") else line


def message_text(stored: str) -> str | None:
    """All that a message says, a paragraph per part, or ``None`` when it cannot be read."""
    try:
        message = decode(stored)
    except IntegrityFault:
        return None
    return "\n\n".join(_parts(message)) if isinstance(message, dict) else None


def _parts(message: dict[str, Any]) -> list[str]:
    """What is spoken, then what is called."""
    return _texts(message.get("content")) + [f"→ {name}({arguments})" for name, arguments in _calls(message)]


def _texts(content: Any) -> list[str]:
    """Plain text, or the text of each content part; a part without text is named by its type."""
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


def _read_start(start: str) -> dict[str, Any] | None:
    """The members of an object that stand before the cut, with a text that the cut goes through.

    ``None`` when it has none.
    """
    if start[:1] == "~":
        start = start[1:].encode("latin-1", "replace").decode("utf-8", "replace")
    if start[:1] != "{":
        return None
    members: dict[str, Any] = {}
    position = 1
    try:
        while True:
            position = _after_separator(start, position)
            key, position = _read_value(start, position)
            position = _after_separator(start, position)
            try:
                members[key], position = _read_value(start, position)
            except ValueError:
                members[key] = _cut_value(start[position:])
                return members
    except (ValueError, RecursionError):
        return members or None


def _after_separator(text: str, position: int) -> int:
    match = _BETWEEN.match(text, position)
    return position if match is None else match.end()


def _cut_value(rest: str) -> str:
    """A text as far as it goes; anything else as it is written."""
    if rest[:1] != '"':
        return rest
    if dangling := _CUT_ESCAPE.search(rest):
        rest = rest[: dangling.start(1)]
    return str(json.loads(rest + '"'))
