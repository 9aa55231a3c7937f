"""Transactions that the tasks of an event loop keep open.

The tasks of an event loop share Django's thread, and so its connection. If one of them keeps a transaction
open between two calls, the calls of the others would join the transaction, and a rollback would take back
writes that these calls have acknowledged. Such a transaction is recorded in the context of its task, from
which the tasks that it creates inherit it. Asynchronous calls from other contexts are made on another
connection, or wait for the end of the transaction (see `find_obstacle`). A synchronous call from another
context occupies the thread in which the transaction must end, so it is refused.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar
from weakref import ref

from asgiref.current_thread_executor import CurrentThreadExecutor
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.core.ids import after_fork
from helix_store.engine.threads import (
    Passed,
    executor_of,
    ident_of_thread,
    note_block,
    opened_connections,
    outermost_block,
    passed_blocks,
)
from helix_store.exceptions import OutsideTransaction, StoreBusy

R = TypeVar("R")

_LONGEST_WAIT_SECONDS: Final = 30.0
"""The time for which a call waits for the transaction of another task, which may itself wait for the call."""

_PASSING_THREADS: Final = 8
"""Each may use a connection. They are none of the event loop's own, because all of them may wait for rows of
the transaction that they pass, while the task of the transaction needs the loop's own threads, for example to
look up a host.
"""
_DEFAULT_SIZE_OF_POOL: Final = 4

_OF_ANOTHER_TASK: Final = (
    "Another task has an `async with` block of transaction() open in this thread, and a rollback would take "
    "this synchronous call back; await the async form of the call, or make it after the block."
)
_STAYS_OPEN: Final = (
    "Another task has had an `async with` block of transaction() open for a long time. If the block waits "
    "for this call, make the call in a task that is created inside the block; otherwise try again."
)
_INNER_IS_OPEN: Final = (
    "A task that was created inside this block of transaction() still has a block open; both were rolled "
    "back. Wait for the task before you leave the block."
)
_ENDED_WITH_OUTER: Final = (
    "The block of transaction() around this one has ended, and both were rolled back; leave the inner block "
    "first."
)
_NEEDS_THE_THREAD: Final = (
    "A synchronous function waits for this call in the thread in which another task has an `async with` "
    "block of transaction() open, so the block cannot end; await the call in a task, or make it after the "
    "block."
)
_TASK_HAS_ENDED: Final = (
    "A task has begun an `async with` block of transaction() and has ended without leaving it, for example "
    "in an asynchronous generator that another task continues; enter, use and leave the block in one task."
)
_ENDS_ELSEWHERE: Final = (
    "The thread in which an `async with` block of transaction() has begun is not that in which it ends; the "
    "block was rolled back. The thread of a request ends with the request: wait for the task before."
)
_STOPS_THE_LOOP: Final = (
    "A synchronous call in an event loop waits for an `async with` block of transaction(), which only this "
    "event loop can end; await the async form of the call."
)


class TaskBlock:
    """A transaction that an ``async with`` block keeps open. Calls may join it if their context names it."""

    def __init__(self, roll_back: Callable[[OutsideTransaction], object]) -> None:
        self.roll_back = roll_back
        """Roll the transaction back, because one around it ends first."""
        self.was_rolled_back_early = self.is_left = False
        self.is_in_memory = False
        self._loop = asyncio.get_running_loop()
        self._executor = executor_of(self._loop)
        task = asyncio.current_task()
        # Contexts keep the block longer than its task.
        self._task = None if task is None else ref(task)
        self._thread: threading.Thread | None = None
        self._connection: BaseDatabaseWrapper | None = None
        self._ended: Future[None] = Future()

    def begin(self, connection: BaseDatabaseWrapper | None) -> None:
        """Begin in this thread, on a connection or in memory."""
        self._thread, self._connection = threading.current_thread(), connection
        self.is_in_memory = connection is None
        # Otherwise a waiting task that is cancelled would cancel it.
        self._ended.set_running_or_notify_cancel()

    def note(self) -> None:
        """Record the transaction in the context of the task, whose calls in other threads cannot join it."""
        if self._connection is not None:
            note_block(self._connection)

    def is_in_its_thread(self) -> bool:
        """Return whether this is the thread in which the block has begun."""
        # Not by its ident, which another thread gets after its end.
        return self._thread is threading.current_thread()

    def check_thread(self) -> None:
        """Raise `OutsideTransaction` in another thread than that in which the block has begun."""
        if not self.is_in_its_thread():
            raise OutsideTransaction(_ENDS_ELSEWHERE)

    def end(self) -> None:
        """Wake the tasks that wait for the end."""
        self._connection = None
        self._ended.set_result(None)

    async def wait_for_end(self, began: float) -> None:
        """Wait until the block has ended, in any event loop, for a call that began at this time. Raises
        `StoreBusy`, and `OutsideTransaction` if the thread of the block itself waits for the call.
        """
        executor = executor_of(asyncio.get_running_loop())
        if isinstance(executor, CurrentThreadExecutor) and executor is not self._executor:
            raise OutsideTransaction(_NEEDS_THE_THREAD)
        timeout = began + _LONGEST_WAIT_SECONDS - time.monotonic()
        ended, _ = await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=max(timeout, 0))
        if not ended:
            raise StoreBusy(_STAYS_OPEN)

    def is_of_another_task(self) -> bool:
        """Return whether a call in this thread would join the block of another task."""
        return self.is_in_its_thread() and self not in _own_blocks()

    def check_task(self) -> None:
        """Raise `OutsideTransaction` for a call of another task in the thread of the block."""
        if self.is_of_another_task():
            raise OutsideTransaction(_OF_ANOTHER_TASK)

    def check_end_of_task(self) -> None:
        """Raise `OutsideTransaction` if the task that has begun the block has ended without leaving it.

        A call may then be one of the block, in a task that does not know of it.
        """
        task = None if self._task is None else self._task()
        if self._task is not None and (task is None or task.done()):
            raise OutsideTransaction(_TASK_HAS_ENDED)

    def check_wait(self) -> None:
        """Raise `OutsideTransaction` for a call that would wait for the block in its event loop, or would be
        one of its task in another thread, or if the thread of the block has ended.
        """
        if self._thread is None or not self._thread.is_alive():
            raise OutsideTransaction(_ENDS_ELSEWHERE)
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                raise OutsideTransaction(_STOPS_THE_LOOP)
        if self in _own_blocks():
            raise OutsideTransaction

    def end_inner(self, opened: Sequence[TaskBlock]) -> None:
        """Roll back blocks that were opened later. ``opened`` are all that are open, outermost first.

        Raises `OutsideTransaction` if there are any, which must roll back this block as well.
        """
        inner = opened[opened.index(self) + 1 :] if self in opened else ()
        for each in reversed(inner):
            each.was_rolled_back_early = True
            each.roll_back(OutsideTransaction(_ENDED_WITH_OUTER))
        if inner:
            raise OutsideTransaction(_INNER_IS_OPEN)

    def check_end(self) -> None:
        """Raise `OutsideTransaction` if the block was rolled back early."""
        if self.was_rolled_back_early:
            raise OutsideTransaction(_ENDED_WITH_OUTER)


_blocks_of_task: Final[ContextVar[tuple[TaskBlock, ...]]] = ContextVar("helix_store_task_blocks", default=())

task_blocks: Final[dict[Any, TaskBlock]] = {}
"""The open blocks of tasks, in the order in which they began. The key of a block in a database is its
``atomic()``, that of a block in memory is the block itself.
"""
after_fork(task_blocks.clear)


def _own_blocks() -> tuple[TaskBlock, ...]:
    """Return the blocks that this task may use, outermost first.

    Its context also keeps blocks that another task has left: those in which the task was created, and that of
    an asynchronous generator that another task has closed.
    """
    return tuple(each for each in _blocks_of_task.get() if not each.is_left)


def join_block(block: TaskBlock) -> None:
    """Record a block in the context of this task."""
    _blocks_of_task.set((*_own_blocks(), block))


def leave_block(block: TaskBlock) -> None:
    """Make a block one that no task may use. This may be another task than that of `join_block`."""
    block.is_left = True
    _blocks_of_task.set(_own_blocks())


def require_open_block() -> None:
    """Raise `OutsideTransaction` if the innermost block of this task was rolled back early."""
    for block in _own_blocks()[-1:]:
        block.check_end()


def require_task_of_block(connection: BaseDatabaseWrapper) -> None:
    """Raise `OutsideTransaction` if the innermost block on a connection is that of another task."""
    blocks = _task_blocks_on(connection)
    if blocks:
        blocks[-1].check_task()


def _task_blocks_on(connection: Any) -> list[TaskBlock]:
    return [task_blocks[each] for each in connection.atomic_blocks if each in task_blocks]


class Obstacle(NamedTuple):
    """A block of another task, because of which a call cannot be made in this thread now."""

    block: TaskBlock
    passing_threads: int
    """The number of threads in which calls may pass it, on other connections, outside of all transactions of
    this thread. 0 if the call must wait.
    """


def find_obstacle() -> Obstacle | None:
    """Return the innermost block that another task has open in this thread. Raises `OutsideTransaction`.

    A call cannot pass it on another connection if it is part of a transaction of this thread: that of its own
    task, or one around the block, as in Django's `TestCase`. The same applies with autocommit off, where code
    of this thread commits what the call writes. SQLite has one writer at a time: the call would wait there,
    make a transaction fail that has read, or see nothing, if the database is in memory.
    """
    others = [each for each in list(task_blocks.values()) if each.is_of_another_task()]
    if not others:
        return None
    for each in others:
        each.check_end_of_task()
    is_passable = (
        not _own_blocks()
        and not any(each.is_in_memory for each in others)
        and all(each["AUTOCOMMIT"] for each in connections.settings.values())
        and all(map(_may_be_passed, connections.all(initialized_only=True)))
    )
    return Obstacle(others[-1], _passing_threads() if is_passable else 0)


def _passing_threads() -> int:
    """Return the number of threads that leave two connections in each pool: for the block, and for others."""
    pools = [each["OPTIONS"].get("pool") for each in connections.settings.values()]
    sizes = [_size_of_pool({} if pool is True else pool) for pool in pools if pool]
    return max(min(_PASSING_THREADS, *(size - 2 for size in sizes)), 0) if sizes else _PASSING_THREADS


def _size_of_pool(options: Mapping[str, Any]) -> int:
    """Return the largest size of a pool with these options of psycopg."""
    return int(options.get("max_size") or options.get("min_size", _DEFAULT_SIZE_OF_POOL))


def _may_be_passed(connection: Any) -> bool:
    if not connection.in_atomic_block:
        is_committed = connection.connection is None or connection.autocommit
        return is_committed and (connection.vendor != "sqlite" or not connection.is_in_memory_db())
    return connection.vendor == "postgresql" and connection.commit_on_exit and _is_of_task(connection)


def _is_of_task(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a task has begun the transaction of a connection."""
    return outermost_block(connection) in task_blocks


def passing(call: Callable[[], R]) -> R:
    """Make a call in another thread than that of a block of another task, outside of the block."""
    token = passed_blocks.set(Passed(_is_of_task, _LONGEST_WAIT_SECONDS))
    try:
        return call()
    finally:
        passed_blocks.reset(token)


def note_transactions_of(threads: Collection[int]) -> None:
    """Record the open transactions of threads that wait for this context; ``threads`` are thread idents.

    A transaction of another task is none that waits for it.
    """
    for connection in opened_connections():
        if not connection.in_atomic_block or ident_of_thread(connection) not in threads:
            continue
        if not _is_of_task(connection) or task_blocks.get(outermost_block(connection)) in _own_blocks():
            note_block(connection)


@contextmanager
def opened_by_task(block: TaskBlock, connection: Any) -> Iterator[None]:
    """Open an ``atomic()`` block of a task on a connection of this thread."""
    with (
        _AtomicOfTask(block, connection) as key,
        _open_until_end(block, key, lambda: _task_blocks_on(connection)),
    ):
        try:
            yield
        finally:
            if not block.is_in_its_thread():
                _roll_back_elsewhere(connection)


class _AtomicOfTask:
    """An ``atomic()`` block that ends in another thread only after `_roll_back_elsewhere`: Django would end a
    block of that thread.
    """

    def __init__(self, block: TaskBlock, connection: Any) -> None:
        self._block, self._connection = block, connection
        self._atomic = transaction.atomic(using=connection.alias)

    def __enter__(self) -> object:
        self._atomic.__enter__()
        self._block.begin(self._connection)
        self._key = self._connection.atomic_blocks[-1]
        return self._key

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._block.is_in_its_thread():
            self._atomic.__exit__(kind, error, trace)
        elif outermost_block(self._connection) is self._key:
            # Its thread may go on. It opens another connection.
            connection = self._connection
            connection.atomic_blocks.clear()
            connection.savepoint_ids.clear()
            connection.run_on_commit.clear()
            connection.connection = None
            connection.in_atomic_block = connection.needs_rollback = connection.closed_in_transaction = False


def _roll_back_elsewhere(connection: Any) -> None:
    """Close a connection of another thread, so that the server rolls back. Calls that its thread still makes
    in the transaction fail.
    """
    connection.inc_thread_sharing()
    try:
        connection.close()
    finally:
        connection.dec_thread_sharing()


@contextmanager
def opened_in_memory(block: TaskBlock, opened: list[TaskBlock]) -> Iterator[None]:
    """Make the innermost transaction of a `MemoryWorld`, whose open blocks are ``opened``, one of a task."""
    block.begin(None)
    opened.append(block)
    try:
        with _open_until_end(block, block, lambda: opened):
            yield
    finally:
        opened.remove(block)


@contextmanager
def _open_until_end(
    block: TaskBlock, key: object, opened: Callable[[], Sequence[TaskBlock]]
) -> Iterator[None]:
    """Call `TaskBlock.end_inner` at the end. An error of the block itself is raised as it is."""
    task_blocks[key] = block
    try:
        try:
            yield
        except BaseException:
            with suppress(OutsideTransaction):
                block.end_inner(opened())
            raise
        block.end_inner(opened())
    finally:
        task_blocks.pop(key, None)
        block.end()
