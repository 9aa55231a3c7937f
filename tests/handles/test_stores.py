"""`Store` and `InMemoryStore`: everything for one database and tenant."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from helix_store import (
    ConflictError,
    InMemoryStateStore,
    InMemoryStore,
    MemoryWorld,
    NotSupportedOnBackend,
    OutsideTransaction,
    SessionHandle,
    Store,
)
from helix_store.testing.usage.base import custom
from tests.databases import ALIASES, close_connections, fresh_tenant

HELLO = {"role": "user", "content": "hello"}

AnyStore = Store | InMemoryStore


class Interruption(Exception):
    """An error of the caller's own."""


@pytest.fixture(params=["memory", *ALIASES])
def store(
    request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[AnyStore]:
    if request.param == "memory":
        yield InMemoryStore(tenant="tenant")
        return
    with django_db_blocker.unblock():
        try:
            yield Store(ALIASES[request.param], tenant=fresh_tenant())
        finally:
            close_connections()


def write_everything(store: AnyStore) -> None:
    session = store.new_session("session", agent_type="agent")
    session.say(HELLO)
    assert store.locks.acquire("name") is not None
    store.usage.record_entry(custom("session"))
    async_to_sync(store.streams.create_writer)("stream", "run", "agent")


def contents(store: AnyStore) -> dict[str, Any]:
    return {
        "sessions": store.list_sessions().total,
        "locks": [lock.name for lock in store.locks.get_active_locks()],
        "usage": store.usage.get_entries("session"),
        "stream": async_to_sync(store.streams.get_info)("stream"),
    }


def test_a_store_opens_handles_that_use_its_managers(store: AnyStore) -> None:
    session = store.new_session("session", agent_type="agent", title="Mine")
    assert [head.title for head in store.list_sessions()] == ["Mine"]
    with store.session("session").turn() as turn:
        assert [lock.name for lock in store.locks.get_active_locks()] == ["session"]
        turn.tokens(model="model", prompt=3)
        with turn.step() as step:
            step.finish()
    rollup = store.usage.get_rollup("session")
    assert rollup is not None
    assert session.usage() == rollup
    assert rollup.tokens.prompt == 3


def test_the_parts_of_a_store_are_those_of_its_database_and_tenant(store: AnyStore) -> None:
    for part in (store, store.sessions, store.locks, store.usage, store.streams):
        assert part.tenant == store.tenant
    assert store.locks is store.locks


async def test_a_store_opens_handles_in_asynchronous_code(store: AnyStore) -> None:
    session = await store.anew_session("session", agent_type="agent")
    await session.asay(HELLO)
    assert (await store.alist_sessions()).total == 1


def test_a_transaction_commits_the_writes_of_all_parts(store: AnyStore) -> None:
    with store.transaction():
        write_everything(store)
    found = contents(store)
    assert (found["sessions"], found["locks"], len(found["usage"])) == (1, ["name"], 1)
    assert found["stream"] is not None


def test_an_exception_rolls_back_the_writes_of_all_parts(store: AnyStore) -> None:
    before = contents(store)
    with pytest.raises(Interruption), store.transaction():
        write_everything(store)
        raise Interruption
    assert contents(store) == before


def test_a_rolled_back_transaction_leaves_what_was_there(store: AnyStore) -> None:
    write_everything(store)
    before = contents(store), store.session("session").messages()
    with pytest.raises(Interruption), store.transaction():
        store.streams.write_sync("stream", [{"type": "text_delta", "delta": "more"}])
        store.session("session").say(HELLO)
        store.usage.delete("session")
        store.sessions.delete_session("session")
        raise Interruption
    assert (contents(store), store.session("session").messages()) == before


def test_nobody_sees_a_transaction_before_it_is_committed(store: AnyStore) -> None:
    seen: list[bool] = []

    def look() -> None:
        try:
            seen.append(store.sessions.session_exists("session"))
        finally:
            connections.close_all()

    with store.transaction():
        store.new_session("session", agent_type="agent")
        if isinstance(store, Store):
            reader = threading.Thread(target=look)
            reader.start()
            reader.join()
    look()
    assert seen in ([False, True], [True])


def test_a_step_of_a_handle_is_part_of_the_transaction(store: AnyStore) -> None:
    session = store.new_session("session", agent_type="agent")
    with pytest.raises(Interruption), store.transaction():
        with session.step() as step:
            step.stage("call", merge_changes={"n": 1})
            step.say(HELLO)
        raise Interruption
    assert (session.messages(), session.load().custom_state) == ([], {})


async def test_an_asynchronous_transaction_is_one_transaction(store: AnyStore) -> None:
    with pytest.raises(Interruption):
        async with store.transaction():
            await store.anew_session("lost", agent_type="agent")
            raise Interruption
    async with store.transaction():
        await store.anew_session("kept", agent_type="agent")
    assert [head.session_id for head in await store.alist_sessions()] == ["kept"]


async def test_calls_in_several_threads_are_no_transaction(store: AnyStore) -> None:
    with override_settings(HELIX_STORE={"ASYNC_THREADS": 2}), pytest.raises(OutsideTransaction):
        async with store.transaction():
            pytest.fail("entered")


def test_a_transaction_is_used_once(store: AnyStore) -> None:
    block = store.transaction()
    with block:
        pass
    with pytest.raises(ConflictError, match="used once"), block:
        pytest.fail("entered again")


@pytest.mark.django_db
def test_a_transaction_joins_that_of_the_caller() -> None:
    store = Store(tenant=fresh_tenant())
    with pytest.raises(Interruption), transaction.atomic():
        with store.transaction():
            store.new_session("session", agent_type="agent")
        assert store.sessions.session_exists("session")
        raise Interruption
    assert not store.sessions.session_exists("session")


def test_stores_are_equal_by_database_and_tenant() -> None:
    assert Store() == Store("default")
    assert hash(Store()) == hash(Store("default"))
    others = [alias for alias in connections if alias != "default"]
    assert len({Store(), Store(tenant="other"), *map(Store, others)}) == 2 + len(others)
    world = MemoryWorld()
    assert InMemoryStore(world=world) == InMemoryStore(world=world)
    assert InMemoryStore(world=world) != InMemoryStore(world=world, tenant="other")
    assert InMemoryStore() != InMemoryStore()
    assert Store() != InMemoryStore()
    assert Store() != "default"


def test_a_store_sends_no_query_and_opens_no_connection() -> None:
    # Without the marker of pytest-django, any use of a database is an error.
    store = Store()
    assert isinstance(store.session("session"), SessionHandle)
    assert repr(store) == "<Store 'default' tenant=''>"


def test_a_handle_of_a_state_store_has_the_world_of_that_store() -> None:
    sessions = InMemoryStateStore()
    session = sessions.new_session("session", agent_type="agent")
    assert session.store is sessions
    with session.turn():
        assert InMemoryStore(world=sessions.world).locks.is_locked("session")


@pytest.mark.django_db
def test_items_are_those_of_the_database_and_tenant() -> None:
    items = Store(tenant="tenant").items("session", "lane")
    items.append(["first"])
    assert (items.tenant, items.lane) == ("tenant", "lane")
    assert Store(tenant="tenant").sessions.session_exists("session")
    with pytest.raises(NotSupportedOnBackend):
        InMemoryStore().items("session")
