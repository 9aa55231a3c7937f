"""Tests for a lock's terms and their fencing tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise

import pytest

from helix_store.exceptions import LockLostError
from helix_store.locks import Lock, LockManagerBase
from helix_store.testing.cells import table
from helix_store.testing.locks.base import (
    LONG,
    SHORT,
    LockTests,
)

__all__ = ["TermContract", "TokenContract"]


class TermContract(LockTests):
    # Release

    def test_a_released_lock_is_free_and_cannot_be_released_again(self, locks: LockManagerBase) -> None:
        lock = self.acquired(locks)
        assert lock.release()
        assert not locks.is_locked("name")
        assert not lock.release()
        assert self.acquired(locks).fencing_token == lock.fencing_token + 1

    def test_a_former_holder_releases_nothing(self, locks: LockManagerBase) -> None:
        former = self.expired(locks)
        assert not former.release()
        holder = self.acquired(locks)
        assert not former.release()
        assert locks.is_locked("name")
        assert holder.release()

    def test_a_former_holder_of_the_same_owner_releases_nothing(self, locks: LockManagerBase) -> None:
        former = locks.acquire("name", owner="worker")
        assert former is not None
        assert former.release()
        assert locks.acquire("name", owner="worker") is not None
        assert not former.release()
        assert locks.is_locked("name")

    def test_leaving_a_lock_releases_it(self, locks: LockManagerBase) -> None:
        with self.acquired(locks) as lock:
            assert locks.is_locked("name")
        assert not locks.is_locked("name")
        assert not lock.release()

    def test_an_error_releases_the_lock_too(self, locks: LockManagerBase) -> None:
        with pytest.raises(KeyError), self.acquired(locks):
            raise KeyError
        assert not locks.is_locked("name")

    # Expiry

    def test_an_expired_lock_is_free(self, locks: LockManagerBase) -> None:
        former = self.expired(locks)
        assert locks.get_active_locks() == []
        assert self.acquired(locks).fencing_token == former.fencing_token + 1

    def test_a_holder_is_told_that_its_lock_has_expired(self, locks: LockManagerBase) -> None:
        former = self.expired(locks)
        with pytest.raises(LockLostError):
            former.refresh()
        assert not locks.is_locked("name")

    # Refresh

    def test_a_refresh_starts_the_term_anew(self, locks: LockManagerBase) -> None:
        lock = self.acquired(locks)
        first_end = lock.expires_at
        self.until(lambda: lock.refresh() > first_end)
        (info,) = locks.get_active_locks()
        assert (info.expires_at, info.fencing_token) == (lock.expires_at, lock.fencing_token)

    def test_a_refresh_may_ask_for_another_term_and_keeps_to_it(self, locks: LockManagerBase) -> None:
        lock = self.acquired(locks, ttl_ms=LONG)
        longer = lock.refresh(10 * LONG)
        assert (lock.expires_at, lock.ttl_ms) == (longer, 10 * LONG)
        assert lock.refresh() >= longer
        lock.refresh(SHORT)
        self.until(lambda: not locks.is_locked("name"))

    def test_a_refreshed_lock_outlives_its_first_term(self, locks: LockManagerBase) -> None:
        lock = self.acquired(locks, ttl_ms=1_500)
        self.acquired(locks, "never refreshed", ttl_ms=1_500)
        lock.refresh(LONG)
        self.until(lambda: not locks.is_locked("never refreshed"))
        assert locks.is_locked("name")
        assert lock.is_trusted()

    @table("how", ["released", "taken over", "taken away"])
    def test_a_former_holder_cannot_refresh(self, locks: LockManagerBase, how: str) -> None:
        if how == "taken over":
            former = self.expired(locks)
            self.acquired(locks)
        else:
            former = self.acquired(locks)
            assert former.release() if how == "released" else locks.force_release("name")
        before = locks.get_active_locks()
        with pytest.raises(LockLostError) as caught:
            former.refresh()
        assert not caught.value.retryable
        assert locks.get_active_locks() == before

    # Trust

    def test_trust_ends_before_the_term_does(self, locks: LockManagerBase) -> None:
        lock = self.acquired(locks, ttl_ms=200)
        is_held = True
        while is_held:
            # Check in this order, because a lock that is free now may be held later.
            is_held = locks.is_locked("name")
            assert is_held or not lock.is_trusted()

    def test_trust_lasts_for_nine_tenths_of_the_term(self, locks: LockManagerBase) -> None:
        requested_at = time.monotonic()
        lock = self.acquired(locks, ttl_ms=400)
        self.until(lambda: not lock.is_trusted())
        assert time.monotonic() - requested_at >= 0.36

    def test_a_lock_that_was_released_or_lost_is_not_trusted(self, locks: LockManagerBase) -> None:
        released, lost = self.acquired(locks, "released"), self.acquired(locks, "lost")
        released.release()
        assert not released.is_trusted()
        locks.force_release("lost")
        with pytest.raises(LockLostError):
            lost.refresh()
        assert not lost.is_trusted()

    # Keep-alive

    def test_a_lock_is_kept_alive_beyond_its_term(self, locks: LockManagerBase) -> None:
        # A busy machine may not renew a short term in time; a longer one decides.
        terms = [600, 3_000, 12_000]
        assert any(self._is_kept_alive(locks, ttl_ms) for ttl_ms in terms), terms

    def _is_kept_alive(self, locks: LockManagerBase, ttl_ms: int) -> bool:
        lock = self.acquired(locks, ttl_ms=ttl_ms)
        later = lock.expires_at + timedelta(milliseconds=ttl_ms + 100)
        with lock.keep_alive() as keep_alive:
            self.until(lambda: lock.expires_at > later or not keep_alive.is_running())
            is_kept = keep_alive.is_running() and locks.is_locked("name") and lock.is_trusted()
        assert not keep_alive.is_running()
        self.until(lambda: not locks.is_locked("name"))
        return is_kept

    def test_releasing_ends_the_keep_alive(self, locks: LockManagerBase) -> None:
        lock = self.acquired(locks)
        keep_alive = lock.keep_alive()
        assert lock.keep_alive() is keep_alive
        assert lock.release()
        assert not keep_alive.is_running()
        assert not locks.is_locked("name")

    def test_a_keep_alive_can_be_started_again(self, locks: LockManagerBase) -> None:
        lock = self.acquired(locks)
        lock.keep_alive().stop()
        with lock.keep_alive() as keep_alive:
            assert keep_alive.is_running()
        lock.release()

    def test_a_keep_alive_ends_with_the_lock_that_it_lost(self, locks: LockManagerBase) -> None:
        lock = self.acquired(locks, ttl_ms=90)
        keep_alive = lock.keep_alive()
        locks.force_release("name")
        self.until(lambda: not keep_alive.is_running())
        assert not lock.is_trusted()
        assert not locks.is_locked("name")


ENDS: dict[str, Callable[[LockTests, LockManagerBase, Lock], object]] = {
    "release": lambda test, locks, lock: lock.release(),
    "expiry": lambda test, locks, lock: (
        lock.refresh(SHORT),
        test.until(lambda: not locks.is_locked("name")),
    ),
    "force_release": lambda test, locks, lock: locks.force_release("name"),
}


class TokenContract(LockTests):
    @table("end", ENDS)
    def test_tokens_grow_however_a_term_ends(self, locks: LockManagerBase, end: str) -> None:
        tokens = []
        for _ in range(5):
            lock = self.acquired(locks)
            tokens.append(lock.fencing_token)
            ENDS[end](self, locks, lock)
        assert all(earlier < later for earlier, later in pairwise(tokens))

    def test_taking_a_lock_away_uses_up_a_token_that_fences_its_former_holder(
        self, locks: LockManagerBase
    ) -> None:
        held = self.acquired(locks)
        locks.force_release("name")
        assert self.acquired(locks).fencing_token == held.fencing_token + 2

    def test_tokens_grow_by_name(self, locks: LockManagerBase) -> None:
        for _ in range(3):
            self.acquired(locks, "busy").release()
        assert self.acquired(locks, "quiet").fencing_token == 1
        assert self.acquired(locks, "busy").fencing_token == 4

    def test_a_refresh_keeps_the_token(self, locks: LockManagerBase) -> None:
        lock = self.acquired(locks)
        lock.refresh()
        assert lock.fencing_token == 1
        assert [info.fencing_token for info in locks.get_active_locks()] == [1]

    def test_a_refused_acquisition_uses_up_no_token(self, locks: LockManagerBase) -> None:
        lock = self.acquired(locks)
        for _ in range(3):
            assert locks.acquire("name") is None
        lock.release()
        assert self.acquired(locks).fencing_token == 2

    def test_many_workers_get_each_token_once(self, locks: LockManagerBase) -> None:
        def work() -> list[int]:
            tokens = []
            for _ in range(5):
                with locks.wait_acquire("name", timeout_ms=30_000) as lock:
                    tokens.append(lock.fencing_token)
            return tokens

        tokens = self.at_once(*[work] * 6)
        assert sorted(token for taken in tokens for token in taken) == list(range(1, 31))
        assert all(taken == sorted(taken) for taken in tokens)
