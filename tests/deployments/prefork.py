"""A process that uses stores, then forks workers that use them too, as ``gunicorn --preload`` does."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.conf import settings
from django.db import connections, transaction
from django.test.utils import override_settings

from helix_store.engine.database import Database
from helix_store.engine.statement import Statement
from helix_store.exceptions import StoreUnavailable
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager
from tests.databases import close_connections

__all__ = [
    "CHILDREN",
    "PARENT",
    "STEPS",
    "fork_beside_a_statement",
    "fork_beside_another_alias",
    "fork_in_a_block",
    "fork_while_listening",
    "fork_with_a_database_in_memory",
    "step_side_by_side",
]

PARENT: Final = "parent"
CHILDREN: Final = tuple(f"child-{number}" for number in range(4))
STEPS: Final = 50 if os.environ.get("HELIX_FAULTS_TIER", "1") > "1" else 12
_PATIENCE_SECONDS: Final = 30
_DONE: Final = "done"
_ONE: Final = Statement("SELECT 1")


class Child:
    """A forked process that calls ``work``. It is killed when that takes too long."""

    def __init__(self, work: Callable[[Child], object]) -> None:
        told, self._tell = os.pipe()
        self._listen, told_to = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            signal.alarm(_PATIENCE_SECONDS)
            try:
                work(self)
                self.tell(_DONE)
            except BaseException:  # noqa: BLE001  the parent hears it
                self.tell(traceback.format_exc())
            finally:
                os._exit(0)
        for each in (self._tell, self._listen):
            os.close(each)
        self._tell, self._listen = told_to, told

    def tell(self, line: str) -> None:
        os.write(self._tell, f"{line}\0".encode())

    def hear(self) -> str:
        """What the other process tells next; empty at its end."""
        heard = b""
        while (data := os.read(self._listen, 1)) not in (b"", b"\0"):
            heard += data
        return heard.decode()

    def end(self) -> None:
        """Wait for its end. Raises `AssertionError` if it has failed."""
        heard = self.hear()
        _, status = os.waitpid(self._pid, 0)
        os.close(self._tell)
        os.close(self._listen)
        assert heard == _DONE, f"a child ended with status {status}: {heard}"


@contextmanager
def children(*works: Callable[[Child], object]) -> Iterator[list[Child]]:
    made = [Child(work) for work in works]
    yield made
    for child in made:
        child.end()


# --- Steps -----------------------------------------------------------------------------------------


def step_side_by_side(alias: str, tenant: str, options: dict[str, Any] | None) -> None:
    """Make steps in the parent and in its children: half of them, and half after the parent has reconnected.

    ``options`` are those of async calls; ``None`` is for calls that are not async.
    """
    store = DatabaseStateStore(alias, tenant=tenant)
    half, whole = range(1, STEPS // 2 + 1), range(STEPS // 2 + 1, STEPS + 1)

    def work(name: str, numbers: range) -> None:
        if options is None:
            _make_steps(store, name, numbers)
        else:
            asyncio.run(_make_steps_async(store, name, numbers))

    def work_in_child(name: str, child: Child) -> None:
        work(name, half)
        child.tell("half")
        child.hear()
        work(name, whole)

    with override_settings(HELIX_STORE={**settings.HELIX_STORE, **(options or {})}):
        for name in (PARENT, *CHILDREN):
            store.create_session(name, agent_type="t")
        work(PARENT, range(1, 2))
        works = [lambda child, name=name: work_in_child(name, child) for name in CHILDREN]
        with children(*works) as made:
            work(PARENT, half[1:])
            heard = [child.hear() for child in made]
            assert heard == ["half"] * len(made), heard
            # It was the last of the parent: SQLite deletes the log that no process of its knowledge uses.
            close_connections()
            work(PARENT, whole)
            for child in made:
                child.tell("go on")
    close_connections()


def _make_steps(store: DatabaseStateStore, name: str, numbers: range) -> None:
    for number in numbers:
        state = store.load_state(name)
        assert state is not None
        store.save_state_and_promote_staging(name, state, [_message(number)], _step(number))


async def _make_steps_async(store: DatabaseStateStore, name: str, numbers: range) -> None:
    for number in numbers:
        state = await store.aload_state(name)
        assert state is not None
        await store.asave_state_and_promote_staging(name, state, [_message(number)], _step(number))


def _message(number: int) -> dict[str, Any]:
    return {"role": "user", "content": str(number)}


def _step(number: int) -> dict[str, Any]:
    return {"step_id": f"step-{number}", "step_count": number}


# --- Other uses before the fork --------------------------------------------------------------------


def fork_while_listening(alias: str, tenant: str) -> None:
    """Parent and children each get a chunk of their own stream long before the next poll."""
    streams = DatabaseStreamManager(alias, tenant=tenant, poll_interval=2 * _PATIENCE_SECONDS)

    async def follow(name: str) -> None:
        writer = await streams.create_writer(name, "run", "agent")
        reader = await streams.create_resumable_reader(name)
        assert reader is not None
        reading = asyncio.ensure_future(anext(reader))
        # Nothing is written yet: the reader begins to wait.
        await asyncio.wait([reading], timeout=0.1)
        await writer.write({"type": "t"})
        assert (await reading).sequence == 1
        await reader.aclose()
        await writer.close()

    asyncio.run(follow(PARENT))
    with children(*(lambda child, name=name: asyncio.run(follow(name)) for name in CHILDREN)):
        asyncio.run(follow("parent again"))
    close_connections()


class _OutOfTheBlock(Exception):
    pass


def fork_in_a_block(alias: str, tenant: str) -> None:
    """A call of the child fails in the block; outside of it, one on PostgreSQL does not."""
    store = DatabaseStateStore(alias, tenant=tenant)
    store.create_session(PARENT, agent_type="t")
    parent = os.getpid()

    def call(child: Child) -> None:
        refused = (StoreUnavailable, transaction.TransactionManagementError)
        for read_or_write in (
            lambda: store.load_state(PARENT),
            lambda: store.append_messages(PARENT, [_message(0)]),
        ):
            try:
                read_or_write()
            except refused:
                continue
            raise AssertionError("a call used the connection of the parent")
        raise _OutOfTheBlock

    def leave_block() -> None:
        if connections[alias].vendor == "postgresql":
            store.create_session(CHILDREN[0], agent_type="t")

    try:
        with transaction.atomic(using=alias):
            store.append_messages(PARENT, [_message(1)])
            made = _ForkedInside(call)
            store.append_messages(PARENT, [_message(2)])
    except _OutOfTheBlock:
        assert os.getpid() != parent
        leave_block()
        os._exit(7)
    made.end(7)
    close_connections()


class _ForkedInside:
    """A child that leaves the block in which it was forked by an error."""

    def __init__(self, work: Callable[[Any], object]) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            signal.alarm(_PATIENCE_SECONDS)
            work(self)

    def end(self, code: int) -> None:
        assert os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]) == code


def fork_beside_a_statement(alias: str, tenant: str) -> None:
    """SQLite's lock of a connection whose statement runs in another thread is never released in the child."""
    store = DatabaseStateStore(alias, tenant=tenant)
    store.create_session(PARENT, agent_type="t")
    is_running, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        is_running.set()
        may_end.wait(_PATIENCE_SECONDS)

    def run() -> None:
        connections[alias].ensure_connection()
        connections[alias].connection.create_function("wait", 0, wait)
        Database(alias, "").read(Statement("SELECT wait()"), {})
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    assert is_running.wait(_PATIENCE_SECONDS)
    with children(lambda child: store.list_sessions()):
        pass
    may_end.set()
    thread.join()
    close_connections()


def fork_beside_another_alias(alias: str, other: str) -> None:
    """A connection that no store has used is the project's own."""
    for each in (alias, other):
        connections[each].ensure_connection()
    Database(alias, "").read(_ONE, {})
    own, others = connections[alias].connection, connections[other].connection

    def look(child: Child) -> None:
        assert connections[alias].connection is not own
        assert connections[other].connection is others

    with children(look):
        pass
    close_connections()


def fork_with_a_database_in_memory() -> None:
    """The child has a copy of it, which it would lose with the connection."""
    connections.settings["memory"] = {**connections.settings["default"], "NAME": ":memory:"}
    database = Database("memory", "")
    database.write(Statement("CREATE TABLE copied AS SELECT 7 AS number"), {})

    def look(child: Child) -> None:
        assert database.read(Statement("SELECT number FROM copied"), {}) == [(7,)]

    with children(look):
        pass
