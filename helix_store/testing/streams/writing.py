"""Tests for writers: sequences without gaps, exact chunks, and the errors of a late write."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from helix_store.core.limits import Limits
from helix_store.exceptions import (
    InvalidPayload,
    LimitExceeded,
    StreamClosed,
    StreamNotFound,
)
from helix_store.streams.manager import StreamManagerBase
from helix_store.testing.cells import table
from helix_store.testing.streams.base import (
    StreamTests,
    chunk,
    chunks,
    run,
)

__all__ = ["WritingContract"]

HOSTILE: list[dict[str, Any]] = [
    {"type": "t", "text": "\x00 \u2028 \ud83d alone \U0001f600 \r\n"},
    {"type": "t", "\udc00": "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")},
    {"type": "t", "pair": "\ud83d" + "\ude00"},
    {"type": "t", "numbers": [-0.0, 1e16, 1.797e308, 2**70, True, None]},
    {"type": "t", "z": 1, "a": {"__proto__": [], "": {}}},
]


class WritingContract(StreamTests):
    def test_sequences_count_from_one(self, streams: StreamManagerBase) -> None:
        async def write() -> list[int]:
            writer = await streams.create_writer("stream", "run", "agent")
            return [await writer.write(chunk(number)) for number in range(1, 6)]

        assert run(write) == [1, 2, 3, 4, 5]

    def test_many_chunks_are_written_at_once_and_the_last_sequence_returned(
        self, streams: StreamManagerBase
    ) -> None:
        async def write() -> list[int]:
            writer = await streams.create_writer("stream", "run", "agent")
            return [
                await writer.write_many(chunks(1, 100)),
                await writer.write(chunk(101)),
                await writer.write_many(iter(chunks(102, 104))),
                await writer.write_many([]),
            ]

        assert run(write) == [100, 101, 104, 104]
        assert [stored.sequence for stored in streams.read_after("stream", 0)] == list(range(1, 105))

    def test_chunks_come_back_exactly(self, streams: StreamManagerBase) -> None:
        async def write() -> list[dict[str, Any]]:
            writer = await streams.create_writer("stream", "run", "agent")
            await writer.write_many(HOSTILE)
            await streams.end_stream("stream")
            reader = await streams.create_reader("stream")
            assert reader is not None
            return [item async for item in reader]

        delivered = run(write)
        assert [repr(item) for item in delivered] == [repr(item) for item in HOSTILE]
        assert [repr(item.chunk) for item in streams.read_after("stream", 0)] == [repr(i) for i in HOSTILE]

    def test_what_is_read_is_detached(self, streams: StreamManagerBase) -> None:
        async def write() -> None:
            writer = await streams.create_writer("stream", "run", "agent")
            await writer.write({"type": "t", "list": [1]})

        run(write)
        streams.read_after("stream", 0)[0].chunk["list"].append(2)
        assert streams.read_after("stream", 0)[0].chunk == {"type": "t", "list": [1]}

    def test_writers_of_one_stream_share_its_sequence(self, streams: StreamManagerBase) -> None:
        async def write() -> list[int]:
            writers = [await streams.create_writer("stream", f"run-{n}", "agent") for n in range(4)]
            written = await asyncio.gather(*(writer.write(chunk(0)) for writer in writers * 5))
            return sorted(written)

        assert run(write) == list(range(1, 21))

    def test_synchronous_code_writes_too(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 2)
        assert streams.write_sync("stream", chunks(3, 5)) == 5
        assert streams.write_sync("stream", []) == 5
        assert [stored.chunk for stored in streams.read_after("stream", 2)] == chunks(3, 5)

    def test_the_newest_writer_is_named(self, streams: StreamManagerBase) -> None:
        async def write() -> None:
            await streams.create_writer("stream", "run-1", "first")
            await streams.create_writer("stream", "run-2", "second")
            info = await streams.get_info("stream")
            assert info is not None
            assert (info.run_id, info.agent_name, info.last_sequence) == ("run-2", "second", 0)

        run(write)

    def test_tenants_do_not_meet(self, streams: StreamManagerBase) -> None:
        other = self.make_manager(tenant="other")
        self.filled(streams, 3)
        self.filled(other, 1)
        assert streams.write_sync("stream", [chunk(4)]) == 4
        assert len(other.read_after("stream", 0)) == 1
        assert run(lambda: other.delete_stream("stream"))
        assert len(streams.read_after("stream", 0)) == 4

    # Too late

    @table("end", ["end_stream", "fail_stream", "pause_stream"])
    def test_a_stream_that_is_over_or_paused_takes_no_chunks(
        self, streams: StreamManagerBase, end: str
    ) -> None:
        async def write() -> None:
            writer = await streams.create_writer("stream", "run", "agent")
            await writer.write(chunk(1))
            if end == "fail_stream":
                await streams.fail_stream("stream", "broken")
            else:
                await getattr(streams, end)("stream")
            with pytest.raises(StreamClosed):
                await writer.write(chunk(2))
            late = await streams.create_writer("stream", "late", "agent")
            with pytest.raises(StreamClosed):
                await late.write_many(chunks(2, 3))
            with pytest.raises(StreamClosed):
                await late.heartbeat()
            info = await streams.get_info("stream")
            assert info is not None
            assert (info.last_sequence, info.run_id) == (1, "run")

        run(write)
        with pytest.raises(StreamClosed):
            streams.write_sync("stream", [chunk(2)])
        assert len(streams.read_after("stream", 0)) == 1

    def test_a_closed_writer_writes_no_more_and_the_stream_stays_open(
        self, streams: StreamManagerBase
    ) -> None:
        async def write() -> int:
            writer = await streams.create_writer("stream", "run", "agent")
            await writer.write(chunk(1))
            await writer.close()
            await writer.close()
            with pytest.raises(StreamClosed):
                await writer.write(chunk(2))
            with pytest.raises(StreamClosed):
                await writer.heartbeat()
            again = await streams.create_writer("stream", "run", "agent")
            return await again.write(chunk(2))

        assert run(write) == 2

    def test_writing_to_an_unknown_stream_creates_none(self, streams: StreamManagerBase) -> None:
        with pytest.raises(StreamNotFound) as caught:
            streams.write_sync("nowhere", [chunk(1)])
        assert caught.value.stream_id == "nowhere"
        with pytest.raises(StreamNotFound):
            streams.write_sync("nowhere", [])
        assert run(lambda: streams.get_info("nowhere")) is None

    def test_a_writer_of_a_deleted_stream_does_not_bring_it_back(self, streams: StreamManagerBase) -> None:
        async def write() -> None:
            writer = await streams.create_writer("stream", "run", "agent")
            await streams.delete_stream("stream")
            for late in (writer.write(chunk(1)), writer.write_many([]), writer.heartbeat()):
                with pytest.raises(StreamNotFound):
                    await late
            await writer.close()
            assert await streams.get_info("stream") is None

        run(write)

    # Refused chunks

    @table(
        "bad",
        [
            {},
            {"delta": "x"},
            {"type": ""},
            {"type": 1},
            {"type": None},
            [],
            "text",
            None,
            {"type": "t", "value": float("nan")},
            {"type": "t", "value": {1, 2}},
            {"type": "t", 1: 2},
        ],
    )
    def test_what_is_no_chunk_takes_no_sequence(self, streams: StreamManagerBase, bad: Any) -> None:
        self.filled(streams, 1)

        writer = run(lambda: streams.create_writer("stream", "run", "agent"))
        with self.storage_untouched():
            with pytest.raises(InvalidPayload):
                run(lambda: writer.write(bad))
            with pytest.raises(InvalidPayload):
                run(lambda: writer.write_many([chunk(2), bad]))
            with pytest.raises(InvalidPayload):
                streams.write_sync("stream", [chunk(2), bad])
        assert run(lambda: writer.write(chunk(2))) == 2

    def test_a_chunk_over_the_limit_takes_no_sequence(self) -> None:
        streams = self.make_manager(limits=Limits(max_chunk_bytes=100))
        fits = {"type": "t", "text": "x" * (100 - len('{"type":"t","text":""}'))}
        too_big = {"type": "t", "text": fits["text"] + "x"}

        writer = run(lambda: streams.create_writer("stream", "run", "agent"))
        assert run(lambda: writer.write(fits)) == 1
        with self.storage_untouched(), pytest.raises(LimitExceeded) as caught:
            run(lambda: writer.write_many([fits, too_big]))
        assert (caught.value.name, caught.value.limit, caught.value.actual) == ("max_chunk_bytes", 100, 101)
        assert run(lambda: writer.write(fits)) == 2

    @table("bad", [{"type": "t"}, "text", b"bytes", 1, None])
    def test_many_chunks_are_a_collection(self, streams: StreamManagerBase, bad: Any) -> None:
        self.filled(streams, 1)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            streams.write_sync("stream", bad)
