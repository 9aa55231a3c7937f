"""The interface of a stream manager's back end: synchronous operations, and waiting for changes. Arguments
are checked and chunks are encoded before they reach the back end. Every write is atomic and raises
`StreamNotFound` for an unknown stream; a guard is checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol, Self, TypeVar

from helix_store.core import validation
from helix_store.core.guards import Guard
from helix_store.core.limits import UNLIMITED
from helix_store.core.payloads import encode
from helix_store.core.streams import PrunedStreams, StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.exceptions import InvalidQuery
from helix_store.streams.rules import WRITER_LOST, StreamHead, StreamSlice

__all__ = ["NewWriter", "PruneRequest", "StatusChange", "StreamBackend", "StreamWatch"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWriter:
    writer_id: str
    run_id: str
    agent_name: str
    lease_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """The next status of a stream. Its chunks are kept for at least ``keep_ms`` after its end."""

    status: StreamStatus
    output: str | None = None
    error: str | None = None
    keep_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRequest:
    """The arguments of pruning; ``older_than`` applies to ended streams, by the storage's clock."""

    older_than: timedelta | datetime | None
    keep_chunks: int | None
    lost_writer_error: str
    dry_run: bool

    @classmethod
    def checked(
        cls, *, older_than: timedelta | datetime | None, keep_chunks: int | None, dry_run: bool
    ) -> Self:
        """Check a caller's arguments. Raises `InvalidQuery`."""
        if isinstance(older_than, timedelta):
            if not validation.is_age(older_than):
                raise InvalidQuery("older_than must be from 0 to a hundred years.", path="older_than")
        elif older_than is not None:
            if not isinstance(older_than, datetime):
                raise InvalidQuery("older_than must be a timedelta or an aware datetime.", path="older_than")
            older_than = validation.aware_datetime(older_than, "older_than")
        if keep_chunks is not None:
            validation.query_number(keep_chunks, "keep_chunks", maximum=UNLIMITED)
        return cls(
            older_than=older_than,
            keep_chunks=keep_chunks,
            lost_writer_error=encode(WRITER_LOST),
            dry_run=dry_run,
        )


class StreamWatch(Protocol):
    """A handle with which one reader reads a stream and waits for changes. The reader must close it."""

    async def read(self, query: Callable[[], R], key: tuple[object, ...]) -> R:
        """Run a query. Readers that wait for a query with the same key may share its result."""
        ...

    async def changed(self, seen: StreamHead, timeout: float | None) -> bool:  # noqa: ASYNC109
        """Wait until the stream may differ from ``seen``; return ``False`` after the timeout, in seconds."""
        ...

    def close(self) -> None: ...


class StreamBackend(Protocol):
    async def call(self, operation: Callable[[], R]) -> R:
        """Run an operation from asynchronous code."""
        ...

    async def watch(self) -> StreamWatch: ...

    def open(self, stream_id: str, writer: NewWriter, guard: Guard) -> None:
        """Create the stream if it does not exist. If it is active, give its lease to this writer."""
        ...

    def append(self, stream_id: str, texts: Sequence[str], writer: NewWriter | None, guard: Guard) -> int:
        """Store chunks and return the last sequence. Raises `StreamClosed`.

        Renews the lease for the writer; without one it renews a lease that exists.
        """
        ...

    def renew(self, stream_id: str, writer: NewWriter) -> None:
        """Renew the writer's lease. Raises `StreamClosed`."""
        ...

    def release(self, stream_id: str, writer: NewWriter) -> None:
        """End the lease if this writer still has it."""
        ...

    def set_status(self, stream_id: str, change: StatusChange, guard: Guard) -> None: ...

    def reset(self, stream_id: str, guard: Guard) -> None: ...

    def delete(self, stream_id: str) -> bool: ...

    def info(self, stream_id: str) -> StreamInfo | None: ...

    def page(self, stream_id: str, after: int, limit: int) -> StreamSlice | None: ...

    def prune(self, request: PruneRequest) -> PrunedStreams: ...
