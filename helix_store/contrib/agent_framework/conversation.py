"""Messages of Microsoft Agent Framework for people to read. It does not need the framework."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from helix_store.contrib.agent_framework.lanes import MESSAGES
from helix_store.core.transcript import CutText, Part
from helix_store.reports import ItemConversation, Said

__all__ = ["CONVERSATION"]

_FILES: Final = frozenset({"data", "uri", "hosted_file", "hosted_vector_store"})


def _says(message: dict[str, Any]) -> Said:
    """Return the content of a message."""
    role, contents = message.get("role"), message.get("contents")
    listed = contents if isinstance(contents, list) else []
    parts = [_part(each) for each in listed if isinstance(each, dict)]
    return Said(role if isinstance(role, str) else "?", parts)


def _part(content: Mapping[str, Any]) -> Part:
    call_id = content.get("call_id")
    called = call_id if isinstance(call_id, str) else None
    match content:
        case {"type": "text", "text": str(text)}:
            return Part(kind="text", text=text)
        case {"type": "text_reasoning", "text": str(text)}:
            return Part(kind="thinking", text=text)
        case {"type": "function_call"}:
            arguments = _text(content.get("arguments"))
            return Part(kind="call", text=arguments, name=_name(content), call_id=called)
        case {"type": "function_result"}:
            failed = content.get("exception") is not None
            return Part(kind="result", text=_text(content.get("result")), call_id=called, is_error=failed)
        case {"type": "error"}:
            return Part(kind="other", text=_text(content.get("message")), name="error", is_error=True)
        case {"type": str(kind)} if kind in _FILES:
            return _file(content)
    return Part(kind="other", text=_text(content))


def _name(content: Mapping[str, Any]) -> str:
    name = content.get("name")
    return name if isinstance(name, str) else ""


def _file(content: Mapping[str, Any]) -> Part:
    uri = content.get("uri") or content.get("file_id") or content.get("vector_store_id") or ""
    head, comma, data = str(uri).partition(";base64,")
    where = f"{len(data.rstrip('=')) * 3 // 4:,} bytes" if head.startswith("data:") and comma else str(uri)
    if isinstance(uri, CutText):
        where = f"more than {where}" if comma else f"{where}…"
    return Part(kind="file", text=where, name=str(content.get("media_type") or content.get("type")))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


CONVERSATION: Final = ItemConversation("Microsoft Agent Framework", _says, lane=MESSAGES)
