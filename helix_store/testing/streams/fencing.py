"""Fencing: who has lost the lock named after a stream changes nothing in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from helix_store.exceptions import FencedOutError
from helix_store.streams.manager import StreamManagerBase
from helix_store.testing.streams.base import (
    HeldLock,
    LockManager,
    StreamTests,
    chunk,
    run,
)
from helix_store.testing.streams.lives import known

__all__ = ["StreamFencingContract"]

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
        """The token of a former holder of the stream's lock, and that of its holder."""
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
