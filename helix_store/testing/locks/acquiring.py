"""Tests for acquiring a lock, from synchronous and asynchronous code."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from asgiref.sync import async_to_sync

from helix_store.core.types import LockInfo
from helix_store.exceptions import (
    InvalidPayload,
    LockLostError,
    StoreBusy,
)
from helix_store.locks import LockManagerBase
from helix_store.testing.locks.base import LONG, LockTests

__all__ = ["AcquiringContract", "AsyncLockContract"]


class AcquiringContract(LockTests):
    def test_a_free_lock_is_acquired(self, locks: LockManagerBase) -> None:
        before = datetime.now(UTC)
        lock = locks.acquire("name", ttl_ms=LONG, owner="worker-1")
        assert lock is not None
        assert (lock.name, lock.owner, lock.fencing_token) == ("name", "worker-1", 1)
        assert abs(lock.expires_at - before - timedelta(milliseconds=LONG)) < timedelta(seconds=30)
        assert lock.expires_at.utcoffset() == timedelta(0)
        assert lock.is_trusted()

    def test_a_held_lock_is_refused_at_once(self, locks: LockManagerBase) -> None:
        held = self.acquired(locks)
        assert locks.acquire("name", owner="another") is None
        assert held.is_trusted()
        assert held.release()

    def test_a_holder_cannot_acquire_its_lock_again(self, locks: LockManagerBase) -> None:
        assert locks.acquire("name", owner="worker") is not None
        assert locks.acquire("name", owner="worker") is None

    def test_names_do_not_exclude_each_other(self, locks: LockManagerBase) -> None:
        for name in ("name", "Name", "näme", "na%me", "n_me", "'; --", "€" * 255):
            assert locks.acquire(name) is not None

    def test_managers_share_their_locks(self, locks: LockManagerBase) -> None:
        self.acquired(locks)
        assert self.make_manager().acquire("name") is None

    def test_tenants_do_not_see_each_others_locks(self, locks: LockManagerBase) -> None:
        theirs = self.make_manager(tenant="theirs")
        ours = self.acquired(locks)
        assert not theirs.is_locked("name")
        assert theirs.get_active_locks() == []
        assert not theirs.force_release("name")
        assert self.acquired(theirs).release()
        assert locks.is_locked("name")
        assert ours.release()

    def test_a_name_and_a_tenant_are_not_mistaken_for_another_pair(self) -> None:
        for tenant, name in (("a", "b c"), ("a b", "c"), ("", "a b c")):
            assert self.make_manager(tenant=tenant).acquire(name) is not None

    def test_owners_differ_between_managers_when_none_is_given(self) -> None:
        owners = {self.acquired(self.make_manager(), name).owner for name in ("a", "b", "c")}
        assert len(owners) == 3

    def test_the_ttl_is_the_managers_where_a_call_gives_none(self) -> None:
        lock = self.make_manager(default_ttl_ms=LONG).acquire("name")
        assert lock is not None
        assert lock.ttl_ms == LONG
        assert self.make_manager().default_ttl_ms == 30_000

    def test_of_many_at_once_exactly_one_acquires(self, locks: LockManagerBase) -> None:
        for round_ in range(5):
            outcomes = self.at_once(*[lambda name=f"name-{round_}": locks.acquire(name)] * 8)
            assert len([lock for lock in outcomes if lock is not None]) == 1
            # Repeat this on a row that already exists.
            assert locks.force_release(f"name-{round_}")
            outcomes = self.at_once(*[lambda name=f"name-{round_}": locks.acquire(name)] * 8)
            assert len([lock for lock in outcomes if lock is not None]) == 1

    # Waiting

    def test_waiting_acquires_as_soon_as_the_holder_releases(self, locks: LockManagerBase) -> None:
        held = self.acquired(locks)

        def wait() -> int:
            return locks.wait_acquire("name", timeout_ms=20_000).fencing_token

        def release() -> int:
            held.release()
            return held.fencing_token

        waited, released = self.at_once(wait, release)
        assert waited > released

    def test_waiting_ends_when_the_time_is_up(self, locks: LockManagerBase) -> None:
        self.acquired(locks)
        for timeout_ms in (0, 1, 50):
            with pytest.raises(StoreBusy) as caught:
                locks.wait_acquire("name", timeout_ms=timeout_ms)
            assert caught.value.retryable

    def test_waiting_passes_on_what_is_asked_for(self, locks: LockManagerBase) -> None:
        lock = locks.wait_acquire("name", timeout_ms=0, ttl_ms=LONG + 1, owner="worker")
        assert (lock.ttl_ms, lock.owner) == (LONG + 1, "worker")

    # Seeing

    def test_a_lock_is_locked_while_it_is_held(self, locks: LockManagerBase) -> None:
        assert not locks.is_locked("name")
        lock = self.acquired(locks)
        assert locks.is_locked("name")
        assert not locks.is_locked("another name")
        lock.release()
        assert not locks.is_locked("name")

    def test_active_locks_are_those_that_are_held_in_order_of_their_names(
        self, locks: LockManagerBase
    ) -> None:
        assert locks.get_active_locks() == []
        for name in ("b", "a", "released"):
            self.acquired(locks, name).release()
        self.expired(locks, "expired")
        held = [locks.acquire(name, owner=f"owner of {name}") for name in ("b", "a")]
        assert locks.get_active_locks() == [
            LockInfo(
                name=lock.name,
                owner=f"owner of {lock.name}",
                fencing_token=lock.fencing_token,
                expires_at=lock.expires_at,
            )
            for lock in reversed(held)
            if lock is not None
        ]

    def test_an_active_lock_is_plain_values_and_back(self, locks: LockManagerBase) -> None:
        self.acquired(locks)
        (info,) = locks.get_active_locks()
        assert LockInfo.from_dict(info.to_dict()) == info

    # Taking away

    def test_a_lock_can_be_taken_from_its_holder(self, locks: LockManagerBase) -> None:
        held = self.acquired(locks)
        assert locks.force_release("name")
        assert not locks.is_locked("name")
        with pytest.raises(LockLostError):
            held.refresh()
        assert not held.release()
        assert self.acquired(locks).fencing_token > held.fencing_token

    def test_taking_over_ends_the_term_of_the_holder_and_begins_one(self, locks: LockManagerBase) -> None:
        held = self.acquired(locks)
        lock = locks.take_over("name", owner="successor", ttl_ms=LONG)
        assert (lock.owner, lock.fencing_token) == ("successor", held.fencing_token + 1)
        assert not held.release()
        with pytest.raises(LockLostError):
            held.refresh()
        assert [info.owner for info in locks.get_active_locks()] == ["successor"]
        assert lock.release()

    def test_a_free_and_a_new_name_are_taken_over_too(self, locks: LockManagerBase) -> None:
        assert locks.take_over("name").fencing_token == 1
        again = locks.take_over("name")
        assert again.release()
        assert locks.take_over("name").fencing_token == 3

    def test_of_many_that_take_over_at_once_each_gets_a_token_and_the_last_one_holds(
        self, locks: LockManagerBase
    ) -> None:
        taken = self.at_once(*[lambda: self.make_manager().take_over("name", timeout_ms=60_000)] * 8)
        assert sorted(lock.fencing_token for lock in taken) == list(range(1, 9))
        assert [lock.fencing_token for lock in taken if lock.release()] == [8]

    def test_a_lock_is_taken_over_asynchronously(self, locks: LockManagerBase) -> None:
        held = self.acquired(locks)
        lock = async_to_sync(locks.atake_over)("name", owner="successor")
        assert lock.fencing_token > held.fencing_token
        assert not held.release()

    def test_a_lock_that_nobody_holds_cannot_be_taken_away(self, locks: LockManagerBase) -> None:
        assert not locks.force_release("name")
        self.acquired(locks).release()
        assert not locks.force_release("name")
        self.expired(locks)
        assert not locks.force_release("name")


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
