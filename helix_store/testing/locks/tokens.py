"""Fencing tokens: whatever happens to a lock, the next token is a greater one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from helix_store.locks.lock import Lock
from helix_store.locks.manager import LockManagerBase
from helix_store.testing.locks.base import SHORT, LockTests

__all__ = ["TokenContract"]

ENDS: dict[str, Callable[[LockTests, LockManagerBase, Lock], object]] = {
    "release": lambda test, locks, lock: lock.release(),
    "expiry": lambda test, locks, lock: (
        lock.refresh(SHORT),
        test.until(lambda: not locks.is_locked("name")),
    ),
    "force_release": lambda test, locks, lock: locks.force_release("name"),
}


class TokenContract(LockTests):
    @pytest.mark.parametrize("end", ENDS)
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
