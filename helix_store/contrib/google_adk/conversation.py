"""Events of ADK as messages for people to read. It does not need ADK."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from helix_store.core.transcript import Part, parts_of
from helix_store.reports import ItemConversation, Said

EVENTS: Final = "google_adk/events/"
"""The prefix of the lane of events, which ends with the name of the app."""


def _says(event: dict[str, Any]) -> Said:
    """Return the content of an event. The role is the event's author: the user, or the name of an agent."""
    content = event.get("content")
    listed = content.get("parts") if isinstance(content, dict) else None
    blocks = listed if isinstance(listed, list) else []
    parts = [part for each in blocks if isinstance(each, dict) for part in _parts(each)]
    if isinstance(error := event.get("error_message"), str):
        parts.append(Part(kind="other", text=error, name="error", is_error=True))
    author = event.get("author")
    return Said(author if isinstance(author, str) and author else "?", parts, _time(event.get("timestamp")))


def _parts(part: Mapping[str, Any]) -> Iterator[Part]:
    for field, value in part.items():
        match field, value:
            case "text", str():
                yield Part(kind="thinking" if part.get("thought") else "text", text=value)
            case "function_call", dict():
                yield from parts_of({"content": {**value, "type": "tool_call"}})
            case "function_response", dict():
                response = value.get("response")
                failed = isinstance(response, dict) and "error" in response
                result = {**value, "type": "tool_result", "result": response, "is_error": failed}
                yield from parts_of({"content": result})
            case "inline_data" | "file_data", dict():
                names = {"name": value.get("display_name"), "uri": value.get("file_uri")}
                yield from parts_of({"content": {**value, **names, "type": "file"}})
            case ("thought" | "thought_signature", _) | (_, str() | bool() | None):
                continue
            case _:
                yield Part(kind="other", text=json.dumps({field: value}, ensure_ascii=False))


def _time(timestamp: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(timestamp, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


CONVERSATION: Final = ItemConversation("Google ADK", _says, lane=EVENTS)
