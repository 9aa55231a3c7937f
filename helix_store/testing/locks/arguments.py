"""Tests that invalid arguments are refused and that nothing is stored."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.exceptions import InvalidPayload
from helix_store.locks import MAX_TTL_MS, LockManagerBase
from helix_store.testing.cells import table
from helix_store.testing.locks.base import LockTests

__all__ = ["LockArgumentContract"]

NO_TTLS: list[Any] = [
    0,
    -1,
    MAX_TTL_MS + 1,
    2**63,
    10**400,
    1.0,
    0.5,
    float("nan"),
    float("inf"),
    True,
    "1000",
    b"1000",
    [1000],
]
NO_IDENTIFIERS: list[Any] = [
    "",
    "x" * 256,
    "nul\x00",
    "line\nbreak",
    "high\ud83d",
    b"bytes",
    7,
    True,
    ["name"],
]


class LockArgumentContract(LockTests):
    @table("bad", NO_TTLS)
    def test_a_ttl_is_a_whole_number_of_milliseconds_up_to_seven_days(
        self, locks: LockManagerBase, bad: Any
    ) -> None:
        held = self.acquired(locks, "held")
        end = held.expires_at
        with self.storage_untouched():
            for call in (
                lambda: locks.acquire("name", ttl_ms=bad),
                lambda: locks.wait_acquire("name", timeout_ms=0, ttl_ms=bad),
                lambda: held.refresh(bad),
                lambda: self.make_manager(default_ttl_ms=bad),
            ):
                with pytest.raises(InvalidPayload):
                    call()
        assert [(info.name, info.expires_at) for info in locks.get_active_locks()] == [("held", end)]
        assert self.acquired(locks).fencing_token == 1

    @table("ttl_ms", [1, MAX_TTL_MS])
    def test_the_shortest_and_the_longest_ttl_are_accepted(self, locks: LockManagerBase, ttl_ms: int) -> None:
        assert self.acquired(locks, ttl_ms=ttl_ms).ttl_ms == ttl_ms

    @table("bad", NO_IDENTIFIERS)
    def test_an_owner_is_an_identifier(self, locks: LockManagerBase, bad: Any) -> None:
        with self.storage_untouched():
            with pytest.raises(InvalidPayload):
                locks.acquire("name", owner=bad)
            with pytest.raises(InvalidPayload):
                locks.wait_acquire("name", timeout_ms=0, owner=bad)
        assert self.acquired(locks).fencing_token == 1

    @table("bad", [*NO_IDENTIFIERS, None], shared=True)
    def test_a_name_is_an_identifier(self, locks: LockManagerBase, bad: Any) -> None:
        with self.storage_untouched():
            for call in (
                lambda: locks.acquire(bad),
                lambda: locks.wait_acquire(bad, timeout_ms=0),
                lambda: locks.is_locked(bad),
                lambda: locks.force_release(bad),
            ):
                with pytest.raises(InvalidPayload):
                    call()
        assert locks.get_active_locks() == []

    @table("bad", [-1, 1.0, float("nan"), "1", None, True], shared=True)
    def test_a_timeout_is_a_whole_number_of_milliseconds(self, locks: LockManagerBase, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            locks.wait_acquire("name", timeout_ms=bad)
        assert not locks.is_locked("name")

    @table("bad", ["x" * 256, "nul\x00", None, 7], shared=True)
    def test_a_tenant_is_an_identifier_or_empty(self, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            self.make_manager(tenant=bad)
