"""Messages as the API sees them: what makes one, and what is left without the thinking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.payloads import encode_all
from helix_store.core.types import Message
from helix_store.sessions.requests import EncodedMessage

__all__ = ["encode_messages", "without_thinking"]

_THINKING_PARTS = frozenset({"thinking", "reasoning"})


def encode_messages(messages: Sequence[Message], limits: Limits) -> list[EncodedMessage]:
    """Check and encode messages in order. Raises `InvalidPayload` and `LimitExceeded` naming the message."""
    roles = validation.messages(messages)
    texts = encode_all(messages, limit=limits.max_message_bytes, name="max_message_bytes", path="/messages")
    return [EncodedMessage(role, text) for role, text in zip(roles, texts, strict=True)]


def without_thinking(message: Message) -> Message:
    """The message without its ``thinking`` key and without content parts of type thinking or reasoning."""
    kept = {key: value for key, value in message.items() if key != "thinking"}
    if isinstance(kept.get("content"), list):
        kept["content"] = [part for part in kept["content"] if not _is_thinking(part)]
    return kept


def _is_thinking(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _THINKING_PARTS
