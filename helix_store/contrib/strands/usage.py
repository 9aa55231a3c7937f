"""The usage that a Strands message reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from helix_store.contrib.usage import count_of, response_entry
from helix_store.core import validation
from helix_store.core.usage import UsageEntry
from helix_store.exceptions import InvalidPayload


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
    message: Mapping[str, Any], *, session_id: str, agent_type: str, model: str
) -> UsageEntry | None:
    """Return the ledger's entry for a model's response, or ``None`` for a message without usage. It has the
    id of the message, so that a copy in another session does not count again.
    """
    match message:
        case {"metadata": {"usage": dict(usage)}}:
            pass
        case _:
            return None
    counts = {name: count_of(value) for name, value in usage.items()}
    prompt, completion = counts.get("inputTokens", 0), counts.get("outputTokens", 0)
    cached = counts.get("cacheReadInputTokens", 0)
    if prompt + completion != counts.get("totalTokens", 0):
        # This provider reports cached tokens in addition to the input tokens.
        prompt += cached + counts.get("cacheWriteInputTokens", 0)
    return response_entry(
        session_id,
        _id_of(message),
        source=agent_type,
        model=model,
        prompt=prompt,
        completion=completion,
        cached=cached,
    )


def _id_of(message: Mapping[str, Any]) -> str | None:
    try:
        return validation.identifier(f"strands:{message['tracking_id']}", "id")
    except (KeyError, InvalidPayload):
        return None
