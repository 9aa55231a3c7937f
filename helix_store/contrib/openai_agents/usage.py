"""The usage of turns in the usage ledger.

An entry of a turn has the number of the turn as ``step_count``, and the branch as ``run_id``.
"""

from __future__ import annotations

import time
from functools import partial

from agents.result import RunResultBase
from agents.usage import RequestUsage, Usage

from helix_store.adapters import SessionAdapter, session_id_for
from helix_store.contrib.usage import record_usage
from helix_store.core.types import UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.engine.async_twins import async_twin
from helix_store.stores import DatabaseUsageStore


class TurnUsage:
    """Records and adds up the requests of one session."""

    def __init__(self, session_id: str, *, using: str | None, tenant: str, user_id: str | None) -> None:
        self.session_id = session_id
        self._sessions = SessionAdapter("openai_agents", using, tenant=tenant, user_id=user_id)
        self._ledger = DatabaseUsageStore(using=using, tenant=tenant)

    def record(self, result: RunResultBase, *, branch: str, turn: int, anchor: int) -> None:
        """Record each request of a run. ``anchor`` distinguishes turns with the same number."""
        agent = result.last_agent
        model = agent.model if isinstance(agent.model, str) else getattr(agent.model, "model", None)
        run_id = session_id_for(branch)
        now = time.time_ns() // 1_000_000
        entries = [
            UsageEntry(
                id=_entry_id(self.session_id, branch, anchor, index, tokens),
                kind=UsageKind.TOKENS,
                session_id=self.session_id,
                step_count=turn,
                run_id=run_id,
                timestamp=now,
                source=UsageSource(type="agent", name=session_id_for(agent.name or "agent")),
                model=session_id_for(str(model or "default")),
                tokens=tokens,
            )
            for index, tokens in enumerate(_requests(result.context_wrapper.usage))
        ]
        if entries:
            self._sessions.write(self.session_id, partial(record_usage, entries=entries))

    def total(self, *, branch: str | None) -> dict[str, int] | None:
        """Return the sums of one branch or of all, or ``None`` if there are no entries."""
        entries = self._entries(branch)
        if not entries:
            return None
        turns = {(entry.run_id, entry.step_count) for entry in entries}
        return {**_sums(entries), "total_turns": len(turns)}

    def by_turn(self, *, branch: str) -> dict[int, dict[str, int]]:
        """Return the sums of each turn of a branch that has entries."""
        turns: dict[int, list[UsageEntry]] = {}
        for entry in self._entries(branch):
            turns.setdefault(entry.step_count, []).append(entry)
        return {number: _sums(entries) for number, entries in sorted(turns.items())}

    def _entries(self, branch: str | None) -> list[UsageEntry]:
        run_id = None if branch is None else session_id_for(branch)
        entries = self._ledger.get_entries(self.session_id, kinds=UsageKind.TOKENS)
        return [entry for entry in entries if run_id is None or entry.run_id == run_id]

    arecord = async_twin(record)
    atotal = async_twin(total)
    aby_turn = async_twin(by_turn)


def _requests(usage: Usage) -> list[TokenCounts]:
    """Return the requests of a run, preceded by any usage that is known only for the whole run, as one
    request. It comes first, so it keeps its place if the run continues and makes more requests.
    """
    requests = [_tokens(request) for request in usage.request_usage_entries]
    known = sum(requests, TokenCounts()).to_dict()
    counts = {name: max(0, count - known[name]) for name, count in _tokens(usage).to_dict().items()}
    rest = TokenCounts(**counts)
    return [rest, *requests] if rest.prompt or rest.completion or rest.total else requests


def _tokens(usage: RequestUsage | Usage) -> TokenCounts:
    return TokenCounts(
        prompt=usage.input_tokens,
        completion=usage.output_tokens,
        reasoning=usage.output_tokens_details.reasoning_tokens or 0,
        cached=usage.input_tokens_details.cached_tokens or 0,
        total=usage.total_tokens,
    )


def _entry_id(session_id: str, branch: str, anchor: int, index: int, tokens: TokenCounts) -> str:
    counts = (tokens.prompt, tokens.completion, tokens.total)
    return session_id_for("openai-agents", session_id, branch, *map(str, (anchor, index, *counts)))


def _sums(entries: list[UsageEntry]) -> dict[str, int]:
    tokens = sum((entry.tokens for entry in entries if entry.tokens is not None), TokenCounts())
    return {
        "requests": len(entries),
        "input_tokens": tokens.prompt,
        "output_tokens": tokens.completion,
        "total_tokens": tokens.total,
    }
