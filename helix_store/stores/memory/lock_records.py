"""What is remembered of a lock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

__all__ = ["StoredLock"]


@dataclass(frozen=True, slots=True)
class StoredLock:
    """The newest term of a name, over or not."""

    owner: str
    token: int
    expires_at: datetime
    deadline: float
    """The end of the term on the process's monotonic clock, which decides; ``expires_at`` is for people."""

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self.deadline
