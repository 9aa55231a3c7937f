"""The usage that an event of ADK reports."""

from __future__ import annotations

from google.adk.events.event import Event

from helix_store.adapters import session_id_for
from helix_store.contrib.usage import count_of, response_entry
from helix_store.core.usage import UsageEntry


def usage_of(event: Event, *, session_id: str, model: str) -> UsageEntry | None:
    """Return the ledger's entry for a model's response, or ``None`` for an event without usage. It has the id
    of the event, so that a copy in another session does not count again.
    """
    usage = event.usage_metadata
    if usage is None:
        return None
    thoughts = count_of(usage.thoughts_token_count)
    return response_entry(
        session_id,
        session_id_for(f"google_adk:{event.id}"),
        source=session_id_for(event.author or "agent"),
        model=session_id_for(event.model_version or model),
        prompt=count_of(usage.prompt_token_count) + count_of(usage.tool_use_prompt_token_count),
        completion=count_of(usage.candidates_token_count) + thoughts,
        reasoning=thoughts,
        cached=count_of(usage.cached_content_token_count),
    )
