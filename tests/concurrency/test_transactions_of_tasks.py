"""``async with store.transaction()``: tasks share a thread, but not the transaction of another task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import Any, Final, TypeVar

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.db import connections, transaction

from helix_store import InMemoryStore, OutsideTransaction, Store, StoreBusy
from helix_store.core.types import RunStatus
from helix_store.engine.tasks import task_blocks
from tests.cells import Cells
from tests.databases import ALIASES, CommittedDatabase

AnyStore = Store | InMemoryStore
R = TypeVar("R")

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
    made.new_session("other", agent_type="agent")
    yield made
    assert not task_blocks


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def say(store: AnyStore, text: str, session: str = "session") -> int:
    return await store.session(session).asay(said(text))


def texts(store: AnyStore, session: str = "session") -> list[str]:
    return [message["content"] for message in store.session(session).messages()]


def passes(store: AnyStore) -> bool:
    """Return whether a call of another task is made on another connection."""
    return isinstance(store, Store) and connections[store.alias].vendor == "postgresql"


class Block:
    """A block of another task, which is open from `is_open` until `ending` is set."""

    def __init__(self, store: AnyStore, *, fails: bool = False, session: str = "session") -> None:
        self._store, self._fails, self._session = store, fails, session
        self.is_open, self.ending = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        async with self._store.transaction():
            await say(self._store, "A", self._session)
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
        await say(store, "B")


async def step(store: AnyStore) -> None:
    async with store.session("session").step() as step:
        step.say(said("B"))


async def turn(store: AnyStore) -> None:
    async with store.session("session").turn():
        pass


CALLS: Final[dict[str, Callable[[AnyStore], Coroutine[Any, Any, Any]]]] = {
    "a write": lambda store: say(store, "B"),
    "a read": lambda store: store.session("session").aload(),
    "a list": lambda store: store.alist_sessions(),
    "a step": step,
    "a turn": turn,
    "a lock": lambda store: store.locks.aacquire("lock"),
    "usage": lambda store: store.usage.aget_rollup("session"),
    "a stream": lambda store: store.streams.create_writer("stream", "run", "agent"),
}


async def made_beside(
    store: AnyStore, call: Coroutine[Any, Any, R], *, fails: bool = True, session: str = "other"
) -> R:
    """Make a call while another task has a block open, which ends after the call, or while the call waits."""
    other = Block(store, fails=fails, session=session)
    task = asyncio.create_task(other.run())
    await asyncio.wait_for(other.is_open.wait(), PATIENCE)
    calling = asyncio.create_task(call)
    if passes(store) and session == "other":
        await asyncio.wait_for(asyncio.wait([calling]), PATIENCE)
    else:
        # After 0.3 seconds, a call that waits for its own caller would be refused.
        assert not (await asyncio.wait([calling], timeout=0.05 if session == "other" else 0.5))[0]
    other.ending.set()
    with suppress(Interruption):
        await task
    return await asyncio.wait_for(calling, PATIENCE)


@pytest.mark.parametrize("fails", [True, False])
async def test_a_call_of_another_task_is_not_part_of_the_block(store: AnyStore, fails: bool) -> None:
    with Cells() as cells:
        for name, call in CALLS.items():
            with cells.check(name):
                await made_beside(store, call(store), fails=fails)
    assert await sync_to_async(texts)(store) == ["B", "B"]
    assert await sync_to_async(texts)(store, "other") == ([] if fails else ["A"] * len(CALLS))


async def test_a_call_that_needs_what_the_block_has_changed_waits_for_its_end(store: AnyStore) -> None:
    assert await made_beside(store, say(store, "B"), fails=False, session="session") == 2
    assert await sync_to_async(texts)(store) == ["A", "B"]


async def test_blocks_of_two_tasks_are_one_after_the_other(store: AnyStore) -> None:
    other = Block(store, fails=True)
    task = asyncio.create_task(other.run())
    await asyncio.wait_for(other.is_open.wait(), PATIENCE)
    entering = asyncio.create_task(block(store))
    assert not (await asyncio.wait([entering], timeout=0.2))[0]
    other.ending.set()
    with pytest.raises(Interruption):
        await task
    await asyncio.wait_for(entering, PATIENCE)
    assert await sync_to_async(texts)(store) == ["B"]


async def test_the_result_of_an_effect_is_stored_beside_a_block(store: AnyStore) -> None:
    async with store.session("session").turn() as turn:
        async with turn.effect("pay", tool_name="pay", input={}) as effect:
            await made_beside(store, effect.adone({"receipt": 1}))
        async with turn.effect("ask", tool_name="ask", input={}) as effect:
            await made_beside(store, effect.anot_done("refused"))
    page = await store.sessions.alist_effects("session")
    assert [(each.state, each.result) for each in page.items] == [
        ("done", {"receipt": 1}),
        ("not_done", None),
    ]


async def test_a_turn_an_effect_and_a_lock_are_left_beside_a_block(store: AnyStore) -> None:
    turn = store.session("session").turn()
    await turn.__aenter__()
    effect = turn.effect("pay", tool_name="pay", input={})
    await effect.__aenter__()
    failed = Interruption("after it was sent")
    await made_beside(store, effect.__aexit__(Interruption, failed, None))
    await made_beside(store, turn.__aexit__(None, None, None))
    lock = await store.locks.aacquire("session")
    assert lock is not None
    await made_beside(store, lock.arelease())
    assert not await store.locks.ais_locked("session")
    (run,) = await store.sessions.alist_runs("session")
    (pay,) = (await store.sessions.alist_effects("session")).items
    assert (run.status, pay.state) == (RunStatus.COMPLETED, "unknown")


async def test_a_call_for_which_the_block_waits_is_made_outside_or_ends_with_an_error(
    store: AnyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helix_store.engine.tasks._LONGEST_WAIT_SECONDS", 0.5)
    may_begin = asyncio.Event()

    async def earlier(session: str) -> int:
        await may_begin.wait()
        return await say(store, "earlier", session)

    one, two = asyncio.create_task(earlier("session")), asyncio.create_task(earlier("other"))
    async with store.transaction():
        await say(store, "A", "other")
        may_begin.set()
        if passes(store):
            assert await asyncio.wait_for(one, PATIENCE) == 1
        else:
            with pytest.raises(StoreBusy):
                await asyncio.wait_for(one, PATIENCE)
        with pytest.raises(StoreBusy):
            await asyncio.wait_for(two, PATIENCE)
    assert await sync_to_async(texts)(store, "other") == ["A"]


SYNCHRONOUS_CALLS: Final[dict[str, Callable[[AnyStore], Awaitable[Any]]]] = {
    "a call": lambda store: sync_to_async(sync_call)(store),
    "a block": lambda store: sync_to_async(sync_block)(store),
}


async def test_a_synchronous_call_of_another_task_is_refused_before_any_statement(store: AnyStore) -> None:
    other = Block(store, fails=True)
    task = asyncio.create_task(other.run())
    await asyncio.wait_for(other.is_open.wait(), PATIENCE)
    with Cells() as cells:
        for name, call in SYNCHRONOUS_CALLS.items():
            with cells.check(name):
                async with asyncio.timeout(PATIENCE):
                    assert await refused(store, call) == []
    other.ending.set()
    with pytest.raises(Interruption):
        await task
    assert await sync_to_async(texts)(store) == []


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
    async def work() -> None:
        async with store.transaction():
            sibling = Block(store, fails=True)
            task = asyncio.create_task(sibling.run())
            await asyncio.wait_for(sibling.is_open.wait(), PATIENCE)
            calling = asyncio.create_task(say(store, "of the parent"))
            assert not (await asyncio.wait([calling], timeout=0.2))[0]
            sibling.ending.set()
            with suppress(Interruption):
                await task
            assert await asyncio.wait_for(calling, PATIENCE) == 1
            raise Interruption

    with pytest.raises(Interruption):
        await work()
    assert await sync_to_async(texts)(store) == []


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
        task = asyncio.create_task(late())

    async def continued() -> int:
        may_go_on.set()
        return await task

    assert await made_beside(store, continued()) == 1


async def test_a_task_whose_block_is_rolled_back_while_it_leaves_the_block_is_told_so(
    store: AnyStore,
) -> None:
    outer_may_end, inner_may_end, is_open = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def inner() -> None:
        async with store.transaction():
            is_open.set()
            await inner_may_end.wait()

    async def outer() -> None:
        async with store.transaction():
            tasks.append(asyncio.create_task(inner()))
            await outer_may_end.wait()

    tasks: list[asyncio.Task[None]] = []
    tasks.append(asyncio.create_task(outer()))
    await asyncio.wait_for(is_open.wait(), PATIENCE)
    outer_may_end.set()
    inner_may_end.set()
    for each in tasks:
        with pytest.raises(OutsideTransaction):
            await asyncio.wait_for(each, PATIENCE)


async def test_a_cancelled_block_is_rolled_back_and_stops_nobody_afterwards(store: AnyStore) -> None:
    other = Block(store)
    task = asyncio.create_task(other.run())
    await asyncio.wait_for(other.is_open.wait(), PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await say(store, "B") == 1


async def test_an_error_on_entry_stops_nobody_afterwards(store: AnyStore) -> None:
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


async def test_a_call_to_another_world_also_waits() -> None:
    """A thread is asked before a call what is open in it, and not yet for which store the call is."""
    store, other = InMemoryStore(), InMemoryStore()
    for each in (store, other):
        for name in ("session", "other"):
            each.new_session(name, agent_type="agent")
    assert await made_beside(store, say(other, "B")) == 1


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
    assert async_to_sync(made_beside)(store, say(store, "B")) == 1
    assert texts(store) == ["B"]


def test_a_call_beside_a_block_is_part_of_the_transaction_around_both(
    committed_db: CommittedDatabase,
) -> None:
    """As in Django's `TestCase`."""
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    store.new_session("session", agent_type="agent")

    def work() -> None:
        with transaction.atomic(using=store.alias):
            async_to_sync(made_beside)(store, say(store, "B"), session="session")
            assert texts(store) == ["B"]
            raise Interruption

    with pytest.raises(Interruption):
        work()
    assert texts(store) == []


async def test_an_idle_connection_to_sqlite_lets_calls_pass_a_block_on_postgresql(
    postgres_db: CommittedDatabase, sqlite_db: CommittedDatabase
) -> None:
    for database in (sqlite_db, postgres_db):
        store = Store(database.alias, tenant=database.tenant)
        for name in ("session", "other"):
            await store.anew_session(name, agent_type="agent")
    assert passes(store)
    assert await made_beside(store, say(store, "B")) == 1


async def test_a_loop_in_djangos_thread_has_no_transaction(store: AnyStore) -> None:
    async def work() -> None:
        with pytest.raises(OutsideTransaction):
            async with store.transaction():
                pytest.fail("entered")

    await sync_to_async(lambda: asyncio.run(work()))()


@asynccontextmanager
async def another_loop_in_djangos_thread() -> AsyncIterator[None]:
    """Another event loop has a call in the thread, which has begun and ends with the block."""
    begun, may_end = threading.Event(), threading.Event()

    def used() -> None:
        begun.set()
        may_end.wait(PATIENCE)

    other = threading.Thread(target=lambda: asyncio.run(sync_to_async(used)()))
    Context().run(other.start)
    await asyncio.to_thread(begun.wait, PATIENCE)
    try:
        yield
    finally:
        may_end.set()
        await asyncio.to_thread(other.join, PATIENCE)


async def turns_of_the_loop() -> None:
    """Let the tasks of this loop go on until all of them wait for something else."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_cancelled_entry_ends_its_transaction_while_another_loop_uses_the_thread(
    store: AnyStore,
) -> None:
    busy, other_is_queued = threading.Event(), threading.Event()
    other_has_begun, other_may_end = threading.Event(), threading.Event()

    def used() -> None:
        other_has_begun.set()
        other_may_end.wait(PATIENCE)

    async def use_later() -> None:
        using = asyncio.create_task(sync_to_async(used)())
        await turns_of_the_loop()
        other_is_queued.set()
        await using

    before = asyncio.create_task(sync_to_async(busy.wait)(PATIENCE))
    await turns_of_the_loop()
    entering = asyncio.create_task(block(store))
    await turns_of_the_loop()
    other = threading.Thread(target=lambda: asyncio.run(use_later()))
    Context().run(other.start)
    await asyncio.to_thread(other_is_queued.wait, PATIENCE)
    entering.cancel()
    await turns_of_the_loop()
    busy.set()
    # This loop goes on only when the thread has made the entry and begun the call of the other loop.
    assert other_has_begun.wait(PATIENCE)
    await turns_of_the_loop()
    other_may_end.set()
    await before
    with pytest.raises(asyncio.CancelledError):
        await entering
    await asyncio.to_thread(other.join, PATIENCE)
    assert not task_blocks
    assert await say(store, "later") == 1
    assert await asyncio.to_thread(texts, store) == ["later"]


IN_OTHER_THREADS: Final[dict[str, Callable[[AnyStore], Awaitable[Any]]]] = {
    "asyncio.to_thread": lambda store: asyncio.to_thread(sync_call, store),
    "a block": lambda store: asyncio.to_thread(sync_block, store),
    "sync_to_async": lambda store: sync_to_async(sync_call, thread_sensitive=False)(store),
    "a task": lambda store: asyncio.create_task(asyncio.to_thread(sync_call, store)),
}


async def test_the_first_call_of_a_block_in_another_thread_is_refused(store: AnyStore) -> None:
    with Cells() as cells:
        for name, call in IN_OTHER_THREADS.items():
            with cells.check(name):
                async with store.transaction():
                    with pytest.raises(OutsideTransaction):
                        await asyncio.wait_for(call(store), PATIENCE)
                    assert task_blocks
    assert await sync_to_async(texts)(store) == []


async def test_a_call_of_a_block_is_refused_while_another_loop_uses_the_thread(store: AnyStore) -> None:
    async with store.transaction():
        async with another_loop_in_djangos_thread():
            with pytest.raises(OutsideTransaction):
                await asyncio.wait_for(say(store, "B"), PATIENCE)
        assert await say(store, "A") == 1
    assert await sync_to_async(texts)(store) == ["A"]


LEAVES: Final[dict[str, Callable[[AnyStore], Awaitable[Callable[[], Awaitable[Any]]]]]] = {}
"""Enter something, and return how to leave it."""


def entered_first(name: str) -> Callable[[Any], Any]:
    def register(enter: Any) -> Any:
        LEAVES[name] = enter
        return enter

    return register


@entered_first("a turn")
async def _enter_turn(store: AnyStore) -> Callable[[], Awaitable[Any]]:
    turn = await store.session("session").turn().__aenter__()
    return lambda: turn.__aexit__(None, None, None)


@entered_first("a step")
async def _enter_step(store: AnyStore) -> Callable[[], Awaitable[Any]]:
    step = await store.session("session").step().__aenter__()
    step.say(said("B"))
    return lambda: step.__aexit__(None, None, None)


@entered_first("a lock")
async def _enter_lock(store: AnyStore) -> Callable[[], Awaitable[Any]]:
    lock = await store.locks.await_acquire("session", timeout_ms=30_000)
    lock.keep_alive()
    return lambda: lock.__aexit__(None, None, None)


@entered_first("a lock that is released")
async def _release_lock(store: AnyStore) -> Callable[[], Awaitable[Any]]:
    lock = await store.locks.await_acquire("session", timeout_ms=30_000)
    lock.keep_alive()
    return lock.arelease


def keep_alives() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "helix_store keep-alive"]


async def test_what_is_left_beside_a_block_that_stays_open_ends(
    store: AnyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No keep-alive goes on after it. Nothing becomes part of the block."""
    monkeypatch.setattr("helix_store.engine.tasks._LONGEST_WAIT_SECONDS", 0.2)
    with Cells() as cells:
        for name, enter in LEAVES.items():
            with cells.check(name):
                leave = await enter(store)
                other = Block(store, fails=True, session="other")
                task = asyncio.create_task(other.run(), context=Context())
                await asyncio.wait_for(other.is_open.wait(), PATIENCE)
                try:
                    if passes(store):
                        await leave()
                    else:
                        with pytest.raises(StoreBusy):
                            await leave()
                    assert keep_alives() == []
                finally:
                    other.ending.set()
                    with suppress(Interruption):
                        await task
                    held = [each.name for each in await store.locks.aget_active_locks()]
                    assert held == ([] if passes(store) or name == "a step" else ["session"])
                    await store.locks.aforce_release("session")
    assert await sync_to_async(texts)(store) == (["B"] if passes(store) else [])


async def test_what_is_left_beside_a_block_of_another_world_is_left_whole(
    store: AnyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helix_store.engine.tasks._LONGEST_WAIT_SECONDS", 0.2)
    world = InMemoryStore()
    world.new_session("session", agent_type="agent")
    with Cells() as cells:
        for name, enter in LEAVES.items():
            with cells.check(name):
                leave = await enter(store)
                other = Block(world)
                task = asyncio.create_task(other.run(), context=Context())
                await asyncio.wait_for(other.is_open.wait(), PATIENCE)
                try:
                    await leave()
                    assert keep_alives() == []
                finally:
                    other.ending.set()
                    await task
                    assert await store.locks.aget_active_locks() == []
    assert await sync_to_async(texts)(store) == ["B"]


async def test_a_lock_and_a_step_in_a_block_that_was_rolled_back_end(store: AnyStore) -> None:
    may_go_on, is_open, children = asyncio.Event(), asyncio.Event(), []

    async def inner() -> None:
        lock = await store.locks.await_acquire("other", timeout_ms=30_000)
        lock.keep_alive()
        async with store.transaction(), lock, store.session("session").step() as step:
            step.say(said("lost"))
            is_open.set()
            await may_go_on.wait()

    async def outer() -> None:
        async with store.transaction():
            children.append(asyncio.create_task(inner()))
            await asyncio.wait_for(is_open.wait(), PATIENCE)

    with pytest.raises(OutsideTransaction):
        await outer()
    may_go_on.set()
    with pytest.raises(OutsideTransaction):
        await children[0]
    assert keep_alives() == []
    assert await sync_to_async(texts)(store) == []


AFTER_THE_REQUEST: Final = ("leaves", "calls", "fails")


async def test_a_block_that_outlives_its_request_is_rolled_back_with_an_error(store: AnyStore) -> None:
    async def work(then: str) -> None:
        async with store.transaction():
            await say(store, "A")
            is_open.set()
            await may_go_on.wait()
            if then == "calls":
                await say(store, "B")
            if then == "fails":
                raise Interruption

    with Cells() as cells:
        for then in AFTER_THE_REQUEST:
            with cells.check(then):
                is_open, may_go_on = asyncio.Event(), asyncio.Event()
                async with ThreadSensitiveContext():
                    task = asyncio.create_task(work(then))
                    await asyncio.wait_for(is_open.wait(), PATIENCE)
                may_go_on.set()
                with pytest.raises(Interruption if then == "fails" else OutsideTransaction):
                    await asyncio.wait_for(task, PATIENCE)
                assert not task_blocks
                assert await asyncio.wait_for(asyncio.to_thread(texts, store), PATIENCE) == []
    assert await asyncio.wait_for(say(store, "later"), PATIENCE) == 1


async def test_a_block_that_is_left_in_another_thread_is_rolled_back_with_an_error(store: AnyStore) -> None:
    """The thread in which it has begun goes on."""
    left = store.transaction()
    await left.__aenter__()
    await say(store, "A")
    async with ThreadSensitiveContext():
        with pytest.raises(OutsideTransaction):
            await asyncio.wait_for(left.__aexit__(None, None, None), PATIENCE)
        await sync_to_async(connections.close_all)()
    assert not task_blocks
    assert await sync_to_async(texts)(store) == []
    assert await say(store, "later") == 1
    assert await asyncio.to_thread(texts, store) == ["later"]


async def test_calls_in_a_generator_that_another_task_continues_are_refused(store: AnyStore) -> None:
    """As ``asyncio.wait_for`` does on Python 3.11, and fixtures of tests do."""

    async def answer() -> AsyncGenerator[str, None]:
        async with store.transaction():
            yield "begun"
            await say(store, "inside of the block")
            yield "never"

    generator = answer()

    async def next_item() -> str:
        return await anext(generator)

    assert await asyncio.create_task(next_item()) == "begun"
    with pytest.raises(OutsideTransaction):
        await asyncio.wait_for(asyncio.create_task(next_item()), PATIENCE)
    assert await sync_to_async(texts)(store) == []
    assert await say(store, "later") == 1


async def first_message(store: AnyStore) -> Any:
    return await anext(store.sessions.aiter_messages("session"))


WAITING_CALLS: Final[dict[str, Callable[[AnyStore], Coroutine[Any, Any, Any]]]] = {
    **{name: call for name, call in CALLS.items() if name != "a stream"},  # in memory, it needs no thread
    "a block": block,
    "a list, item by item": first_message,
}


async def test_a_call_that_is_cancelled_while_it_waits_ends_at_once_and_is_not_made(store: AnyStore) -> None:
    world = InMemoryStore()
    world.new_session("session", agent_type="agent")
    other = Block(world)
    task = asyncio.create_task(other.run(), context=Context())
    await asyncio.wait_for(other.is_open.wait(), PATIENCE)
    with Cells() as cells:
        for name, call in WAITING_CALLS.items():
            with cells.check(name):
                calling = asyncio.create_task(call(store))
                assert not (await asyncio.wait([calling], timeout=0.05))[0]
                calling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(calling, PATIENCE)
                assert not task.done()
    other.ending.set()
    await task
    assert not await store.locks.ais_locked("session")
    assert await sync_to_async(texts)(store) == []


async def write(store: AnyStore) -> int:
    return await say(store, "B")


FROM_DJANGOS_THREAD: Final[dict[str, Callable[[AnyStore], Coroutine[Any, Any, Any]]]] = {
    "a call": write,
    "a block": block,
}


async def test_asynchronous_code_of_a_synchronous_function_does_not_wait_for_its_own_thread(
    store: AnyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helix_store.engine.tasks._LONGEST_WAIT_SECONDS", 1.0)
    other = Block(store, fails=True, session="other")
    task = asyncio.create_task(other.run(), context=Context())
    await asyncio.wait_for(other.is_open.wait(), PATIENCE)
    with Cells() as cells:
        for name, call in FROM_DJANGOS_THREAD.items():
            with cells.check(name):
                made = sync_to_async(async_to_sync(call))
                if passes(store) and name == "a call":
                    assert await made(store) == 1
                else:
                    with pytest.raises(OutsideTransaction):
                        await made(store)
    other.ending.set()
    with pytest.raises(Interruption):
        await task
    assert await sync_to_async(texts)(store) == (["B"] if passes(store) else [])


@asynccontextmanager
async def another_alias(database: CommittedDatabase, **settings: Any) -> AsyncIterator[str]:
    """An alias of the same database with other settings, which no thread has used."""
    alias = f"beside {database.tenant}"
    connections.settings[alias] = {**database.connection.settings_dict, **settings}

    def forget() -> None:
        connection: Any = connections[alias]
        connection.close()
        connection.close_pool()
        del connections[alias]

    try:
        yield alias
    finally:
        await sync_to_async(forget)()
        del connections.settings[alias]


@pytest.mark.parametrize("is_connected", [True, False])
async def test_no_call_passes_a_block_if_code_of_the_thread_commits_for_it(
    postgres_db: CommittedDatabase, is_connected: bool
) -> None:
    """With autocommit off on the alias of the call."""
    store = Store(postgres_db.alias, tenant=postgres_db.tenant)
    session = await store.anew_session("session", agent_type="agent")
    await store.anew_session("other", agent_type="agent")
    async with another_alias(postgres_db, AUTOCOMMIT=False) as alias:

        def commit() -> None:
            connections[alias].commit()

        off = Store(alias, tenant=postgres_db.tenant)
        if is_connected:
            await off.session("session").aload()
            await sync_to_async(commit)()
        calling = made_beside_without_passing(store, say(off, "B"))
        assert await asyncio.wait_for(calling, PATIENCE) == 1
        await sync_to_async(commit)()
    assert (await session.aload()).message_count == 1


async def made_beside_without_passing(store: AnyStore, call: Coroutine[Any, Any, R]) -> R:
    other = Block(store, session="other")
    task = asyncio.create_task(other.run(), context=Context())
    await asyncio.wait_for(other.is_open.wait(), PATIENCE)
    calling = asyncio.create_task(call)
    await asyncio.wait([calling], timeout=0.2)
    other.ending.set()
    await task
    return await calling


@pytest.mark.parametrize("size", [2, 4])
async def test_calls_that_pass_a_block_leave_places_in_the_pool(
    postgres_db: CommittedDatabase, size: int
) -> None:
    first = Store(postgres_db.alias, tenant=postgres_db.tenant)
    await first.anew_session("session", agent_type="agent")
    await first.anew_session("other", agent_type="agent")
    settings = postgres_db.connection.settings_dict
    options = {**settings["OPTIONS"], "pool": {"min_size": 0, "max_size": size, "timeout": 0.5}}
    async with another_alias(postgres_db, OPTIONS=options, CONN_MAX_AGE=0) as alias:
        store = Store(alias, tenant=postgres_db.tenant)
        other = Block(store)
        task = asyncio.create_task(other.run(), context=Context())
        await asyncio.wait_for(other.is_open.wait(), PATIENCE)
        calls = [asyncio.create_task(say(store, "B")) for _ in range(10)]
        # Longer than the pool lets a call wait.
        await asyncio.wait(calls, timeout=1.5)
        other.ending.set()
        await task
        made = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE)
        assert sorted(map(str, made)) == sorted(map(str, range(2, 12)))
