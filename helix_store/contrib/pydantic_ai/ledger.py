"""The usage that a save adds to a conversation, as entries of the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pydantic_ai.conversation_store import ConversationEntry, ConversationRecord
from pydantic_ai.messages import ModelResponse
from pydantic_ai.usage import RunUsage

from helix_store.adapters import session_id_for
from helix_store.core import validation
from helix_store.core.types import UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource

_UNKNOWN_MODEL: Final = "unknown"
_COUNTED: Final = ("requests", "tool_calls")
"""Counts of a run other than tokens, which become custom entries."""


def usage_of_save(
    session_id: str,
    record: ConversationRecord,
    stored: ConversationRecord | None,
    entries: Sequence[ConversationEntry],
    *,
    source: str,
) -> list[UsageEntry]:
    """Return entries for the difference between ``record.usage`` and ``stored``: by model, then the counts. A
    fork begins with the usage of its source conversation, which the ledger already has. The ids are derived
    from the revision, so a save is recorded once.
    """
    if stored is None and record.forked_from is not None:
        return []
    spent = record.usage - (stored.usage if stored is not None else RunUsage())

    def entry(kind: UsageKind, counted: str, **fields: object) -> UsageEntry:
        return UsageEntry(
            id=session_id_for("usage", session_id, record.revision, kind.value, counted),
            kind=kind,
            session_id=session_id,
            step_count=0,
            timestamp=validation.datetime_to_milliseconds(record.updated_at),
            source=UsageSource(type="agent", name=source),
            **fields,  # type: ignore[arg-type]  # the fields of the kind
        )

    tokens = [
        entry(UsageKind.TOKENS, model, model=model, tokens=_tokens(usage), cost_usd=usage.cost)
        for model, usage in _by_model(spent, entries)
    ]
    counts = [
        entry(UsageKind.CUSTOM, name, type=source, name=name, amount=getattr(spent, name))
        for name in _COUNTED
        if getattr(spent, name) > 0
    ]
    return tokens + counts


def _by_model(spent: RunUsage, entries: Sequence[ConversationEntry]) -> Iterator[tuple[str, RunUsage]]:
    """Yield the tokens of each model from the new responses; the rest belongs to the last model."""
    if _is_negative(spent):
        return
    responses = [entry.message for entry in entries if isinstance(entry.message, ModelResponse)]
    by_model: dict[str, RunUsage] = {}
    for response in responses:
        by_model.setdefault(_model_of(response), RunUsage()).incr(response.usage)
    rest = spent - sum(by_model.values(), RunUsage())
    last = _model_of(responses[-1]) if responses else _UNKNOWN_MODEL
    if _is_negative(rest):
        # The responses do not account for the usage, so only the sum is known.
        by_model = {last: spent}
    else:
        by_model.setdefault(last, RunUsage()).incr(rest)
    for model, usage in by_model.items():
        if usage.total_tokens or usage.cost:
            yield model, usage


def _model_of(response: ModelResponse) -> str:
    return session_id_for(response.model_name) if response.model_name else _UNKNOWN_MODEL


def _tokens(usage: RunUsage) -> TokenCounts:
    return TokenCounts(
        prompt=usage.input_tokens,
        completion=usage.output_tokens,
        reasoning=usage.output_reasoning_tokens,
        cached=usage.cache_read_tokens,
        total=usage.total_tokens,
    )


def _is_negative(usage: RunUsage) -> bool:
    return any(count < 0 for count in (*_tokens(usage).to_dict().values(), usage.cost or 0))
