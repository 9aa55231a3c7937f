"""A holder that stops for longer than its term cannot write over its successor, wherever it was stopped.

The holder is a process that really stands still (SIGSTOP), at one of three moments of a guarded write. The
takeover comes while it stands, or is refused until the write is through.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from multiprocessing.connection import Connection
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
from tests.cells import Cells
from tests.database.separate import separate_connection
from tests.databases import CommittedDatabase, fresh_tenant
from tests.processes import PROCESSES, WorkerProcess

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


def write_as_the_holder(alias: str, moment: str, orders: Connection) -> None:
    """Make guarded writes that stand still at a moment, as they are ordered.

    The answer is the error, or whether the lock was trusted when the write went on.
    """
    while order := orders.recv():
        tenant, write = order
        lock = acquired(DatabaseLockManager(alias, tenant=tenant))
        if moment == BEFORE_THE_WRITE:
            stand_still()
        # A fast path has no moments within, and the portable form behind it would stop once more.
        has_moments = override_settings(HELIX_STORE={"FAST_PATHS": moment == BEFORE_THE_WRITE})
        try:
            with has_moments, connections[alias].execute_wrapper(StandingStillAt(moment)):
                GUARDED[write](DatabaseStateStore(alias, tenant=tenant), lock.fencing_token)
        except FencedOutError as exc:
            orders.send(exc)
        else:
            orders.send(lock.is_trusted())


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
    """The worker process in one of its writes, standing still with an expired term."""

    def __init__(self, worker: WorkerProcess, orders: Connection, write: str, tenant: str) -> None:
        self.write = write
        self.tenant = tenant
        self._worker = worker
        self._orders = orders
        self._answers: list[Any] = []
        orders.send((tenant, write))

    def goes_on(self) -> Any:
        """The answer: see `write_as_the_holder`."""
        if not self._answers:
            go_on(self._worker)
            assert self._orders.poll(30)
            self._answers.append(self._orders.recv())
        return self._answers[0]


def go_on(worker: WorkerProcess) -> None:
    os.kill(worker.pid, signal.SIGCONT)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


def until_its_term_is_over(worker: WorkerProcess, locks: DatabaseLockManager) -> None:
    """Wait until the worker stands still, and does not hold its lock any longer."""
    process = psutil.Process(worker.pid)
    until(lambda: process.status() == psutil.STATUS_STOPPED or not worker.is_alive)
    until(lambda: not locks.is_locked("session"))


@dataclass(frozen=True)
class Race:
    """One guarded write: the holder, the store and the successor's locks."""

    holder: Holder
    store: DatabaseStateStore
    locks: DatabaseLockManager


def each_write(database: CommittedDatabase, successor: str, moment: str) -> Iterator[Race]:
    """Each guarded write of one process, in a tenant of its own, while it stands still."""
    orders, of_worker = PROCESSES.Pipe()
    worker = WorkerProcess(write_as_the_holder, database.alias, moment, of_worker)
    try:
        for write in GUARDED:
            tenant = fresh_tenant()
            store = DatabaseStateStore(database.alias, tenant=tenant)
            locks = DatabaseLockManager(successor, tenant=tenant, default_ttl_ms=60_000)
            session_for(store, write)
            holder = Holder(worker, orders, write, tenant)
            until_its_term_is_over(worker, locks)
            yield Race(holder, store, locks)
            holder.goes_on()
    finally:
        worker.kill()


@pytest.fixture
def successor(committed_db: CommittedDatabase) -> Iterator[str]:
    """The successor's connection. Where SQLite would wait for the one write transaction, it gives up."""
    settings = committed_db.connection.settings_dict
    if committed_db.vendor == "sqlite":
        settings = {**settings, "OPTIONS": {**settings["OPTIONS"], "timeout": 0}}
    with separate_connection(**settings) as connection:
        yield connection.alias


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


@pytest.mark.thorough
def test_a_write_that_begins_after_the_takeover_is_fenced_out(
    committed_db: CommittedDatabase, successor: str
) -> None:
    with Cells() as cells:
        for race in each_write(committed_db, successor, BEFORE_THE_WRITE):
            with cells.check(race.holder.write):
                token = taken_over(race.locks).fencing_token
                race.store.append_messages("session", [{"role": "user"}], fencing_token=token)
                before = contents(race.store, "session")
                error = race.holder.goes_on()
                assert isinstance(error, FencedOutError)
                assert (error.token, error.current_token) == (1, 2)
                assert contents(race.store, "session") == before


@pytest.mark.thorough
def test_a_write_that_is_overtaken_before_its_fence_is_fenced_out(
    committed_db: CommittedDatabase, successor: str
) -> None:
    with Cells() as cells:
        for race in each_write(committed_db, successor, BEFORE_THE_FENCE):
            with cells.check(race.holder.write):
                before = contents(race.store, "session")
                if committed_db.vendor == "sqlite":
                    # The write transaction keeps every other writer out from its start.
                    assert_no_takeover(committed_db, race.locks)
                    assert race.holder.goes_on() is False
                    assert contents(race.store, "session") != before
                    taken_over(race.locks)
                else:
                    taken_over(race.locks)
                    assert isinstance(race.holder.goes_on(), FencedOutError)
                    assert contents(race.store, "session") == before


@pytest.mark.thorough
def test_a_write_that_has_passed_its_fence_holds_the_takeover_off_until_it_is_through(
    committed_db: CommittedDatabase, successor: str
) -> None:
    with Cells() as cells:
        for race in each_write(committed_db, successor, AFTER_THE_FENCE):
            with cells.check(race.holder.write):
                before = contents(race.store, "session")
                assert_no_takeover(committed_db, race.locks)
                assert contents(race.store, "session") == before
                assert race.holder.goes_on() is False
                after = contents(race.store, "session")
                assert after != before
                taken_over(race.locks)
                with pytest.raises(FencedOutError):
                    GUARDED[race.holder.write](race.store, 1)
                assert contents(race.store, "session") == after


@pytest.mark.thorough
def test_a_holder_that_stood_still_distrusts_its_lock_and_its_keep_alive_finds_it_lost(
    committed_db: CommittedDatabase, successor: str
) -> None:
    locks = DatabaseLockManager(successor, tenant=committed_db.tenant, default_ttl_ms=60_000)
    worker = WorkerProcess(stand_still_with_a_keep_alive, committed_db.alias, committed_db.tenant)
    try:
        until_its_term_is_over(worker, locks)
        taken_over(locks)
        go_on(worker)
        assert worker.outcome().unwrap() == (False, False)
    finally:
        worker.kill()
    (info,) = locks.get_active_locks()
    assert info.fencing_token == 2
