"""The usage that a Strands message reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from helix_store.core import validation
from helix_store.core.types import UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.exceptions import InvalidPayload

__all__ = ["messages_of", "usage_of"]


def messages_of(multi_agent: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the messages with an id from the agents of a graph or swarm, including nested ones.

    Without an id, a message would be recorded again by each update.
    """
    nodes = getattr(multi_agent, "nodes", None)
    for node in nodes.values() if isinstance(nodes, dict) else ():
        messages = getattr(node.executor, "messages", None)
        if isinstance(messages, list):
            yield from (message for message in messages if "tracking_id" in message)
        yield from messages_of(node.executor)


def usage_of(
    message: Mapping[str, Any], *, session_id: str, agent_type: str, model: str, now_ms: int
) -> UsageEntry | None:
    """Return the ledger's entry for a model's response, or ``None`` for a message without usage. It has the
    id of the message, so that a copy in another session does not count again.
    """
    match message:
        case {"metadata": {"usage": dict(usage)}}:
            pass
        case _:
            return None
    prompt, completion = _count(usage, "inputTokens"), _count(usage, "outputTokens")
    cached = _count(usage, "cacheReadInputTokens")
    if prompt + completion != _count(usage, "totalTokens"):
        # This provider reports cached tokens in addition to the input tokens.
        prompt += cached + _count(usage, "cacheWriteInputTokens")
    if not prompt + completion:
        return None
    return UsageEntry(
        kind=UsageKind.TOKENS,
        id=_id_of(message),
        session_id=session_id,
        step_count=0,
        timestamp=now_ms,
        source=UsageSource(type="agent", name=agent_type),
        model=model,
        tokens=TokenCounts(prompt=prompt, completion=completion, cached=cached, total=prompt + completion),
    )


def _id_of(message: Mapping[str, Any]) -> str | None:
    try:
        return validation.identifier(f"strands:{message['tracking_id']}", "id")
    except (KeyError, InvalidPayload):
        return None


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if type(value) is int and 0 < value < 2**40 else 0
