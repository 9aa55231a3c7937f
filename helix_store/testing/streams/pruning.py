"""Tests for pruning and leases: readers are told about removed chunks and about a writer that died."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from helix_store.core.streams import PrunedStreams
from helix_store.core.types import StreamStatus
from helix_store.exceptions import (
    InvalidQuery,
    StreamClosed,
    StreamTruncated,
)
from helix_store.streams.manager import StreamManagerBase
from helix_store.testing.cells import table
from helix_store.testing.streams.base import (
    StreamTests,
    chunk,
    chunks,
    run,
)
from helix_store.testing.streams.lives import known

__all__ = ["StreamPruningContract"]

AN_HOUR = timedelta(hours=1)
NOTHING = PrunedStreams(streams=0, chunks=0, failed=0)


class StreamPruningContract(StreamTests):
    # Age

    @table("how", ["end_stream", "fail_stream"])
    def test_streams_that_are_over_for_long_lose_their_chunks(
        self, streams: StreamManagerBase, how: str
    ) -> None:
        self.filled(streams, 5)

        async def prune() -> None:
            await getattr(streams, how)("stream", "result")
            assert await streams.prune(older_than=AN_HOUR) == NOTHING
            expected = PrunedStreams(streams=1, chunks=5, failed=0)
            assert await streams.prune(older_than=timedelta(0), dry_run=True) == expected
            assert (await known(streams)).chunk_count == 5
            assert await streams.prune(older_than=timedelta(0)) == expected
            assert await streams.prune(older_than=timedelta(0)) == NOTHING
            info = await known(streams)
            assert (info.chunk_count, info.last_sequence) == (0, 5)
            assert "result" in (info.output, info.error)

        run(prune)

    def test_a_point_in_time_is_an_age_too(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 2)

        async def prune() -> None:
            await streams.end_stream("stream")
            now = datetime.now(UTC)
            assert await streams.prune(older_than=now - AN_HOUR) == NOTHING
            assert (await streams.prune(older_than=now + AN_HOUR)).chunks == 2

        run(prune)

    @table("status", ["active", "paused"])
    def test_streams_that_are_not_over_are_not_too_old(self, streams: StreamManagerBase, status: str) -> None:
        self.filled(streams, 3)

        async def prune() -> None:
            if status == "paused":
                await streams.pause_stream("stream")
            assert await streams.prune(older_than=timedelta(0)) == NOTHING

        run(prune)

    def test_readers_below_the_floor_are_told(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 5)

        async def prune() -> None:
            await streams.end_stream("stream")
            await streams.prune(older_than=timedelta(0))
            for after in (0, 4):
                with pytest.raises(StreamTruncated) as caught:
                    await streams.create_resumable_reader("stream", from_sequence=after)
                assert caught.value.oldest == 6
            with pytest.raises(StreamTruncated):
                await streams.create_reader("stream")
            assert await self.sequences(await self.reader(streams, 5)) == []
            await streams.reactivate_stream("stream")
            writer = await streams.create_writer("stream", "run", "agent")
            assert await writer.write(chunk(6)) == 6

        run(prune)
        assert [stored.sequence for stored in streams.read_after("stream", 5)] == [6]
        with pytest.raises(StreamTruncated):
            streams.read_after("stream", 4)

    def test_a_reader_that_pruning_overtakes_is_told(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 800)

        async def prune() -> None:
            reader = await self.reader(streams)
            first = await anext(reader)
            assert first.sequence == 1
            await streams.prune(older_than=None, keep_chunks=1)
            delivered = [1]

            async def read_on() -> None:
                async for stored in reader:
                    delivered.append(stored.sequence)

            with pytest.raises(StreamTruncated) as caught:
                await read_on()
            assert delivered == list(range(1, len(delivered) + 1))
            assert caught.value.oldest == 800

        run(prune)

    # Retention

    def test_a_managers_retention_counts_from_the_end(self) -> None:
        brief = self.make_manager(retention=timedelta(0))
        long = self.make_manager(retention=AN_HOUR)

        async def prune() -> None:
            for streams, stream_id in ((brief, "brief"), (long, "long")):
                writer = await streams.create_writer(stream_id, "run", "agent")
                await writer.write_many(chunks(1, 3))
                await streams.end_stream(stream_id)
            assert await brief.prune(older_than=None) == PrunedStreams(streams=1, chunks=3, failed=0)

        run(prune)
        assert len(brief.read_after("long", 0)) == 3

    def test_retention_ends_with_a_reactivation(self) -> None:
        streams = self.make_manager(retention=timedelta(0))
        self.filled(streams, 3)

        async def prune() -> None:
            await streams.end_stream("stream")
            await streams.reactivate_stream("stream")
            assert await streams.prune(older_than=timedelta(0)) == NOTHING

        run(prune)

    # Count

    def test_a_stream_keeps_its_newest_chunks(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 10)

        async def prune() -> None:
            assert await streams.prune(older_than=None, keep_chunks=10) == NOTHING
            expected = PrunedStreams(streams=1, chunks=7, failed=0)
            assert await streams.prune(older_than=AN_HOUR, keep_chunks=3, dry_run=True) == expected
            assert await streams.prune(older_than=AN_HOUR, keep_chunks=3) == expected
            info = await known(streams)
            assert (info.chunk_count, info.last_sequence) == (3, 10)
            writer = await streams.create_writer("stream", "run", "agent")
            assert await writer.write(chunk(11)) == 11
            await streams.end_stream("stream")
            assert await self.sequences(await self.reader(streams, 7)) == [8, 9, 10, 11]

        run(prune)
        with pytest.raises(StreamTruncated) as caught:
            streams.read_after("stream", 6)
        assert caught.value.oldest == 8

    def test_a_stream_may_keep_nothing(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 4)
        assert run(lambda: streams.prune(older_than=None, keep_chunks=0)).chunks == 4
        assert streams.read_after("stream", 4) == []

    # Leases

    def test_a_stream_whose_writer_died_is_failed_and_its_readers_are_told(self) -> None:
        streams = self.make_manager(writer_lease=0.05)

        async def die() -> None:
            writer = await streams.create_writer("stream", "run", "agent")
            await writer.write(chunk(1))
            reader = await self.reader(streams)
            reading = asyncio.create_task(self.sequences(reader))
            await self.until_one_is_lost(streams, dry_run=True)
            assert (await known(streams)).status is StreamStatus.ACTIVE
            assert await streams.prune(older_than=None) == PrunedStreams(streams=0, chunks=0, failed=1)
            assert await streams.prune(older_than=None) == NOTHING
            assert await reading == [1]
            assert reader.status is StreamStatus.FAILED
            info = await known(streams)
            assert info.error["code"] == "writer_lost"
            with pytest.raises(StreamClosed):
                await writer.write(chunk(2))

        run(die)

    def test_a_writer_that_is_used_as_a_context_beats(self) -> None:
        # A busy machine may keep the writer from renewing a short lease in time; a longer one decides.
        leases = [1, 4, 16]
        assert any(self._outlives_a_dead_writer(lease) for lease in leases), leases

    def _outlives_a_dead_writer(self, lease: float) -> bool:
        """Return whether a writer that beats still writes when one without beats has been failed."""
        streams = self.make_manager(writer_lease=lease)
        dead, alive = f"dead-{lease}", f"alive-{lease}"

        async def live() -> bool:
            await streams.create_writer(dead, "run", "agent")
            async with await streams.create_writer(alive, "run", "agent") as writer:

                async def is_dead() -> bool:
                    await streams.prune(older_than=None)
                    info = await streams.get_info(dead)
                    assert info is not None
                    return info.status is StreamStatus.FAILED

                await self.until(is_dead)
                try:
                    assert await writer.write(chunk(1)) == 1
                except StreamClosed:
                    return False
            with pytest.raises(StreamClosed):
                await writer.write(chunk(2))
            return True

        return run(live)

    @table("how", ["closed", "paused", "ended"])
    def test_a_writer_that_has_finished_is_not_missed(self, how: str) -> None:
        streams = self.make_manager(writer_lease=0.05)

        async def finish() -> None:
            await streams.create_writer("dead", "run", "agent")
            writer = await streams.create_writer("stream", "run", "agent")
            if how == "closed":
                await writer.close()
            elif how == "paused":
                await streams.pause_stream("stream")
            else:
                await streams.end_stream("stream")
            await self.until_one_is_lost(streams)
            assert (await known(streams)).status is not StreamStatus.FAILED

        run(finish)

    def test_a_writer_that_leaves_by_an_error_is_missed(self) -> None:
        streams = self.make_manager(writer_lease=0.05)

        async def fail() -> None:
            with pytest.raises(KeyError):
                async with await streams.create_writer("stream", "run", "agent"):
                    raise KeyError
            await self.until_one_is_lost(streams)

        run(fail)

    def test_closing_an_older_writer_leaves_the_newest_ones_lease(self) -> None:
        streams = self.make_manager(writer_lease=0.05)

        async def close() -> None:
            older = await streams.create_writer("stream", "run-1", "agent")
            await streams.create_writer("stream", "run-2", "agent")
            await older.close()
            await self.until_one_is_lost(streams)

        run(close)

    # Arguments

    @table(
        "bad",
        [timedelta(seconds=-1), 3600, "1h", True, datetime(2026, 1, 1)],  # noqa: DTZ001  it is the bad one
        shared=True,
    )
    def test_an_age_is_a_timedelta_or_an_aware_datetime(self, streams: StreamManagerBase, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            run(lambda: streams.prune(older_than=bad))

    @table("bad", [-1, 1.5, "1", True, 2**63], shared=True)
    def test_chunks_to_keep_are_a_whole_number(self, streams: StreamManagerBase, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            run(lambda: streams.prune(older_than=None, keep_chunks=bad))
