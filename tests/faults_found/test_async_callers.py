"""Async calls from places that block: they work, or raise at once. Before, most of them never returned."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import transaction

from helix_store.engine.async_twins import in_callers_thread
from helix_store.exceptions import OutsideTransaction
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.faults_found.async_callers import (
    BRIDGES,
    PLACES,
    append_from,
    append_from_loops,
    append_from_new_thread,
    append_in_block,
    append_in_cell,
    collections_while_frames_are_made,
    run_agent_in_sync_view,
    run_graph_in_sync_view,
    save_conversation_in_sync_view,
)
from tests.processes import run_in_processes

_SECONDS: Final = 60.0


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run in a process of its own; raise ``TimeoutError`` if it hangs."""
    (outcome,) = run_in_processes(function, [arguments], timeout=_SECONDS)
    return outcome.unwrap()


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("s", agent_type="t")
    return store


@pytest.mark.thorough
@for_each("place", PLACES)
def test_an_async_call_works_from(
    committed_db: CommittedDatabase, store: DatabaseStateStore, place: str
) -> None:
    counts = alone(append_from, place, committed_db.alias, committed_db.tenant)
    assert counts == {name: 3 * number for number, name in enumerate(BRIDGES, start=1)}
    assert len(store.get_messages("s").messages) == 3 * len(BRIDGES)


def test_event_loops_of_several_threads_do_not_take_each_other_for_callers(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    assert alone(append_from_loops, 4, committed_db.alias, committed_db.tenant) == list(range(1, 41))


@pytest.mark.thorough
def test_an_async_call_works_in_a_thread_that_its_pool_has_not_noted_yet(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    assert alone(append_from_new_thread, committed_db.alias, committed_db.tenant) == 1


@pytest.mark.thorough
def test_an_agent_runs_in_a_sync_view(sqlite_db: CommittedDatabase) -> None:
    assert alone(run_agent_in_sync_view, sqlite_db.alias, sqlite_db.tenant) == "Paris."


@pytest.mark.thorough
def test_a_graph_runs_in_a_sync_view(committed_db: CommittedDatabase) -> None:
    offer = alone(run_graph_in_sync_view, committed_db.alias, committed_db.tenant)
    assert offer == "The train costs 90 euros."


@pytest.mark.thorough
def test_a_conversation_is_saved_in_a_sync_view(committed_db: CommittedDatabase) -> None:
    assert alone(save_conversation_in_sync_view, committed_db.alias, committed_db.tenant) == 1


def test_the_cell_of_a_notebook_cannot_block_and_is_told_at_once(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    arguments = committed_db.alias, committed_db.tenant
    for bridge in ("asyncio.run", "async_to_sync"):
        with pytest.raises(RuntimeError, match="event loop"):
            alone(append_in_cell, bridge, *arguments)
    assert alone(append_in_cell, "asyncio.run in a thread", *arguments) == 1


@pytest.mark.thorough
@for_each("place", ["sync view", "main thread", "Django's thread", "Celery task"])
def test_an_async_call_in_another_thread_than_its_callers_transaction_is_refused(
    committed_db: CommittedDatabase, store: DatabaseStateStore, place: str
) -> None:
    with pytest.raises(OutsideTransaction):
        alone(append_in_block, place, "asyncio.run", committed_db.alias, committed_db.tenant)
    assert len(store.get_messages("s").messages) == 0


@pytest.mark.thorough
@for_each("place", ["sync view", "main thread", "thread of a sync view"])
def test_async_to_sync_joins_the_transaction_of_its_caller(
    committed_db: CommittedDatabase, store: DatabaseStateStore, place: str
) -> None:
    assert alone(append_in_block, place, "async_to_sync", committed_db.alias, committed_db.tenant) == 1
    assert len(store.get_messages("s").messages) == 0


def test_a_thread_of_an_async_run_does_not_write_beside_the_transaction(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    """An async call of the run has joined the transaction, so the context of the run knows it."""

    async def run() -> None:
        await store.aload_state("s")
        await asyncio.to_thread(store.append_messages, "s", [{"role": "user"}])

    with pytest.raises(OutsideTransaction), transaction.atomic(using=committed_db.alias):
        async_to_sync(run)()
    assert len(store.get_messages("s").messages) == 0


def test_a_thread_of_an_async_run_may_hand_a_call_to_its_caller(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    def append() -> threading.Thread:
        store.append_messages("s", [{"role": "user"}])
        return threading.current_thread()

    async def run() -> threading.Thread:
        await store.aload_state("s")
        return await asyncio.to_thread(in_callers_thread, append)

    with transaction.atomic(using=committed_db.alias):
        assert async_to_sync(run)() is threading.current_thread()
        transaction.set_rollback(True, using=committed_db.alias)
    assert len(store.get_messages("s").messages) == 0
    # Without such a caller, the call is made where it is.
    assert asyncio.run(run()) is not threading.current_thread()


def test_a_caller_that_takes_a_lock_for_a_moment_is_not_taken_for_one_that_waits(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    """Of 300 runs of a graph under load, one lost the usage of a call in this way."""
    began = threading.Event()

    def wait_for_a_moment() -> None:
        began.set()
        threading.Event().wait(0.02)

    async def run() -> None:
        await store.aload_state("s")
        busy = asyncio.ensure_future(sync_to_async(wait_for_a_moment)())
        await asyncio.to_thread(began.wait)
        await asyncio.to_thread(in_callers_thread, lambda: store.append_messages("s", [{"role": "user"}]))
        await busy

    with transaction.atomic(using=committed_db.alias):
        async_to_sync(run)()
        assert len(store.get_messages("s").messages) == 1
        transaction.set_rollback(True, using=committed_db.alias)


def test_no_garbage_is_collected_while_cpython_holds_its_list_of_threads(store: DatabaseStateStore) -> None:
    """A callback of the collection let a thread run that ended, and waited for the list, holding the GIL."""
    assert alone(collections_while_frames_are_made, store.alias, store.tenant) == 0
