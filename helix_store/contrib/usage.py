"""The usage that the responses of a framework's models report, as entries of the usage ledger."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from helix_store.adapters import LockedSession
from helix_store.core.types import UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageSource
from helix_store.usage.store import DatabaseUsageStore


def count_of(value: Any) -> int:
    """Return a number of tokens, or 0 for a value that cannot be one."""
    return value if type(value) is int and 0 < value < 2**40 else 0


def response_entry(
    session_id: str,
    entry_id: str | None,
    *,
    source: str,
    model: str,
    prompt: int,
    completion: int,
    reasoning: int = 0,
    cached: int = 0,
    timestamp: int | None = None,
) -> UsageEntry | None:
    """Return the entry for a response of a model, or ``None`` for a response without tokens."""
    if not prompt + completion:
        return None
    return UsageEntry(
        kind=UsageKind.TOKENS,
        id=entry_id,
        session_id=session_id,
        step_count=0,
        timestamp=time.time_ns() // 1_000_000 if timestamp is None else timestamp,
        source=UsageSource(type="agent", name=source),
        model=model,
        tokens=TokenCounts(
            prompt=prompt,
            completion=completion,
            reasoning=reasoning,
            cached=cached,
            total=prompt + completion,
        ),
    )


def record_usage(session: LockedSession, entries: Iterable[UsageEntry | None]) -> None:
    """Record the entries that are not ``None`` in the transaction that has locked the session."""
    if known := [entry for entry in entries if entry is not None]:
        DatabaseUsageStore(session.alias, tenant=session.tenant).record_entries(known)
