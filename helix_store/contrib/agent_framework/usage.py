"""The usage that a response of Microsoft Agent Framework reports."""

from __future__ import annotations

import time
from typing import Any

from agent_framework import AgentResponse

from helix_store.adapters import session_id_for
from helix_store.core.types import UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource

__all__ = ["usage_of"]


def usage_of(response: AgentResponse[Any], *, agent: str, session_id: str, model: str) -> UsageEntry | None:
    """Return the ledger's entry for a response, or ``None`` if it has no usage. It has the id of the
    response, so that two providers of one agent record it once.
    """
    counts = dict(response.usage_details or {})
    prompt = _count(counts.get("input_token_count"))
    completion = _count(counts.get("output_token_count"))
    if not prompt + completion:
        return None
    named = getattr(response.raw_representation, "model", None)
    return UsageEntry(
        kind=UsageKind.TOKENS,
        id=_id_of(response, session_id),
        session_id=session_id,
        step_count=0,
        timestamp=time.time_ns() // 1_000_000,
        source=UsageSource(type="agent", name=session_id_for(agent)),
        model=session_id_for(named) if isinstance(named, str) and named else model,
        tokens=TokenCounts(
            prompt=prompt,
            completion=completion,
            reasoning=_count(counts.get("reasoning_output_token_count")),
            cached=_count(counts.get("cache_read_input_token_count")),
            total=prompt + completion,
        ),
    )


def _id_of(response: AgentResponse[Any], session_id: str) -> str | None:
    if response.response_id is None:
        return None
    return session_id_for("agent_framework", session_id, response.response_id)


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value < 2**40 else 0
