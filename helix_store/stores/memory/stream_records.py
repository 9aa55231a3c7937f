"""What is remembered of a stream."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from django.utils import timezone

from helix_store.core.payloads import decode
from helix_store.core.streams import StreamHead, StreamInfo
from helix_store.core.types import StreamStatus

__all__ = ["StreamRecord"]

_KEYS: Final = itertools.count(1)


@dataclass(slots=True)
class StreamRecord:
    """One stream; change it with the world's lock held. ``texts`` begin above ``floor``.

    ``lease_ends`` is on the process's monotonic clock, ``keep_until`` and ``ended_at`` are times.
    """

    run_id: str
    agent_name: str
    key: int = field(default_factory=lambda: next(_KEYS))
    generation: int = 0
    status: StreamStatus = StreamStatus.ACTIVE
    texts: list[str] = field(default_factory=list)
    floor: int = 0
    output: str | None = None
    error: str | None = None
    writer_id: str | None = None
    lease_ends: float | None = None
    created_at: datetime = field(default_factory=timezone.now)
    updated_at: datetime = field(default_factory=timezone.now)
    ended_at: datetime | None = None
    keep_until: datetime | None = None

    @property
    def last_sequence(self) -> int:
        return self.floor + len(self.texts)

    @property
    def has_lost_writer(self) -> bool:
        is_late = self.lease_ends is not None and self.lease_ends <= time.monotonic()
        return self.status is StreamStatus.ACTIVE and is_late

    def head(self) -> StreamHead:
        return StreamHead((self.key, self.generation), self.status, self.last_sequence, self.floor)

    def info(self, stream_id: str) -> StreamInfo:
        return StreamInfo(
            stream_id=stream_id,
            status=self.status,
            chunk_count=len(self.texts),
            last_sequence=self.last_sequence,
            output=None if self.output is None else decode(self.output),
            error=None if self.error is None else decode(self.error),
            run_id=self.run_id,
            agent_name=self.agent_name,
            created_at=self.created_at,
            updated_at=self.updated_at,
            ended_at=self.ended_at,
        )

    def remove_until(self, floor: int) -> int:
        """Remove the oldest chunks and return how many."""
        removed = max(0, floor - self.floor)
        del self.texts[:removed]
        self.floor += removed
        return removed
