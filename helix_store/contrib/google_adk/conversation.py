"""Events of ADK as messages for people to read. It does not need ADK."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from helix_store.contrib.google_adk.lanes import EVENTS
from helix_store.core.transcript import CutText, Part
from helix_store.reports import ItemConversation, Said

__all__ = ["CONVERSATION"]


def _says(event: dict[str, Any]) -> Said:
    """Return the content of an event. The role is the event's author: the user, or the name of an agent."""
    content = event.get("content")
    listed = content.get("parts") if isinstance(content, dict) else None
    parts = [part for each in _mappings(listed) for part in _parts(each)]
    if isinstance(error := event.get("error_message"), str):
        parts.append(Part(kind="other", text=error, name="error", is_error=True))
    author = event.get("author")
    return Said(author if isinstance(author, str) and author else "?", parts, _time(event.get("timestamp")))


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _parts(part: Mapping[str, Any]) -> Iterator[Part]:
    for field, value in part.items():
        match field, value:
            case "text", str():
                yield Part(kind="thinking" if part.get("thought") else "text", text=value)
            case "function_call", dict():
                yield Part(kind="call", text=_json(value.get("args")), **_named(value))
            case "function_response", dict():
                response = value.get("response")
                failed = isinstance(response, dict) and "error" in response
                yield Part(kind="result", text=_json(response), is_error=failed, **_named(value))
            case "inline_data" | "file_data", dict():
                yield _file(value)
            case ("thought" | "thought_signature", _) | (_, str() | bool() | None):
                continue
            case _:
                yield Part(kind="other", text=_json({field: value}))


def _named(value: Mapping[str, Any]) -> dict[str, Any]:
    name, call_id = value.get("name"), value.get("id")
    return {
        "name": name if isinstance(name, str) else "",
        "call_id": call_id if isinstance(call_id, str) else None,
    }


def _file(value: Mapping[str, Any]) -> Part:
    data, uri = value.get("data"), value.get("file_uri")
    size = f"{len(data.rstrip('=')) * 3 // 4:,} bytes" if isinstance(data, str) else ""
    if isinstance(data, CutText):
        size = f"more than {size}"
    name = value.get("display_name") or value.get("mime_type") or ""
    return Part(kind="file", text=uri if isinstance(uri, str) else size, name=str(name))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _time(timestamp: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(timestamp, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


CONVERSATION: Final = ItemConversation("Google ADK", _says, lane=EVENTS)
