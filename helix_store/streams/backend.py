"""What a back end of a stream manager has to do: small synchronous verbs, and a way to wait for changes.

Arguments have been checked and chunks are encoded when they arrive here. Every write is atomic and raises
`StreamNotFound` for an unknown stream; a guard is checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol, TypeVar

from helix_store.core.guards import Guard
from helix_store.core.streams import (
    PrunedStreams,
    StreamHead,
    StreamInfo,
    StreamPage,
)
from helix_store.core.types import StreamStatus

__all__ = ["NewWriter", "PruneRequest", "Settlement", "StreamBackend", "StreamWatch"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWriter:
    writer_id: str
    run_id: str
    agent_name: str
    lease_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The status a stream goes to; chunks of one that is over are kept for ``keep_ms``, or until pruned."""

    status: StreamStatus
    output: str | None = None
    error: str | None = None
    keep_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRequest:
    """``older_than`` concerns streams that are over; an age is measured on the clock of the storage."""

    older_than: timedelta | datetime | None
    keep_chunks: int | None
    lost_writer_error: str
    dry_run: bool


class StreamWatch(Protocol):
    """One reader's place to read in and to wait at; it must be closed."""

    async def read(self, query: Callable[[], R], key: tuple[object, ...]) -> R:
        """Run a query; readers that ask under one key may share the answer."""
        ...

    async def changed(self, seen: StreamHead, timeout: float | None) -> bool:  # noqa: ASYNC109
        """Wait until the stream may differ from ``seen``; ``False`` when the time was over first."""
        ...

    def close(self) -> None: ...


class StreamBackend(Protocol):
    async def call(self, verb: Callable[[], R]) -> R:
        """Run a verb from asynchronous code."""
        ...

    async def watch(self) -> StreamWatch: ...

    def open(self, stream_id: str, writer: NewWriter, guard: Guard) -> None:
        """Create the stream if it is new, and take over the lease if it takes chunks."""
        ...

    def append(self, stream_id: str, texts: Sequence[str], writer: NewWriter | None, guard: Guard) -> int:
        """The last sequence. A writer's lease starts anew; without a writer one that runs does."""
        ...

    def renew(self, stream_id: str, writer: NewWriter) -> None:
        """Start the writer's lease anew. Raises `StreamClosed`."""
        ...

    def release(self, stream_id: str, writer: NewWriter) -> None:
        """End the lease if it is still this writer's."""
        ...

    def settle(self, stream_id: str, settlement: Settlement, guard: Guard) -> None: ...

    def reset(self, stream_id: str, guard: Guard) -> None: ...

    def delete(self, stream_id: str) -> bool: ...

    def info(self, stream_id: str) -> StreamInfo | None: ...

    def page(self, stream_id: str, after: int, limit: int) -> StreamPage | None: ...

    def prune(self, request: PruneRequest) -> PrunedStreams: ...
