"""The items of a session as messages. An item of the Responses API is a message, a call or a result."""

from __future__ import annotations

import json
from typing import Any

from helix_store.core.transcript import Part, parts_of
from helix_store.reports import ItemConversation, Said


def _says(item: dict[str, Any]) -> Said:
    kind = str(item.get("type", "message"))
    role = item.get("role")
    if not isinstance(role, str):
        role = "tool" if kind.endswith("_output") else "assistant"
    if parts := parts_of({**item, "role": role}):
        return Said(role, parts)
    # This is a call of a hosted tool, such as a web search.
    return Said(role, [Part(kind="other", text=json.dumps(item, ensure_ascii=False), name=kind)])


CONVERSATION = ItemConversation("OpenAI Agents SDK", _says, lane="main")
"""Branches of a session are lanes. Every session of the SDK begins with ``main``."""
