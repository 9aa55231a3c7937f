"""What is remembered of a snapshot and of its claim."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

from helix_store.core.snapshots import CheckpointMeta

__all__ = ["StoredClaim", "StoredSnapshot"]


@dataclass(frozen=True, slots=True)
class StoredClaim:
    """The newest term on a snapshot; over when its deadline on the monotonic clock has passed."""

    owner: str
    token: int
    expires_at: datetime
    deadline: float
    is_released: bool = False
    is_done: bool = False

    @property
    def lasts(self) -> bool:
        return not (self.is_released or self.is_done) and time.monotonic() < self.deadline

    @property
    def leaves_free(self) -> bool:
        return not self.is_done and not self.lasts


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    meta: CheckpointMeta
    text: str
    claim: StoredClaim | None = None
