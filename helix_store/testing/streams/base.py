"""The base of the suite: `make_manager`, and the hooks that a back end may provide."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from asgiref.sync import async_to_sync

from helix_store.core.limits import Limits
from helix_store.streams.manager import ResumableReader, StreamManagerBase
from helix_store.testing.base import SuiteTests
from helix_store.testing.state_store.base import LockManager

__all__ = ["StreamTests", "chunk", "chunks", "run"]

R = TypeVar("R")

_PATIENCE_SECONDS = 60.0


def chunk(number: int) -> dict[str, Any]:
    return {"type": "text_delta", "delta": f"word {number}"}


def chunks(first: int, last: int) -> list[dict[str, Any]]:
    return [chunk(number) for number in range(first, last + 1)]


def run(scenario: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Run an asynchronous scenario, and fail if it waits forever."""

    async def in_time() -> R:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await scenario()

    return async_to_sync(in_time)()


class StreamTests(SuiteTests):
    """The base class of every part. A subclass provides `make_manager` and, where it can, the other hooks."""

    def make_manager(
        self,
        *,
        tenant: str = "",
        retention: timedelta | None = None,
        writer_lease: float | timedelta | None = None,
        limits: Limits | None = None,
    ) -> StreamManagerBase:
        """Return a manager to test. Managers of one test share their streams; tests share nothing."""
        raise NotImplementedError("Provide make_manager() to run the suite.")

    def make_lock_manager(self) -> LockManager | None:
        """Return the lock manager whose tokens the streams check. ``None`` skips the tests of fencing."""
        return None

    @pytest.fixture
    def streams(self) -> StreamManagerBase:
        return self.make_manager()

    @staticmethod
    def filled(streams: StreamManagerBase, count: int = 3, stream_id: str = "stream") -> None:
        """Create an active stream with the given number of chunks."""

        async def fill() -> None:
            writer = await streams.create_writer(stream_id, "run", "agent")
            await writer.write_many(chunks(1, count))

        run(fill)

    @staticmethod
    async def reader(
        streams: StreamManagerBase, from_sequence: int = 0, stream_id: str = "stream"
    ) -> ResumableReader:
        reader = await streams.create_resumable_reader(stream_id, from_sequence=from_sequence)
        assert reader is not None, "the stream is unknown"
        return reader

    @staticmethod
    async def until(condition: Callable[[], Awaitable[object]]) -> None:
        """Wait for a condition that time or another task makes true."""
        while not await condition():  # noqa: ASYNC110  storage does not signal the end of a lease
            await asyncio.sleep(0.002)

    async def until_position(self, reader: ResumableReader, position: int) -> None:
        """Wait until a reader has delivered a sequence."""

        async def is_there() -> bool:
            return reader.position >= position

        await self.until(is_there)

    async def until_one_is_lost(self, streams: StreamManagerBase, *, dry_run: bool = False) -> None:
        """Prune until a dead writer is found."""

        async def is_found() -> bool:
            return (await streams.prune(older_than=None, dry_run=dry_run)).failed > 0

        await self.until(is_found)

    @staticmethod
    async def sequences(reader: ResumableReader) -> list[int]:
        """Return the chunks that a reader delivers until it ends, after checking them against `chunk`."""
        delivered = []
        async for stored in reader:
            assert stored.chunk == chunk(stored.sequence)
            delivered.append(stored.sequence)
        return delivered
