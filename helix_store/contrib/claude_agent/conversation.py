"""The entries of a transcript as messages. Transcripts of sub-agents are other threads of the session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.core.transcript import Part, parts_of, role_of
from helix_store.reports import ItemConversation, Said


def _says(entry: dict[str, Any]) -> Said:
    message, kind = entry.get("message"), str(entry.get("type", "entry"))
    at = _moment(entry.get("timestamp"))
    if isinstance(message, Mapping):
        return Said(role_of(message), parts_of(message), at)
    text = next((entry[key] for key in ("content", "summary") if isinstance(entry.get(key), str)), None)
    if text is not None:
        return Said(kind, [Part(kind="text", text=text)], at)
    return Said(kind, [Part(kind="other", text=json.dumps(entry, ensure_ascii=False), name=kind)], at)


def _moment(timestamp: Any) -> datetime | None:
    try:
        at = datetime.fromisoformat(timestamp)
    except (TypeError, ValueError):
        return None
    return at if at.tzinfo is not None else None


CONVERSATION = ItemConversation("Claude Agent SDK", _says, lane="", of=ClaudeSession)
