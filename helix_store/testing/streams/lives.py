"""Tests for a stream's life, and for the fencing of its changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from helix_store.core.streams import StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.exceptions import (
    FencedOutError,
    InvalidPayload,
    StreamClosed,
    StreamNotFound,
    StreamTruncated,
)
from helix_store.streams.manager import StreamManagerBase
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import HeldLock, LockManager
from helix_store.testing.streams.base import (
    StreamTests,
    chunk,
    chunks,
    run,
)

__all__ = ["StreamFencingContract", "StreamLifeContract"]


async def known(streams: StreamManagerBase) -> StreamInfo:
    info = await streams.get_info("stream")
    assert info is not None
    return info


class StreamLifeContract(StreamTests):
    def test_a_new_stream_is_active_and_empty(self, streams: StreamManagerBase) -> None:
        async def live() -> None:
            assert await streams.get_info("stream") is None
            await streams.create_writer("stream", "run", "agent")
            info = await known(streams)
            assert (info.stream_id, info.status) == ("stream", StreamStatus.ACTIVE)
            assert (info.chunk_count, info.last_sequence) == (0, 0)
            assert (info.output, info.error, info.ended_at) == (None, None, None)
            assert info.created_at.utcoffset() is not None
            assert info.updated_at >= info.created_at
            assert StreamInfo.from_dict(info.to_dict()) == info

        run(live)

    @table("output", [None, {"answer": [1, "\x00"]}, "text", 0, False, []])
    def test_an_ended_stream_shows_its_output(self, streams: StreamManagerBase, output: Any) -> None:
        self.filled(streams, 2)

        async def live() -> None:
            await streams.end_stream("stream", output)
            info = await known(streams)
            assert (info.status, info.chunk_count) == (StreamStatus.ENDED, 2)
            assert (repr(info.output), info.error) == (repr(output), None)
            assert info.ended_at is not None

        run(live)

    def test_a_failed_stream_shows_its_error(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 2)

        async def live() -> None:
            await streams.fail_stream("stream", {"code": "overloaded"})
            info = await known(streams)
            assert (info.status, info.error) == (StreamStatus.FAILED, {"code": "overloaded"})
            assert (info.output, info.last_sequence) == (None, 2)

        run(live)

    def test_the_first_end_stays(self, streams: StreamManagerBase) -> None:
        self.filled(streams)

        async def live() -> None:
            await streams.end_stream("stream", "first")
            ended = await known(streams)
            await streams.end_stream("stream", "second")
            with pytest.raises(StreamClosed):
                await streams.fail_stream("stream", "late")
            with pytest.raises(StreamClosed):
                await streams.pause_stream("stream")
            assert await known(streams) == ended

        run(live)

    def test_the_first_failure_stays(self, streams: StreamManagerBase) -> None:
        self.filled(streams)

        async def live() -> None:
            await streams.fail_stream("stream", "first")
            await streams.fail_stream("stream", "second")
            with pytest.raises(StreamClosed):
                await streams.end_stream("stream")
            assert (await known(streams)).error == "first"

        run(live)

    @table("how", ["end_stream", "fail_stream", "pause_stream"])
    def test_a_reactivated_stream_goes_on_where_it_was(self, streams: StreamManagerBase, how: str) -> None:
        self.filled(streams, 3)

        async def live() -> None:
            arguments = ["stream"] if how == "pause_stream" else ["stream", "something"]
            await getattr(streams, how)(*arguments)
            await streams.reactivate_stream("stream")
            await streams.reactivate_stream("stream")
            info = await known(streams)
            assert (info.status, info.output, info.error) == (StreamStatus.ACTIVE, None, None)
            assert (info.ended_at, info.chunk_count) == (None, 3)
            writer = await streams.create_writer("stream", "run", "agent")
            assert await writer.write(chunk(4)) == 4

        run(live)

    def test_a_new_writer_updates_an_active_stream(self, streams: StreamManagerBase) -> None:
        self.filled(streams)

        async def live() -> None:
            first = (await known(streams)).updated_at

            async def is_later() -> bool:
                # A clock may be coarse.
                await streams.create_writer("stream", "run", "agent")
                return (await known(streams)).updated_at > first

            await self.until(is_later)
            writer = await streams.create_writer("stream", "run", "agent")
            updated_at = (await known(streams)).updated_at
            await writer.heartbeat()
            await writer.close()
            assert (await known(streams)).updated_at == updated_at
            await streams.pause_stream("stream")
            updated_at = (await known(streams)).updated_at
            await streams.create_writer("stream", "run", "agent")
            assert (await known(streams)).updated_at == updated_at

        run(live)

    def test_pausing_twice_is_pausing(self, streams: StreamManagerBase) -> None:
        self.filled(streams)

        async def live() -> None:
            await streams.pause_stream("stream")
            await streams.pause_stream("stream")
            assert (await known(streams)).status is StreamStatus.PAUSED
            await streams.end_stream("stream", "done")
            assert (await known(streams)).output == "done"

        run(live)

    def test_a_reset_stream_begins_at_one(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 5)

        async def live() -> None:
            await streams.end_stream("stream", "done")
            await streams.reset_stream("stream")
            info = await known(streams)
            assert (info.status, info.chunk_count, info.last_sequence) == (StreamStatus.ACTIVE, 0, 0)
            assert (info.output, info.ended_at) == (None, None)
            writer = await streams.create_writer("stream", "run", "agent")
            assert await writer.write_many(chunks(1, 2)) == 2

        run(live)
        assert [stored.chunk for stored in streams.read_after("stream", 0)] == chunks(1, 2)

    def test_a_position_from_before_a_reset_is_refused(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 5)
        run(lambda: streams.reset_stream("stream"))
        self.filled(streams, 2)
        with pytest.raises(StreamTruncated) as caught:
            streams.read_after("stream", 5)
        assert caught.value.oldest == 1
        with pytest.raises(StreamTruncated):
            run(lambda: streams.create_resumable_reader("stream", from_sequence=3))

    def test_a_deleted_stream_is_unknown(self, streams: StreamManagerBase) -> None:
        self.filled(streams, 5)

        async def live() -> None:
            assert await streams.delete_stream("stream")
            assert not await streams.delete_stream("stream")
            assert await streams.get_info("stream") is None
            assert await streams.create_reader("stream") is None
            writer = await streams.create_writer("stream", "run", "agent")
            assert await writer.write(chunk(1)) == 1

        run(live)
        assert len(streams.read_after("stream", 0)) == 1

    @table(
        ("name", "arguments"),
        [
            ("end_stream", []),
            ("fail_stream", ["error"]),
            ("pause_stream", []),
            ("reactivate_stream", []),
            ("reset_stream", []),
        ],
        shared=True,
    )
    def test_an_unknown_stream_has_no_life(
        self, streams: StreamManagerBase, name: str, arguments: list[Any]
    ) -> None:
        async def live() -> None:
            with pytest.raises(StreamNotFound):
                await getattr(streams, name)("nowhere", *arguments)
            assert await streams.get_info("nowhere") is None

        run(live)

    @table("bad", [float("nan"), {1}, b"bytes", ValueError("x")])
    def test_outputs_and_errors_are_payloads(self, streams: StreamManagerBase, bad: Any) -> None:
        self.filled(streams)

        with self.storage_untouched():
            with pytest.raises(InvalidPayload):
                run(lambda: streams.end_stream("stream", bad))
            with pytest.raises(InvalidPayload):
                run(lambda: streams.fail_stream("stream", bad))
        assert run(lambda: known(streams)).status is StreamStatus.ACTIVE


CHANGES: dict[str, Callable[[StreamManagerBase, int], Awaitable[object]]] = {
    "create_writer": lambda streams, token: streams.create_writer(
        "stream", "stale", "a", fencing_token=token
    ),
    "end_stream": lambda streams, token: streams.end_stream("stream", fencing_token=token),
    "fail_stream": lambda streams, token: streams.fail_stream("stream", "x", fencing_token=token),
    "pause_stream": lambda streams, token: streams.pause_stream("stream", fencing_token=token),
    "reactivate_stream": lambda streams, token: streams.reactivate_stream("stream", fencing_token=token),
    "reset_stream": lambda streams, token: streams.reset_stream("stream", fencing_token=token),
}


class StreamFencingContract(StreamTests):
    def lock_manager(self) -> LockManager:
        locks = self.make_lock_manager()
        if locks is None:
            pytest.skip("make_lock_manager() returns None: the streams check no tokens")
        return locks

    @staticmethod
    def held(locks: LockManager) -> HeldLock:
        lock = locks.acquire("stream")
        assert lock is not None
        return lock

    def tokens(self) -> tuple[int, int]:
        """Return the tokens of a former and the current holder of the stream's lock."""
        locks = self.lock_manager()
        former = self.held(locks)
        former.release()
        return former.fencing_token, self.held(locks).fencing_token

    def test_a_former_holders_writer_is_fenced_out(self, streams: StreamManagerBase) -> None:
        locks = self.lock_manager()
        former = self.held(locks)
        stale = run(lambda: streams.create_writer("stream", "1", "a", fencing_token=former.fencing_token))
        assert run(lambda: stale.write(chunk(1))) == 1
        former.release()
        holder = self.held(locks)
        with pytest.raises(FencedOutError) as caught:
            run(lambda: stale.write(chunk(2)))
        assert caught.value.token == former.fencing_token
        assert caught.value.current_token == holder.fencing_token
        with pytest.raises(FencedOutError):
            streams.write_sync("stream", [chunk(2)], fencing_token=former.fencing_token)
        fresh = run(lambda: streams.create_writer("stream", "2", "a", fencing_token=holder.fencing_token))
        assert run(lambda: fresh.write(chunk(2))) == 2
        assert streams.write_sync("stream", [chunk(3)], fencing_token=holder.fencing_token) == 3

    @pytest.mark.parametrize("change", CHANGES)
    def test_a_former_holder_changes_nothing(self, streams: StreamManagerBase, change: str) -> None:
        self.filled(streams, 1)
        stale, current = self.tokens()

        async def live() -> None:
            before = await known(streams)
            with pytest.raises(FencedOutError):
                await CHANGES[change](streams, stale)
            assert await known(streams) == before
            await CHANGES[change](streams, current)

        run(live)

    def test_a_former_holder_creates_no_stream(self, streams: StreamManagerBase) -> None:
        stale, _ = self.tokens()

        async def create() -> None:
            with pytest.raises(FencedOutError):
                await streams.create_writer("stream", "run", "agent", fencing_token=stale)
            assert await streams.get_info("stream") is None

        run(create)
