"""Staged changes in memory, until a step promotes or discards them."""

from __future__ import annotations

from helix_store.core.merging import promote_staged
from helix_store.core.payloads import decode
from helix_store.core.requests import Guard
from helix_store.core.session_state import encode_custom_state
from helix_store.core.types import StagedChanges
from helix_store.stores.memory.records import SessionRecord
from helix_store.stores.memory.scope import TenantScope

__all__ = ["MemoryStaging", "discard_staged", "staged_changes"]


class MemoryStaging:
    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def stage(self, session_id: str, step_id: str, tool_call_id: str, text: str) -> None:
        with self._scope.writing(session_id) as draft:
            draft.staged[step_id, tool_call_id] = text

    def staged(self, session_id: str, step_id: str) -> list[StagedChanges]:
        return staged_changes(self._scope.require(session_id), step_id)

    def promote(self, session_id: str, step_id: str, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            staged = staged_changes(draft, step_id)
            if not staged:
                return draft.version
            limits = self._scope.limits
            promoted = promote_staged(decode(draft.payload), staged, limits=limits)
            draft.payload = encode_custom_state(promoted, draft.envelope, limits)
            discard_staged(draft, step_id)
            return draft.write()

    def discard(self, session_id: str, step_id: str) -> int:
        with self._scope.writing(session_id) as draft:
            return discard_staged(draft, step_id)


def staged_changes(record: SessionRecord, step_id: str) -> list[StagedChanges]:
    """What is staged for a step, in staging order."""
    return [
        StagedChanges.from_dict(decode(text))
        for (staged_step_id, _), text in record.staged.items()
        if staged_step_id == step_id
    ]


def discard_staged(draft: SessionRecord, step_id: str) -> int:
    """Drop what is staged for a step and return how many changes that were."""
    kept = {key: text for key, text in draft.staged.items() if key[0] != step_id}
    dropped = len(draft.staged) - len(kept)
    draft.staged = kept
    return dropped
