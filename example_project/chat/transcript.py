"""Messages as the page shows them: one entry for each, from the server and from the stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from helix_store import Message, SessionState

__all__ = ["BLANK", "entries", "is_answered", "question"]

_TITLES: Final = {"user": "You", "assistant": "Guide"}
BLANK: Final = {"role": "assistant", "title": _TITLES["assistant"], "text": ""}
"""The entry that the agent writes into, word by word."""


def entries(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [_entry(message) for message in messages]


def is_answered(messages: Sequence[Message]) -> bool:
    """Whether nothing is left to do: the last word is the agent's, and it calls no tool."""
    return not messages or (messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"))


def question(state: SessionState) -> str:
    """What a person has to decide; empty if nothing."""
    asked = [call for call in state.pending_client_tool_calls.values() if "submitted_at" not in call]
    return "\n".join(f"May the agent run {call['tool_name']}?\n{_listed(call['input'])}" for call in asked)


def _entry(message: Message) -> dict[str, str]:
    role = message["role"]
    if role == "tool":
        return {"role": role, "title": message["name"], "text": _listed(json.loads(message["content"]))}
    return {"role": role, "title": _TITLES[role], "text": message["content"]}


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in values.items())
