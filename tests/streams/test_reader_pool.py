"""The threads of readers: few, shared, never reused for a query that has begun, and closed when unused."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.core import ids as processes
from helix_store.engine.database import Database
from helix_store.engine.statement import Statement
from helix_store.stores import DatabaseStreamManager
from helix_store.streams import watching as module
from helix_store.streams.watching import ReaderPool
from tests.databases import CommittedDatabase
from tests.streams.background import wait_for_background_threads

_PATIENCE_SECONDS = 30.0
_caller: ContextVar[str] = ContextVar("caller", default="no task")
_ONE = Statement("SELECT 1")


class Gate:
    """A query that says when it has begun and waits until it may end."""

    def __init__(self, value: object = None) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()
        self.times = 0
        self._value = value

    def __call__(self) -> object:
        self.times += 1
        self.begun.set()
        assert self.opened.wait(_PATIENCE_SECONDS)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  threads set it
            await asyncio.sleep(0.005)


async def _busy(pool: ReaderPool, alias: str, count: int = 4) -> tuple[list[Gate], list[asyncio.Task[Any]]]:
    """Occupy threads of the pool, by default all of them."""
    gates = [Gate() for _ in range(count)]
    tasks = [asyncio.create_task(pool.run(alias, ("busy", n), gate)) for n, gate in enumerate(gates)]
    for gate in gates:
        await _until(gate.begun.is_set)
    return gates, tasks


def _open(*gates: Gate) -> None:
    for gate in gates:
        gate.opened.set()


async def test_queries_that_wait_under_one_key_are_one_query(committed_db: CommittedDatabase) -> None:
    pool, alias = ReaderPool(), committed_db.alias
    gates, busy = await _busy(pool, alias)
    shared, other = Gate("shared"), Gate("other")
    readers = [asyncio.create_task(pool.run(alias, ("page", 1), shared)) for _ in range(50)]
    another = asyncio.create_task(pool.run(alias, ("page", 2), other))
    await asyncio.sleep(0)
    assert not shared.begun.is_set()
    _open(*gates, shared, other)
    assert await asyncio.gather(*readers) == ["shared"] * 50
    assert await another == "other"
    assert (shared.times, other.times) == (1, 1)
    await asyncio.gather(*busy)


async def test_a_query_that_has_begun_is_not_shared(committed_db: CommittedDatabase) -> None:
    pool, alias = ReaderPool(), committed_db.alias
    first, second = Gate("before the write"), Gate("after the write")
    early = asyncio.create_task(pool.run(alias, ("page", 1), first))
    await _until(first.begun.is_set)
    late = asyncio.create_task(pool.run(alias, ("page", 1), second))
    _open(second)
    assert await late == "after the write"
    _open(first)
    assert await early == "before the write"


async def test_at_most_four_queries_run_at_once(committed_db: CommittedDatabase) -> None:
    pool, alias = ReaderPool(), committed_db.alias
    gates, busy = await _busy(pool, alias)
    fifth = Gate()
    waiting = asyncio.create_task(pool.run(alias, ("fifth",), fifth))
    await asyncio.sleep(0.05)
    assert not fifth.begun.is_set()
    _open(*gates, fifth)
    await asyncio.gather(waiting, *busy)


async def test_a_reader_that_leaves_does_not_take_the_answer_from_others(
    committed_db: CommittedDatabase,
) -> None:
    pool, alias = ReaderPool(), committed_db.alias
    gates, busy = await _busy(pool, alias)
    shared = Gate("shared")
    leaving, staying = (asyncio.create_task(pool.run(alias, ("page",), shared)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    _open(*gates, shared)
    assert await staying == "shared"
    await asyncio.gather(*busy)


async def test_an_error_reaches_every_reader_and_the_thread_goes_on(committed_db: CommittedDatabase) -> None:
    pool, alias = ReaderPool(), committed_db.alias
    gates, busy = await _busy(pool, alias)
    broken = Gate(LookupError("broken"))
    readers = [asyncio.create_task(pool.run(alias, ("page",), broken)) for _ in range(3)]
    await asyncio.sleep(0)
    _open(*gates, broken)
    outcomes = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [LookupError] * 3
    await asyncio.gather(*busy)
    assert await pool.run(alias, ("page",), lambda: "next") == "next"


async def test_a_query_runs_in_the_context_of_its_task(committed_db: CommittedDatabase) -> None:
    _caller.set("a task")
    assert await ReaderPool().run(committed_db.alias, ("page",), _caller.get) == "a task"


async def test_connections_are_kept_while_readers_come_and_closed_after_the_last(
    committed_db: CommittedDatabase,
) -> None:
    pool, db = ReaderPool(linger_seconds=0.2), Database(committed_db.alias, committed_db.tenant)
    wrappers: set[BaseDatabaseWrapper] = set()
    threads: set[threading.Thread] = set()
    barrier = threading.Barrier(4)

    def query() -> object:
        wrappers.add(db.connection)
        threads.add(threading.current_thread())
        barrier.wait(_PATIENCE_SECONDS)
        db.read(_ONE, {})
        return db.connection.connection

    async def drivers() -> set[int]:
        return {
            id(driver)
            for driver in await asyncio.gather(*(pool.run(db.alias, (n,), query) for n in range(4)))
        }

    first = await drivers()
    assert len(first) == 4
    assert await drivers() == first
    await _until(lambda: all(wrapper.connection is None for wrapper in wrappers))
    await _until(lambda: not any(thread.is_alive() for thread in threads))
    assert len(wrappers) == 4
    # Later readers get new threads.
    assert await pool.run(db.alias, ("page",), lambda: db.read(_ONE, {})) == [(1,)]


async def test_a_busy_pool_keeps_its_threads(committed_db: CommittedDatabase) -> None:
    pool, alias = ReaderPool(linger_seconds=0.05), committed_db.alias
    slow = Gate("slow")
    reading = asyncio.create_task(pool.run(alias, ("slow",), slow))
    await _until(slow.begun.is_set)
    idle = await pool.run(alias, ("page",), threading.current_thread)
    await asyncio.sleep(0.3)
    assert await pool.run(alias, ("page",), threading.current_thread) is idle
    _open(slow)
    assert await reading == "slow"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform cannot fork")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    parent = module._pool.get()
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, b"new" if module._pool.get() is not parent else b"old")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 3) == b"new"
    assert isinstance(module._pool, processes.PerProcess)


# A small pool of connections


@contextmanager
def _pooled(database: CommittedDatabase, max_size: int) -> Iterator[str]:
    """An alias of the same database with Django's connection pool."""
    settings: dict[str, Any] = {**database.connection.settings_dict}
    pool = {"min_size": 0, "max_size": max_size, "timeout": 5}
    connections.settings["pooled"] = {
        **settings,
        "CONN_MAX_AGE": 0,
        "OPTIONS": {**settings["OPTIONS"], "pool": pool},
    }
    try:
        yield "pooled"
    finally:
        wait_for_background_threads("pooled")
        connections["pooled"].close()
        connections["pooled"].close_pool()  # type: ignore[attr-defined]
        del connections["pooled"]
        del connections.settings["pooled"]


@pytest.mark.thorough
@pytest.mark.parametrize("max_size", [1, 2])
def test_readers_work_beside_the_poller_and_the_notifier_in_a_small_pool(
    postgres_db: CommittedDatabase, max_size: int
) -> None:
    plain = DatabaseStreamManager(postgres_db.alias, tenant=postgres_db.tenant)

    async def follow(streams: DatabaseStreamManager) -> list[int]:
        reader = await streams.create_resumable_reader("stream")
        assert reader is not None
        return [stored.sequence async for stored in reader]

    async def write_and_follow(alias: str) -> None:
        streams = DatabaseStreamManager(alias, tenant=postgres_db.tenant, poll_interval=0.02)
        await plain.create_writer("stream", "run", "agent")
        following = [asyncio.create_task(follow(streams)) for _ in range(8)]
        for _ in range(20):
            # Through the pool and from a thread that gives its connection back: its notifier runs too.
            await asyncio.to_thread(streams.write_sync, "stream", [{"type": "t"}])
            await asyncio.sleep(0.03)
        # Opened while the poller and the notifier run.
        following.append(asyncio.create_task(follow(streams)))
        await asyncio.to_thread(streams.write_sync, "stream", [{"type": "t"}])
        await plain.end_stream("stream")
        assert await asyncio.gather(*following) == [list(range(1, 22))] * 9

    async def in_time(alias: str) -> None:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await write_and_follow(alias)

    with _pooled(postgres_db, max_size) as alias:
        async_to_sync(in_time)(alias)
