"""The same from asynchronous code."""

from __future__ import annotations

import asyncio

import pytest
from asgiref.sync import async_to_sync

from helix_store.exceptions import (
    InvalidPayload,
    LockLostError,
    StoreBusy,
)
from helix_store.locks.manager import LockManagerBase
from helix_store.testing.locks.base import LONG, LockTests

__all__ = ["AsyncLockContract"]


class AsyncLockContract(LockTests):
    def test_a_lock_lives_asynchronously(self, locks: LockManagerBase) -> None:
        async def live() -> None:
            lock = await locks.aacquire("name", ttl_ms=LONG, owner="worker")
            assert lock is not None
            assert (lock.name, lock.owner, lock.fencing_token) == ("name", "worker", 1)
            assert await locks.aacquire("name") is None
            assert await locks.ais_locked("name")
            assert [info.owner for info in await locks.aget_active_locks()] == ["worker"]
            assert await lock.arefresh(2 * LONG) == lock.expires_at
            assert await lock.arelease()
            with pytest.raises(LockLostError):
                await lock.arefresh()
            async with await locks.await_acquire("name", timeout_ms=0) as again:
                assert again.fencing_token == 2
            assert not await locks.ais_locked("name")
            assert not await locks.aforce_release("name")
            with pytest.raises(InvalidPayload):
                await locks.aacquire("")
            with pytest.raises(InvalidPayload):
                await locks.await_acquire("name", timeout_ms=-1)

        async_to_sync(live)()

    def test_a_waiting_task_lets_the_holder_release(self, locks: LockManagerBase) -> None:
        async def meet() -> tuple[int, int]:
            held = await locks.aacquire("name")
            assert held is not None
            waiter = asyncio.create_task(locks.await_acquire("name", timeout_ms=20_000))
            with pytest.raises(StoreBusy):
                await locks.await_acquire("name", timeout_ms=30)
            await held.arelease()
            return held.fencing_token, (await waiter).fencing_token

        assert async_to_sync(meet)() == (1, 2)
