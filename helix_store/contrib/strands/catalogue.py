"""The messages of Strands' agents, in the form of Bedrock's Converse API. Each agent is a thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from helix_store.core.transcript import Fields, parts_of, role_of, with_rest
from helix_store.reports import ItemConversation, Said

_REDACTED: Final = "redact_message"


def _says(stored: dict[str, Any]) -> Said:
    """Return the content of a message. A message that a guardrail has redacted is not shown as it was."""
    shown = {key: value for key, value in stored.items() if key != "message" or not stored.get(_REDACTED)}
    key = _REDACTED if stored.get(_REDACTED) else "message"
    fields = Fields(shown)
    message = fields.take((key,), lambda message: isinstance(message, Mapping))
    if message is None:
        # This is the start of a message that is too long to be read as a whole.
        return Said("?", parts_of({"content": shown.get(key)}), stored=shown)
    parts = with_rest(parts_of(message), fields.rest, name="message")
    return Said(role_of(message), parts, stored=shown)


CONVERSATION = ItemConversation("Strands Agents", _says, lane="messages/")
