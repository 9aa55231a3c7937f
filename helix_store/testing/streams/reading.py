"""Tests for readers: everything after a position, once and in order, until the stream ends or pauses."""

from __future__ import annotations

import asyncio

import pytest

from helix_store.core.types import StreamStatus
from helix_store.exceptions import StreamNotFound, StreamTruncated
from helix_store.streams.manager import StreamManagerBase
from helix_store.testing.cells import table
from helix_store.testing.streams.base import (
    StreamTests,
    chunk,
    chunks,
    run,
)

__all__ = ["ReadingContract"]


class ReadingContract(StreamTests):
    def test_an_unknown_stream_has_no_reader(self, streams: StreamManagerBase) -> None:
        async def read() -> None:
            assert await streams.create_reader("nowhere") is None
            assert await streams.create_resumable_reader("nowhere") is None
            assert await streams.create_resumable_reader("nowhere", from_sequence=5) is None

        run(read)
        with pytest.raises(StreamNotFound):
            streams.read_after("nowhere", 0)

    def test_a_reader_delivers_from_the_start_to_the_end(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 700)

        async def read() -> None:
            await streams.end_stream("stream")
            reader = await streams.create_reader("stream")
            assert reader is not None
            assert [item async for item in reader] == chunks(1, 700)

        run(read)

    @table("after", [0, 1, 2, 3])
    def test_a_resumed_reader_delivers_what_follows_its_position(
        self, streams: StreamManagerBase, after: int
    ) -> None:
        self.filled(streams, 3)

        async def read() -> None:
            await streams.end_stream("stream")
            reader = await self.reader(streams, after)
            assert (reader.status, reader.position) == (StreamStatus.ENDED, after)
            assert await self.sequences(reader) == list(range(after + 1, 4))
            assert reader.position == 3

        run(read)

    def test_a_waiting_reader_gets_what_is_written_later(self, streams: StreamManagerBase) -> None:
        async def read() -> list[int]:
            writer = await streams.create_writer("stream", "run", "agent")
            await writer.write(chunk(1))
            reader = await self.reader(streams)
            assert reader.status.value == "active"
            reading = asyncio.create_task(self.sequences(reader))
            for number in range(2, 6):
                await self.until_position(reader, number - 1)
                await writer.write(chunk(number))
            await self.until_position(reader, 5)
            assert not reading.done()
            await streams.end_stream("stream")
            delivered = await reading
            assert reader.status.value == "ended"
            return delivered

        assert run(read) == [1, 2, 3, 4, 5]

    def test_a_reader_of_a_stream_without_chunks_waits_for_its_end(self, streams: StreamManagerBase) -> None:
        async def read() -> list[int]:
            await streams.create_writer("stream", "run", "agent")
            reading = asyncio.create_task(self.sequences(await self.reader(streams)))
            await streams.end_stream("stream")
            return await reading

        assert run(read) == []

    def test_readers_of_one_stream_do_not_disturb_each_other(self, streams: StreamManagerBase) -> None:
        async def read() -> list[list[int]]:
            writer = await streams.create_writer("stream", "run", "agent")
            readers = [await self.reader(streams, after) for after in (0, 0, 10, 25)]
            reading = [asyncio.create_task(self.sequences(reader)) for reader in readers]
            for first in range(1, 41, 4):
                await writer.write_many(chunks(first, first + 3))
            await streams.end_stream("stream")
            return list(await asyncio.gather(*reading))

        assert run(read) == [list(range(after + 1, 41)) for after in (0, 0, 10, 25)]

    def test_readers_of_two_tenants_never_share_what_they_read(self, streams: StreamManagerBase) -> None:
        other = self.make_manager(tenant="other")
        self.filled(streams, 3)
        self.filled(other, 7)

        async def read() -> list[list[int]]:
            managers = [streams, other] * 10
            await asyncio.gather(*(manager.end_stream("stream", "x") for manager in (streams, other)))
            readers = await asyncio.gather(*(self.reader(manager) for manager in managers))
            delivered = await asyncio.gather(*(self.sequences(reader) for reader in readers))
            infos = await asyncio.gather(*(reader.info() for reader in readers))
            assert [info and info.last_sequence for info in infos] == [3, 7] * 10
            return delivered

        assert run(read) == [list(range(1, 4)), list(range(1, 8))] * 10

    def test_a_reader_beyond_the_end_waits_for_what_follows(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 3)

        async def read() -> list[int]:
            reading = asyncio.create_task(self.sequences(await self.reader(streams, 5)))
            writer = await streams.create_writer("stream", "run", "agent")
            for number in range(4, 8):
                await writer.write(chunk(number))
            await streams.end_stream("stream")
            return await reading

        assert run(read) == [6, 7]

    @table("after", [3, 4, 2**63 - 1])
    def test_a_reader_beyond_the_end_of_a_stream_that_is_over_ends(
        self, streams: StreamManagerBase, after: int
    ) -> None:
        self.filled(streams, 3)

        async def read() -> list[int]:
            await streams.fail_stream("stream", "broken")
            reader = await self.reader(streams, after)
            assert reader.status is StreamStatus.FAILED
            return await self.sequences(reader)

        assert run(read) == []
        assert streams.read_after("stream", after) == []

    def test_a_paused_stream_is_delivered_as_far_as_it_goes(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 3)

        async def read() -> None:
            waiting = await self.reader(streams)
            reading = asyncio.create_task(self.sequences(waiting))
            await self.until_position(waiting, 3)
            await streams.pause_stream("stream")
            assert await reading == [1, 2, 3]
            assert waiting.status is StreamStatus.PAUSED
            late = await self.reader(streams, 1)
            assert await self.sequences(late) == [2, 3]
            assert late.status is StreamStatus.PAUSED
            await streams.reactivate_stream("stream")
            writer = await streams.create_writer("stream", "run", "agent")
            await writer.write(chunk(4))
            await streams.end_stream("stream")
            assert await self.sequences(await self.reader(streams, waiting.position)) == [4]

        run(read)

    def test_a_reader_can_be_left_and_taken_up_by_another(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 10)

        async def read() -> list[int]:
            first = await self.reader(streams)
            seen = []
            async for stored in first:
                seen.append(stored.sequence)
                if len(seen) == 4:
                    break
            await first.aclose()
            await first.aclose()
            await streams.end_stream("stream")
            return seen + await self.sequences(await self.reader(streams, seen[-1]))

        assert run(read) == list(range(1, 11))

    def test_a_deleted_stream_ends_its_readers(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 2)

        async def read() -> None:
            reader = await self.reader(streams)
            reading = asyncio.create_task(self.sequences(reader))
            await self.until_position(reader, 2)
            await streams.delete_stream("stream")
            with pytest.raises(StreamNotFound):
                await reading

        run(read)

    @table("how", ["reset", "deleted and created again"])
    def test_a_reader_is_told_that_its_stream_began_anew(self, streams: StreamManagerBase, how: str) -> None:
        self.filled(streams, 5)

        async def read() -> None:
            reader = await self.reader(streams)
            reading = asyncio.create_task(self.sequences(reader))
            await self.until_position(reader, 5)
            if how == "reset":
                await streams.reset_stream("stream")
            else:
                await streams.delete_stream("stream")
            writer = await streams.create_writer("stream", "run", "agent")
            await writer.write_many(chunks(1, 9))
            with pytest.raises((StreamTruncated, StreamNotFound)) as caught:
                await reading
            if isinstance(caught.value, StreamTruncated):
                assert caught.value.oldest == 1
            await streams.end_stream("stream")
            assert await self.sequences(await self.reader(streams)) == list(range(1, 10))

        run(read)

    def test_reading_at_once_takes_no_more_than_asked_for(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 600)
        assert [stored.sequence for stored in streams.read_after("stream", 10, limit=3)] == [11, 12, 13]
        assert len(streams.read_after("stream", 0)) == 500
        assert [stored.chunk for stored in streams.read_after("stream", 598, limit=2**63 - 1)] == chunks(
            599, 600
        )
