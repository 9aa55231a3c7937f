"""A holder that stops for longer than its term cannot write over its successor, wherever it was stopped.

The holder is a process that really stands still (SIGSTOP), at one of three moments of a guarded write. The
takeover comes while it stands, or is refused until the write is through.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import psutil
import pytest
from django.db import connections
from django.test.utils import override_settings

from helix_store.core.contracts import REQUIRED_METHODS, StateStore
from helix_store.exceptions import (
    FencedOutError,
    LockLostError,
    StoreBusy,
)
from helix_store.models import Lock as LockRow
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    Lock,
)
from helix_store.testing.state_store.samples import contents
from helix_store.testing.state_store.versions import GUARDED, session_for
from tests.database.separate import separate_connection
from tests.databases import CommittedDatabase
from tests.processes import Outcome, WorkerProcess

pytestmark = pytest.mark.usefixtures("machine")

SOON_OVER_MS = 50
BEFORE_THE_WRITE = "before the write"
BEFORE_THE_FENCE = "in the write, before the fence"
AFTER_THE_FENCE = "in the write, after the fence"


# What the holder's process runs


def stand_still() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class StandingStillAt:
    """Stops the process around the statement that reads the newest token."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def __call__(self, execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        is_fence = LockRow._meta.db_table in sql
        if is_fence and self.moment == BEFORE_THE_FENCE:
            stand_still()
        result = execute(sql, *rest)
        if is_fence and self.moment == AFTER_THE_FENCE:
            stand_still()
        return result


def acquired(locks: DatabaseLockManager) -> Lock:
    lock = locks.acquire("session", ttl_ms=SOON_OVER_MS)
    assert lock is not None
    return lock


def write_as_the_holder(alias: str, tenant: str, write: str, moment: str) -> bool:
    """Make a guarded write that stands still at a moment; whether the lock was trusted when it went on."""
    lock = acquired(DatabaseLockManager(alias, tenant=tenant))
    if moment == BEFORE_THE_WRITE:
        stand_still()
    # A fast path has no moments within, and the portable form behind it would stop once more.
    has_moments = override_settings(HELIX_STORE={"FAST_PATHS": moment == BEFORE_THE_WRITE})
    with has_moments, connections[alias].execute_wrapper(StandingStillAt(moment)):
        GUARDED[write](DatabaseStateStore(alias, tenant=tenant), lock.fencing_token)
    return lock.is_trusted()


def stand_still_with_a_keep_alive(alias: str, tenant: str) -> tuple[bool, bool]:
    """Whether the keep-alive runs and the lock is trusted after the process stood still."""
    lock = acquired(DatabaseLockManager(alias, tenant=tenant))
    keep_alive = lock.keep_alive()
    stand_still()
    trusted = lock.is_trusted()
    deadline = time.monotonic() + 30
    while keep_alive.is_running():
        assert time.monotonic() < deadline
    with pytest.raises(LockLostError):
        lock.refresh()
    return trusted, lock.is_trusted()


# What the test does meanwhile


class Holder:
    """The worker process, standing still with an expired term."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker

    def goes_on(self) -> Outcome:
        os.kill(self._worker.pid, signal.SIGCONT)
        return self._worker.outcome()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


@contextmanager
def holder_standing_still(
    locks: DatabaseLockManager, function: Callable[..., Any], *arguments: Any
) -> Iterator[Holder]:
    worker = WorkerProcess(function, *arguments)
    try:
        process = psutil.Process(worker.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED or not worker.is_alive)
        until(lambda: not locks.is_locked("session"))
        yield Holder(worker)
    finally:
        worker.kill()


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture
def locks(committed_db: CommittedDatabase) -> Iterator[DatabaseLockManager]:
    """The successor's locks; where SQLite would wait for the one write transaction, it gives up at once."""
    settings = committed_db.connection.settings_dict
    if committed_db.vendor == "sqlite":
        settings = {**settings, "OPTIONS": {**settings["OPTIONS"], "timeout": 0}}
    with separate_connection(**settings) as connection:
        yield DatabaseLockManager(connection.alias, tenant=committed_db.tenant, default_ttl_ms=60_000)


def taken_over(locks: DatabaseLockManager) -> Lock:
    successor = locks.acquire("session")
    assert successor is not None
    assert successor.fencing_token == 2
    return successor


def assert_no_takeover(database: CommittedDatabase, locks: DatabaseLockManager) -> None:
    if database.vendor == "sqlite":
        with pytest.raises(StoreBusy):
            locks.acquire("session")
    else:
        assert locks.acquire("session") is None


def test_every_call_that_takes_a_token_is_in_the_matrix() -> None:
    calls = [name for name in REQUIRED_METHODS if f"a{name}" in REQUIRED_METHODS]
    guarded = [name for name in calls if "fencing_token" in signature(getattr(StateStore, name)).parameters]
    assert sorted(GUARDED) == sorted(guarded)


@pytest.mark.parametrize("write", GUARDED)
def test_a_write_that_begins_after_the_takeover_is_fenced_out(
    committed_db: CommittedDatabase, store: DatabaseStateStore, locks: DatabaseLockManager, write: str
) -> None:
    session_for(store, write)
    arguments = (committed_db.alias, committed_db.tenant, write, BEFORE_THE_WRITE)
    with holder_standing_still(locks, write_as_the_holder, *arguments) as holder:
        successor = taken_over(locks)
        store.append_messages("session", [{"role": "user"}], fencing_token=successor.fencing_token)
        before = contents(store, "session")
        error = holder.goes_on().error
    assert isinstance(error, FencedOutError)
    assert (error.token, error.current_token) == (1, 2)
    assert contents(store, "session") == before


@pytest.mark.parametrize("write", GUARDED)
def test_a_write_that_is_overtaken_before_its_fence_is_fenced_out(
    committed_db: CommittedDatabase, store: DatabaseStateStore, locks: DatabaseLockManager, write: str
) -> None:
    session_for(store, write)
    before = contents(store, "session")
    arguments = (committed_db.alias, committed_db.tenant, write, BEFORE_THE_FENCE)
    with holder_standing_still(locks, write_as_the_holder, *arguments) as holder:
        if committed_db.vendor == "sqlite":
            # The write transaction keeps every other writer out from its start, so nothing can overtake it.
            assert_no_takeover(committed_db, locks)
            assert holder.goes_on().unwrap() is False
            assert contents(store, "session") != before
            taken_over(locks)
            return
        taken_over(locks)
        error = holder.goes_on().error
    assert isinstance(error, FencedOutError)
    assert contents(store, "session") == before


@pytest.mark.parametrize("write", GUARDED)
def test_a_write_that_has_passed_its_fence_holds_the_takeover_off_until_it_is_through(
    committed_db: CommittedDatabase, store: DatabaseStateStore, locks: DatabaseLockManager, write: str
) -> None:
    session_for(store, write)
    before = contents(store, "session")
    arguments = (committed_db.alias, committed_db.tenant, write, AFTER_THE_FENCE)
    with holder_standing_still(locks, write_as_the_holder, *arguments) as holder:
        assert_no_takeover(committed_db, locks)
        assert contents(store, "session") == before
        assert holder.goes_on().unwrap() is False
    after = contents(store, "session")
    assert after != before
    taken_over(locks)
    with pytest.raises(FencedOutError):
        GUARDED[write](store, 1)
    assert contents(store, "session") == after


def test_a_holder_that_stood_still_distrusts_its_lock_and_its_keep_alive_finds_it_lost(
    committed_db: CommittedDatabase, locks: DatabaseLockManager
) -> None:
    arguments = (committed_db.alias, committed_db.tenant)
    with holder_standing_still(locks, stand_still_with_a_keep_alive, *arguments) as holder:
        taken_over(locks)
        assert holder.goes_on().unwrap() == (False, False)
    (info,) = locks.get_active_locks()
    assert info.fencing_token == 2
