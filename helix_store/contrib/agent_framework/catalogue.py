"""Messages of Microsoft Agent Framework in a form for people to read. It does not need the framework."""

from __future__ import annotations

from typing import Any, Final

from helix_store.core.transcript import CutText, Fields, Part, parts_of, role_of, with_rest
from helix_store.reports import ItemConversation, Said

MESSAGES: Final = "agent_framework/messages/"
"""The prefix of the lane of messages, which ends with the ``source_id`` of the history provider."""

_KNOWN: Final = {
    "text_reasoning": "reasoning",
    "function_result": "tool_result",
    **dict.fromkeys(("data", "uri", "hosted_file", "hosted_vector_store"), "file"),
}


def _says(message: dict[str, Any]) -> Said:
    """Return the content of a message."""
    fields = Fields(message)
    fields.take(("role",), lambda role: isinstance(role, str))
    fields.drop("type", ("message", "chat_message"))
    contents = fields.take(("contents",), lambda contents: isinstance(contents, list)) or []
    parts = [part for each in contents for part in _parts(each)]
    return Said(role_of(message), with_rest(parts, fields.rest, name="message"))


def _parts(content: Any) -> list[Part]:
    if not isinstance(content, dict):
        return parts_of({"content": content})
    fields = {name: value for name, value in content.items() if name != "type"}
    match content.get("type"):
        case "function_result":
            failed = content.get("exception") is not None
            return parts_of({"content": {**fields, "type": "tool_result", "is_error": failed}})
        case "error" if isinstance(text := content.get("message"), str):
            del fields["message"]
            return [Part(kind="other", text=text, name="error", is_error=True, rest=Fields(fields).rest)]
        case str(kind) if kind in _KNOWN:
            return parts_of({"content": _typed(fields, kind)})
    return parts_of({"content": content})


def _typed(fields: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a content in a form that `parts_of` understands. A file without a media type has its kind."""
    known = {**fields, "type": _KNOWN[kind]}
    if _KNOWN[kind] != "file":
        return known
    uri = known.pop("vector_store_id", None) or known.get("uri")
    if isinstance(uri, CutText) and not uri.startswith("data:"):
        uri = f"{uri}…"
    named = {} if known.get("media_type") else {"title": kind}
    return {**known, **named, **({} if uri is None else {"uri": uri})}


CONVERSATION: Final = ItemConversation("Microsoft Agent Framework", _says, lane=MESSAGES)
