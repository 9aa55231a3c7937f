"""The messages for the page, with one entry for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from helix_store import Message, Post, SessionState

__all__ = ["BLANK", "entries", "is_answered", "question", "waiting"]

_TITLES: Final = {"user": "You", "assistant": "Guide"}
BLANK: Final = {"role": "assistant", "title": _TITLES["assistant"], "text": ""}
"""The entry to which the agent writes word by word."""


def entries(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [_entry(message) for message in messages]


def waiting(posts: Sequence[Post]) -> list[dict[str, str]]:
    """Return an entry for each message that the agent has not received."""
    return [
        {**_entry(post.message), "role": "user waiting", "post_id": post.post_id}
        for post in posts
        if post.message is not None
    ]


def is_answered(messages: Sequence[Message]) -> bool:
    """Return whether nothing is left to do: the last message is the agent's, and it calls no tool."""
    return not messages or (messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"))


def question(state: SessionState) -> str:
    """Return what a person must decide, or an empty text."""
    asked = [call for call in state.pending_client_tool_calls.values() if "submitted_at" not in call]
    return "\n".join(f"May the agent run {call['tool_name']}?\n{_listed(call['input'])}" for call in asked)


def _entry(message: Message) -> dict[str, str]:
    role = message["role"]
    if role == "tool":
        return {"role": role, "title": message["name"], "text": _listed(json.loads(message["content"]))}
    return {"role": role, "title": _TITLES[role], "text": message["content"]}


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in values.items())
