"""Atomic replacement of the newest items for ``OpenAIResponsesCompactionSession``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helix_store.core.payloads import copy_json
from helix_store.exceptions import IntegrityFault
from helix_store.items import ItemLog

__all__ = ["compaction_snapshot"]


async def compaction_snapshot(
    log: ItemLog,
    limit: int,
    *,
    prune_prefix: Callable[[Any], bool] | None,
    fencing_token: int | None,
) -> Any:
    """Return an SDK snapshot, or ``None`` if the SDK has no such class or an item cannot be read.

    The compaction then reads all items, clears the session and adds the new ones, which is not atomic.
    """
    try:
        # Not public, but third-party sessions of the SDK work without it.
        from agents.memory.session import _CompactionSnapshot
    except ImportError:
        return None
    try:
        found = [item.payload for item in await log.atail(limit + 1)]
    except IntegrityFault:
        return None
    stored = found[-limit:]

    async def replace_suffix(start: int, output: list[Any]) -> bool:
        expected = stored[start:]
        if not expected:
            return False
        return await log.areplace_suffix(expected, output, prune=prune_prefix, fencing_token=fencing_token)

    return _CompactionSnapshot(copy_json(stored), len(found) <= limit, replace_suffix)
