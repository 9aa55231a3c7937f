"""A pool of two connections: one is kept only as long as a call or a block needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Barrier
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction

from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.processes import run_in_processes, run_in_threads


@pytest.fixture
def alone(postgres_db: CommittedDatabase) -> Callable[..., Any]:
    """Run a function in a process of its own, with a pool of two."""

    def run(function: Callable[..., Any]) -> Any:
        (outcome,) = run_in_processes(with_a_pool, [(function, postgres_db.alias, postgres_db.tenant)])
        return outcome.unwrap()

    return run


def with_a_pool(function: Callable[..., Any], alias: str, tenant: str) -> Any:
    # Only here: the threads of the tests' own process have connections that come from no pool.
    settings = connections[alias].settings_dict
    settings["OPTIONS"] = {**settings["OPTIONS"], "pool": {"min_size": 0, "max_size": 2, "timeout": 5}}
    settings["CONN_MAX_AGE"] = 0
    return function(alias, tenant)


def fill_the_pool_from_threads(alias: str, tenant: str) -> list[int]:
    """Use the main thread and Django's thread, then both connections in two other threads at once."""
    store = DatabaseStateStore(alias, tenant=tenant)
    for session_id in "ab":
        store.create_session(session_id, agent_type="t")
    store.load_state("a")
    store.list_sessions()
    DatabaseLockManager(alias, tenant=tenant).acquire("a")
    asyncio.run(store.aload_state("a"))
    both_are_in_use = Barrier(2, timeout=30)

    def append(session_id: str) -> int:
        with transaction.atomic(using=alias):
            count = store.append_messages(session_id, [{"role": "user"}])
            both_are_in_use.wait()
            return count

    return [outcome.unwrap() for outcome in run_in_threads(append, [("a",), ("b",)])]


def test_neither_the_main_thread_nor_djangos_thread_keeps_a_connection(alone: Callable[..., Any]) -> None:
    assert alone(fill_the_pool_from_threads) == [1, 1]


def use_connections_of_other_code(alias: str, tenant: str) -> list[bool]:
    """In the main thread and in Django's, whether calls leave a connection that other code has opened."""
    store = DatabaseStateStore(alias, tenant=tenant)

    def opened() -> Any:
        connections[alias].ensure_connection()
        return connections[alias].connection

    before = opened()
    store.load_state("a")
    is_kept = connections[alias].connection is before

    async def in_djangos_thread() -> bool:
        before = await sync_to_async(opened)()
        await store.aload_state("a")
        return await sync_to_async(lambda: connections[alias].connection is before)()

    return [is_kept, asyncio.run(in_djangos_thread())]


def test_a_connection_that_other_code_has_opened_is_left_to_it(alone: Callable[..., Any]) -> None:
    assert alone(use_connections_of_other_code) == [True, True]
