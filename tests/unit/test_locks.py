"""Locks without a database: their rules, keep-alive under faults, and the manager that locks nothing."""

from __future__ import annotations

import logging
import threading
import time
from itertools import pairwise

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from pytest_django import Settings

from helix_store.core.validation import identifier
from helix_store.exceptions import InvalidPayload, LockLostError, StoreUnavailable
from helix_store.locks import KeepAlive, process_owner, retry_pauses, trust_ends
from helix_store.stores import InMemoryLockManager, InMemoryStateStore, MemoryWorld, NoOpLockManager

# Rules


def test_trust_ends_a_tenth_of_the_term_before_the_earliest_end() -> None:
    assert trust_ends(100.0, 30_000) == pytest.approx(127.0)
    assert trust_ends(0.0, 1) < 0.001


def test_pauses_between_retries_grow_vary_and_end_at_the_timeout() -> None:
    pauses = []
    started = time.monotonic()
    for pause in retry_pauses(10**9):
        pauses.append(pause)
        if len(pauses) == 50:
            break
    assert time.monotonic() - started < 5
    assert 0.005 <= pauses[0] <= 0.01
    assert all(0.125 <= pause <= 0.25 for pause in pauses[6:])
    assert len(set(pauses)) > 40
    assert all(pause <= 0.02 for pause in retry_pauses_of(20))
    assert list(retry_pauses(0)) == [0.0]


def retry_pauses_of(timeout_ms: int) -> list[float]:
    """The pauses of a waiter that really pauses."""
    pauses = []
    for pause in retry_pauses(timeout_ms):
        pauses.append(pause)
        threading.Event().wait(pause)
    assert sum(pauses) <= timeout_ms / 1000
    return pauses


def test_an_owner_names_the_process_and_cannot_come_again() -> None:
    assert process_owner("a") != process_owner("b")
    assert process_owner("a") == process_owner("a")
    assert identifier(process_owner("x" * 32), "owner")


@pytest.mark.parametrize("manager", [InMemoryLockManager, NoOpLockManager])
def test_the_default_ttl_is_read_live_from_the_settings(
    settings: Settings, manager: type[InMemoryLockManager | NoOpLockManager]
) -> None:
    locks = manager()
    settings.HELIX_STORE = {"DEFAULT_LOCK_TTL_MS": 1234}
    assert locks.default_ttl_ms == 1234
    lock = locks.acquire("name")
    assert lock is not None
    assert lock.ttl_ms == 1234
    settings.HELIX_STORE = {"DEFAULT_LOCK_TTL_MS": 0}
    with pytest.raises(ImproperlyConfigured):
        locks.acquire("another")
    assert manager(default_ttl_ms=77).default_ttl_ms == 77


# Keep-alive


def wait_for_the_end_of(keep_alive: KeepAlive) -> None:
    deadline = time.monotonic() + 30
    while keep_alive.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_keep_alive_goes_on_through_failures_until_the_lock_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcomes = iter([StoreUnavailable(), None, StoreUnavailable(), StoreUnavailable(), LockLostError()])
    times = []

    def refresh() -> None:
        times.append(time.monotonic())
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome

    with caplog.at_level(logging.WARNING):
        wait_for_the_end_of(KeepAlive(refresh, lambda: 300, name="session"))
    assert len(times) == 5
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[1] >= 0.1
    assert all(pause >= 0.03 for pause in (pauses[0], pauses[2], pauses[3]))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    assert "session" in caplog.text


def test_a_keep_alive_that_is_stopped_refreshes_no_more() -> None:
    refreshed = threading.Event()
    keep_alive = KeepAlive(refreshed.set, lambda: 30, name="session")
    assert refreshed.wait(30)
    keep_alive.stop()
    keep_alive.stop()
    refreshed.clear()
    assert not keep_alive.is_running()
    assert not refreshed.wait(0.1)


def test_a_keep_alive_does_not_wait_for_the_end_of_its_term_to_stop() -> None:
    started = time.monotonic()
    with KeepAlive(lambda: None, lambda: 600_000, name="session"):
        pass
    assert time.monotonic() - started < 5


# The manager that locks nothing


def test_a_manager_that_locks_nothing_grants_everything() -> None:
    locks = NoOpLockManager()
    first, second = locks.acquire("name", owner="a"), locks.acquire("name", owner="b")
    assert first is not None
    assert second is not None
    assert first.fencing_token < second.fencing_token
    assert (first.name, first.owner, first.ttl_ms) == ("name", "a", 30_000)
    assert not locks.is_locked("name")
    assert locks.get_active_locks() == []
    assert locks.force_release("name")
    assert first.refresh(1000) <= second.refresh()
    assert first.is_trusted()
    with second.keep_alive() as keep_alive:
        assert keep_alive.is_running()
    assert first.release()
    assert not first.is_trusted()
    assert locks.wait_acquire("name", timeout_ms=0).fencing_token > second.fencing_token


def test_its_tokens_pass_where_a_session_was_locked_for_real() -> None:
    world = MemoryWorld()
    store = InMemoryStateStore(world=world)
    store.create_session("session", agent_type="agent")
    for _ in range(5):
        assert InMemoryLockManager(world=world).wait_acquire("session", timeout_ms=0).release()
    lock = NoOpLockManager().acquire("session")
    assert lock is not None
    assert store.append_messages("session", [{"role": "user"}], fencing_token=lock.fencing_token) == 1


def test_its_tokens_grow_between_managers_and_threads() -> None:
    taken: list[int] = []

    def take() -> None:
        locks = NoOpLockManager()
        for _ in range(500):
            lock = locks.acquire("name")
            assert lock is not None
            taken.append(lock.fencing_token)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 2_000


def test_it_checks_its_arguments_all_the_same() -> None:
    locks = NoOpLockManager()
    for refused in ({"ttl_ms": 0}, {"ttl_ms": float("nan")}, {"owner": ""}):
        with pytest.raises(InvalidPayload):
            locks.acquire("name", **refused)
    with pytest.raises(InvalidPayload):
        locks.acquire("")
    with pytest.raises(InvalidPayload):
        NoOpLockManager(default_ttl_ms=-1)


def test_it_works_asynchronously_too() -> None:
    async def work() -> int:
        async with await NoOpLockManager().await_acquire("name", timeout_ms=0) as lock:
            return lock.fencing_token

    assert async_to_sync(work)() > 0
