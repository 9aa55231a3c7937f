"""The messages of Strands' agents, in the form of Bedrock's Converse API. Each agent is a thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from helix_store.core.transcript import parts_of, role_of
from helix_store.reports import ItemConversation, Said

_FILES: Final = ("image", "document", "video")


def _says(stored: dict[str, Any]) -> Said:
    message = stored.get("redact_message") or stored.get("message")
    if not isinstance(message, Mapping):
        # This is the start of a message that is too long to be read as a whole.
        return Said("?", parts_of({"content": message}))
    content = message.get("content")
    blocks = [_block(block) for block in content if block] if isinstance(content, list) else content
    return Said(role_of(message), parts_of({"content": blocks}))


def _block(block: Any) -> Any:
    """Return a block in a form that `parts_of` understands."""
    match block:
        case {"toolUse": {"toolUseId": call_id, **use}}:
            return {"type": "tool_use", "id": call_id, **use}
        case {"toolResult": {"toolUseId": call_id, **result}}:
            is_error = result.get("status") == "error"
            return {"type": "tool_result", "tool_use_id": call_id, "is_error": is_error, **result}
        case {"reasoningContent": {"reasoningText": {"text": text}}}:
            return {"type": "thinking", "thinking": text}
    for kind in _FILES:
        if isinstance(block, Mapping) and isinstance(block.get(kind), Mapping):
            return {"type": kind, **block[kind], **_bytes_of(block[kind].get("source"))}
    return block


def _bytes_of(source: Any) -> dict[str, Any]:
    """Return the URL of a file, or its bytes, which Strands wraps for JSON."""
    match source:
        case {"bytes": {"data": str(data)}}:
            return {"source": {"data": data}}
        case {"location": Mapping() as location}:
            return {"source": location}
    return {}


CONVERSATION = ItemConversation("Strands Agents", _says, lane="messages/")
