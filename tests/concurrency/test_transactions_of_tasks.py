"""``async with store.transaction()``: tasks share a thread, but not the transaction of another task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import suppress
from contextvars import Context
from typing import Any, Final

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.db import connections

from helix_store import InMemoryStore, OutsideTransaction, Store
from helix_store.engine.threads import task_blocks
from tests.cells import Cells
from tests.databases import ALIASES, CommittedDatabase

AnyStore = Store | InMemoryStore

PATIENCE: Final = 60


class Interruption(Exception):
    """An error of the caller's own."""


@pytest.fixture(params=["memory", *ALIASES])
def store(request: pytest.FixtureRequest) -> Iterator[AnyStore]:
    made: AnyStore = InMemoryStore()
    if request.param != "memory":
        database: CommittedDatabase = request.getfixturevalue(f"{request.param}_db")
        made = Store(database.alias, tenant=database.tenant)
    made.new_session("session", agent_type="agent")
    yield made
    assert not task_blocks


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def say(store: AnyStore, text: str) -> int:
    return await store.session("session").asay(said(text))


def texts(store: AnyStore) -> list[str]:
    return [message["content"] for message in store.session("session").messages()]


class Block:
    """A block of another task, which is open from `is_open` until `ending` is set."""

    def __init__(self, store: AnyStore, *, fails: bool = False) -> None:
        self._store, self._fails = store, fails
        self.is_open, self.ending = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        async with self._store.transaction():
            await say(self._store, "A")
            self.is_open.set()
            await self.ending.wait()
            if self._fails:
                raise Interruption


def sync_call(store: AnyStore) -> None:
    store.session("session").say(said("B"))


def sync_block(store: AnyStore) -> None:
    with store.transaction():
        pass


async def block(store: AnyStore) -> None:
    async with store.transaction():
        pass


async def step(store: AnyStore) -> None:
    async with store.session("session").step() as step:
        step.say(said("B"))


async def turn(store: AnyStore) -> None:
    async with store.session("session").turn():
        pass


CALLS: Final[dict[str, Callable[[AnyStore], Awaitable[Any]]]] = {
    "a write": lambda store: say(store, "B"),
    "a read": lambda store: store.session("session").aload(),
    "a list": lambda store: store.alist_sessions(),
    "a step": step,
    "a turn": turn,
    "a lock": lambda store: store.locks.aacquire("session"),
    "usage": lambda store: store.usage.aget_rollup("session"),
    "a stream": lambda store: store.streams.create_writer("stream", "run", "agent"),
    "another block": block,
    "a synchronous call": lambda store: sync_to_async(sync_call)(store),
    "a synchronous block": lambda store: sync_to_async(sync_block)(store),
}


@pytest.mark.parametrize("fails", [True, False])
async def test_a_call_of_another_task_is_refused_before_any_statement(store: AnyStore, fails: bool) -> None:
    other = Block(store, fails=fails)
    task = asyncio.create_task(other.run())
    await asyncio.wait_for(other.is_open.wait(), PATIENCE)
    sent: list[str] = []
    with Cells() as cells:
        for name, call in CALLS.items():
            with cells.check(name):
                async with asyncio.timeout(PATIENCE):
                    sent = await refused(store, call)
                assert sent == []
    other.ending.set()
    with suppress(Interruption):
        await task
    assert await sync_to_async(texts)(store) == ([] if fails else ["A"])
    assert await say(store, "B") == (1 if fails else 2)


async def refused(store: AnyStore, call: Callable[[AnyStore], Awaitable[Any]]) -> list[str]:
    """Make a call that is refused, and return the statements that it has sent."""
    if not isinstance(store, Store):
        with pytest.raises(OutsideTransaction, match="Another task"):
            await call(store)
        return []
    connection = await sync_to_async(lambda: connections[store.alias])()
    connection.force_debug_cursor = True
    before = len(connection.queries_log)
    try:
        with pytest.raises(OutsideTransaction, match="Another task"):
            await call(store)
    finally:
        connection.force_debug_cursor = False
    return [query["sql"] for query in list(connection.queries_log)[before:]]


async def test_tasks_that_are_created_in_the_block_are_part_of_it(store: AnyStore) -> None:
    async def work() -> None:
        async with store.transaction():
            await asyncio.gather(say(store, "gathered"), say(store, "too"))
            await asyncio.wait_for(say(store, "waited for"), PATIENCE)
            async with asyncio.TaskGroup() as group:
                group.create_task(say(store, "grouped"))
            await sync_to_async(sync_call)(store)
            assert len((await store.sessions.aget_messages("session")).messages) == 5
            raise Interruption

    with pytest.raises(Interruption):
        await work()
    assert await sync_to_async(texts)(store) == []


async def test_a_block_in_a_block_is_a_savepoint_of_its_task(store: AnyStore) -> None:
    async def inner(text: str, *, fails: bool) -> None:
        with suppress(Interruption):
            async with store.transaction():
                await say(store, text)
                if fails:
                    raise Interruption

    async with store.transaction():
        await inner("lost", fails=True)
        await inner("kept", fails=False)
        await asyncio.wait_for(inner("lost too", fails=True), PATIENCE)
        await asyncio.wait_for(inner("kept too", fails=False), PATIENCE)
    assert await sync_to_async(texts)(store) == ["kept", "kept too"]


async def test_a_savepoint_of_a_sibling_takes_no_calls(store: AnyStore) -> None:
    async with store.transaction():
        sibling = Block(store, fails=True)
        task = asyncio.create_task(sibling.run())
        await asyncio.wait_for(sibling.is_open.wait(), PATIENCE)
        with pytest.raises(OutsideTransaction, match="Another task"):
            await say(store, "of the parent")
        sibling.ending.set()
        with pytest.raises(Interruption):
            await task
        await say(store, "afterwards")
    assert await sync_to_async(texts)(store) == ["afterwards"]


@pytest.mark.parametrize("fails", [True, False])
async def test_a_block_that_ends_before_one_inside_of_it_is_rolled_back_with_it(
    store: AnyStore, fails: bool
) -> None:
    inner, tasks = Block(store), []

    async def outer() -> None:
        async with store.transaction():
            await say(store, "outer")
            tasks.append(asyncio.create_task(inner.run()))
            await asyncio.wait_for(inner.is_open.wait(), PATIENCE)
            if fails:
                raise Interruption

    with pytest.raises(Interruption if fails else OutsideTransaction):
        await outer()
    assert await sync_to_async(texts)(store) == []
    assert await say(store, "outside") == 1
    inner.ending.set()
    with pytest.raises(OutsideTransaction):
        await tasks[0]
    assert await sync_to_async(texts)(store) == ["outside"]


async def test_calls_in_a_block_that_was_rolled_back_with_the_outer_one_are_refused(store: AnyStore) -> None:
    may_go_on, is_open, tasks = asyncio.Event(), asyncio.Event(), []

    async def inner() -> None:
        async with store.transaction():
            is_open.set()
            await may_go_on.wait()
            with pytest.raises(OutsideTransaction):
                await say(store, "too late")
            raise Interruption

    async def outer() -> None:
        async with store.transaction():
            tasks.append(asyncio.create_task(inner()))
            await asyncio.wait_for(is_open.wait(), PATIENCE)

    with pytest.raises(OutsideTransaction):
        await outer()
    may_go_on.set()
    with pytest.raises(Interruption):
        await tasks[0]
    assert await sync_to_async(texts)(store) == []


async def test_a_task_that_was_created_in_a_block_that_was_rolled_back_is_free_after_its_end(
    store: AnyStore,
) -> None:
    may_go_on, inner_is_open, ending = asyncio.Event(), asyncio.Event(), asyncio.Event()
    tasks, children = [], []

    async def late() -> int:
        await may_go_on.wait()
        return await say(store, "late")

    async def inner() -> None:
        async with store.transaction():
            children.append(asyncio.create_task(late()))
            inner_is_open.set()
            await ending.wait()

    async def outer() -> None:
        async with store.transaction():
            tasks.append(asyncio.create_task(inner()))
            await asyncio.wait_for(inner_is_open.wait(), PATIENCE)

    with pytest.raises(OutsideTransaction):
        await outer()
    ending.set()
    with pytest.raises(OutsideTransaction):
        await tasks[0]
    may_go_on.set()
    assert await children[0] == 1


async def test_a_task_is_free_after_another_one_has_closed_its_generator(store: AnyStore) -> None:
    async def opened() -> AsyncGenerator[None, None]:
        async with store.transaction():
            yield

    generator = opened()
    with pytest.raises(OutsideTransaction):
        async with store.transaction():
            await anext(generator)
    with pytest.raises(OutsideTransaction):
        await say(store, "too early")
    await asyncio.create_task(generator.aclose(), context=Context())
    assert await say(store, "next") == 1


async def test_a_task_that_outlives_its_block_is_outside_of_the_next_one(store: AnyStore) -> None:
    may_go_on = asyncio.Event()

    async def late() -> int:
        await may_go_on.wait()
        return await say(store, "late")

    async with store.transaction():
        first, second = asyncio.create_task(late()), asyncio.create_task(late())
    async with store.transaction():
        may_go_on.set()
        with pytest.raises(OutsideTransaction, match="Another task"):
            await first
    assert isinstance((await asyncio.gather(second, return_exceptions=True))[0], int | OutsideTransaction)
    assert await say(store, "next") >= 1


async def test_a_cancelled_block_is_rolled_back_and_refuses_nobody_afterwards(store: AnyStore) -> None:
    other = Block(store)
    task = asyncio.create_task(other.run())
    await asyncio.wait_for(other.is_open.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await say(store, "B") == 1


async def test_an_error_on_entry_refuses_nobody_afterwards(store: AnyStore) -> None:
    used = store.transaction()
    async with used:
        pass
    with pytest.raises(Exception, match="used once"):
        async with used:
            pytest.fail("entered again")
    assert await say(store, "B") == 1


async def test_a_synchronous_call_in_the_loop_of_a_block_in_memory_does_not_stop_the_loop() -> None:
    store = InMemoryStore()
    store.new_session("session", agent_type="agent")
    async with store.transaction():
        await say(store, "A")
        with pytest.raises(OutsideTransaction, match="await the async form"):
            sync_call(store)
    sync_call(store)
    assert texts(store) == ["A", "B"]


async def test_a_block_in_a_synchronous_function_meets_no_other_task(store: AnyStore) -> None:
    def work(text: str) -> None:
        with store.transaction():
            store.session("session").say(said(text))
            if text == "lost":
                raise Interruption

    results = await asyncio.gather(
        *(sync_to_async(work)(text) for text in ("kept", "lost")), say(store, "B"), return_exceptions=True
    )
    assert [type(each) for each in results] == [type(None), Interruption, int]
    assert sorted(await sync_to_async(texts)(store)) == ["B", "kept"]


async def test_another_world_is_not_affected() -> None:
    store, other = InMemoryStore(), InMemoryStore()
    for each in (store, other):
        each.new_session("session", agent_type="agent")
    open_block = Block(store)
    task = asyncio.create_task(open_block.run())
    await asyncio.wait_for(open_block.is_open.wait(), PATIENCE)
    assert await say(other, "B") == 1
    open_block.ending.set()
    await task


async def test_tasks_with_a_thread_each_are_not_affected(committed_db: CommittedDatabase) -> None:
    """As requests under ASGI are."""
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    await store.anew_session("session", agent_type="agent")
    other = Block(store)

    async def request(work: Callable[[], Awaitable[Any]]) -> Any:
        async with ThreadSensitiveContext():
            try:
                return await work()
            finally:
                await sync_to_async(connections.close_all)()

    task = asyncio.create_task(request(other.run))
    await asyncio.wait_for(other.is_open.wait(), PATIENCE)
    assert (await request(store.session("session").aload)).message_count == 0
    other.ending.set()
    await task
    assert (await request(store.session("session").aload)).message_count == 1


def test_tasks_of_synchronous_code_are_tasks_too(store: AnyStore) -> None:
    async def work() -> None:
        other = Block(store, fails=True)
        task = asyncio.create_task(other.run())
        await asyncio.wait_for(other.is_open.wait(), PATIENCE)
        with pytest.raises(OutsideTransaction, match="Another task"):
            await say(store, "B")
        other.ending.set()
        with pytest.raises(Interruption):
            await task
        await say(store, "B")

    async_to_sync(work)()
    assert texts(store) == ["B"]


async def test_a_loop_in_djangos_thread_has_no_transaction(store: AnyStore) -> None:
    async def work() -> None:
        with pytest.raises(OutsideTransaction):
            async with store.transaction():
                pytest.fail("entered")

    await sync_to_async(lambda: asyncio.run(work()))()
