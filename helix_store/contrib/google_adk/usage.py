"""The usage that an event of ADK reports."""

from __future__ import annotations

from google.adk.events.event import Event

from helix_store.adapters import session_id_for
from helix_store.core.types import UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource

__all__ = ["usage_of"]


def usage_of(event: Event, *, session_id: str, model: str, now_ms: int) -> UsageEntry | None:
    """Return the ledger's entry for a model's response, or ``None`` for an event without usage. It has the id
    of the event, so that a copy in another session does not count again.
    """
    usage = event.usage_metadata
    if usage is None:
        return None
    prompt = _count(usage.prompt_token_count) + _count(usage.tool_use_prompt_token_count)
    thoughts = _count(usage.thoughts_token_count)
    completion = _count(usage.candidates_token_count) + thoughts
    if not prompt + completion:
        return None
    return UsageEntry(
        kind=UsageKind.TOKENS,
        id=session_id_for(f"google_adk:{event.id}"),
        session_id=session_id,
        step_count=0,
        timestamp=now_ms,
        source=UsageSource(type="agent", name=session_id_for(event.author or "agent")),
        model=session_id_for(event.model_version or model),
        tokens=TokenCounts(
            prompt=prompt,
            completion=completion,
            reasoning=thoughts,
            cached=_count(usage.cached_content_token_count),
            total=prompt + completion,
        ),
    )


def _count(value: int | None) -> int:
    return value if value is not None and 0 < value < 2**40 else 0
