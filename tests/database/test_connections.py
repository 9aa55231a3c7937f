"""Threads that Django does not manage keep no connection; those that it does are left alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.signals import request_finished, request_started
from django.db import connections, transaction
from django.test.utils import override_settings

from helix_store.core.types import SessionState, StepInfo
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.cells import for_each
from tests.databases import CommittedDatabase


def in_a_thread(body: Callable[[], Any]) -> Any:
    """Run in a thread that nobody looks after, and return what it returned."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(body())
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]


CALLS: dict[str, Callable[[DatabaseStateStore], Any]] = {
    "load_state": lambda store: store.load_state("s"),
    "list_sessions": lambda store: store.list_sessions(),
    "append_messages": lambda store: store.append_messages("s", [{"role": "user"}]),
    "save_state_and_promote_staging": lambda store: store.save_state_and_promote_staging(
        "s", SessionState(session_id="s", agent_type="t"), [], StepInfo("step-1", 1)
    ),
    "a refused call": lambda store: store.compare_and_set_status("s", ["failed"], "paused"),
}


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("s", agent_type="t")
    return store


@for_each("name", CALLS)
@for_each("fast", [True, False], ids=["fast", "portable"])
def test_an_unmanaged_thread_keeps_no_connection(
    committed_db: CommittedDatabase, store: DatabaseStateStore, name: str, fast: bool
) -> None:
    def call() -> bool:
        CALLS[name](store)
        return connections[committed_db.alias].connection is None

    with override_settings(HELIX_STORE={"FAST_PATHS": fast}):
        assert in_a_thread(call)


def test_a_lock_keeps_none_either(committed_db: CommittedDatabase) -> None:
    def call() -> bool:
        lock = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant).acquire("name")
        return lock is not None and connections[committed_db.alias].connection is None

    assert in_a_thread(call)


def test_the_callers_transaction_keeps_its_connection(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    def call() -> int:
        with transaction.atomic(using=committed_db.alias):
            store.append_messages("s", [{"role": "user"}])
            return store.append_messages("s", [{"role": "user"}])

    assert in_a_thread(call) == 2


def test_a_thread_that_serves_a_request_keeps_its_connection_until_the_end(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    def call() -> bool:
        request_started.send(sender=None)
        try:
            store.load_state("s")
            return connections[committed_db.alias].connection is not None
        finally:
            request_finished.send(sender=None)

    assert in_a_thread(call)


def test_the_main_thread_keeps_its_connection(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.load_state("s")
    assert connections[committed_db.alias].connection is not None


def test_an_async_twin_keeps_the_connection_of_djangos_thread(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    is_open = sync_to_async(lambda: connections[committed_db.alias].connection is not None)

    async def load_and_look() -> bool:
        await store.aload_state("s")
        return await is_open()

    assert asyncio.run(load_and_look())
