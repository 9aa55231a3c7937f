"""Messages of Microsoft Agent Framework in a form for people to read. It does not need the framework."""

from __future__ import annotations

import json
from typing import Any, Final

from helix_store.core.transcript import CutText, Part, parts_of, role_of
from helix_store.reports import ItemConversation, Said

MESSAGES: Final = "agent_framework/messages/"
"""The prefix of the lane of messages, which ends with the ``source_id`` of the history provider."""

_FILES: Final = frozenset({"data", "uri", "hosted_file", "hosted_vector_store"})


def _says(message: dict[str, Any]) -> Said:
    """Return the content of a message."""
    contents = message.get("contents")
    listed = contents if isinstance(contents, list) else []
    return Said(role_of(message), [_part(each) for each in listed if isinstance(each, dict)])


def _part(content: dict[str, Any]) -> Part:
    match content:
        case {"type": "text", "text": str()} | {"type": "function_call"}:
            return _known(content)
        case {"type": "text_reasoning", "text": str()}:
            return _known({**content, "type": "reasoning"})
        case {"type": "function_result"}:
            failed = content.get("exception") is not None
            return _known({**content, "type": "tool_result", "is_error": failed})
        case {"type": "error", "message": str(text)}:
            return Part(kind="other", text=text, name="error", is_error=True)
        case {"type": str(kind)} if kind in _FILES:
            uri = content.get("uri") or content.get("file_id") or content.get("vector_store_id")
            if isinstance(uri, CutText) and not uri.startswith("data:"):
                uri = f"{uri}…"
            return _known({"type": "file", "uri": uri, "name": content.get("media_type") or kind})
    return Part(kind="other", text=json.dumps(content, ensure_ascii=False))


def _known(content: dict[str, Any]) -> Part:
    """Return a part in a form that `parts_of` understands."""
    return parts_of({"content": content})[0]


CONVERSATION: Final = ItemConversation("Microsoft Agent Framework", _says, lane=MESSAGES)
