"""What a back end of a snapshot checkpointer has to do.

Arguments have been checked when they arrive here, and payloads are texts.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, Protocol

from helix_store.checkpointers.snapshots.rules import (
    CheckpointMeta,
    ClaimTerm,
    EncodedSnapshot,
)
from helix_store.core.guards import Guard

__all__ = ["SnapshotVerbs"]


class SnapshotVerbs(Protocol):
    def put(
        self, thread_id: str, checkpoint_id: str, snapshot: EncodedSnapshot, *, cap: int | None, guard: Guard
    ) -> None:
        """Store a snapshot as the newest of its thread, and drop the oldest beyond ``cap``."""
        ...

    def get(self, thread_id: str, checkpoint_id: str | None) -> dict[str, Any] | None: ...

    def select(self, thread_id: str, *, limit: int | None, before: str | None) -> list[CheckpointMeta]: ...

    def delete(self, thread_id: str, checkpoint_id: str | None) -> int: ...

    def delete_threads(self, thread_ids: Collection[str]) -> dict[str, int]: ...

    def claim(
        self, thread_id: str, checkpoint_id: str | None, *, owner: str, ttl_ms: int
    ) -> ClaimTerm | None:
        """A term on a snapshot that is neither claimed nor done, or ``None``."""
        ...

    def refresh_claim(self, term: ClaimTerm, *, ttl_ms: int) -> datetime | None:
        """The new end of a term that lasts, or ``None``."""
        ...

    def release_claim(self, term: ClaimTerm) -> bool: ...

    def finish_claim(self, term: ClaimTerm) -> bool:
        """Mark the snapshot as resumed for good; ``False`` when the term was given up or taken over."""
        ...
