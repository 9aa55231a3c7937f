"""The in-memory database: tables by tenant, and one lock instead of transactions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from types import TracebackType
from typing import Any, Final, TypeVar

from helix_store.engine.tasks import TaskBlock, opened_in_memory
from helix_store.engine.uncommitted import UncommittedWrite


class MemoryTable:
    """The data of one kind for one tenant. Hold the world's lock to change it."""

    def session_is_gone(self, session_id: str, *, keep_usage: bool) -> None:
        """Delete the data of a deleted session, as a foreign key would. The caller must hold the lock."""

    def saved(self) -> Callable[[], None]:
        """Return a function that restores the table's current contents. This version is for dataclasses.

        Both are called while the lock is held.
        """
        content = copy.deepcopy(self)

        def put_back() -> None:
            for each in fields(self):  # type: ignore[arg-type]  # other tables override this method
                setattr(self, each.name, getattr(content, each.name))

        return put_back


class MemoryTransaction(UncommittedWrite):
    """A transaction of a `MemoryWorld`, or a savepoint within one, and how it has ended."""

    def __init__(self, outer: MemoryTransaction | None) -> None:
        self._outer = outer
        self._is_kept: bool | None = None
        self.thread_id = threading.get_ident()
        self.after_commit: list[Callable[[], object]] = []
        """The functions to call, in this order, if the outermost transaction is kept."""

    def end(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        if is_kept and self._outer is not None:
            self._outer.after_commit += self.after_commit

    @property
    def is_committed(self) -> bool:
        return self._is_kept is True and (self._outer is None or self._outer.is_committed)

    @property
    def is_open(self) -> bool:
        if self._is_kept is True:
            return self._outer is not None and self._outer.is_open
        return self._is_kept is None


V = TypeVar("V")


class MemoryRows(dict[str, V], MemoryTable):
    """Values by name. They are replaced and never changed."""

    def saved(self) -> Callable[[], None]:
        rows = self.copy()

        def put_back() -> None:
            self.clear()
            self.update(rows)

        return put_back


T = TypeVar("T", bound=MemoryTable)


_LONGEST_TURN_SECONDS: Final = 1.0
"""A thread that waits for a block looks this often if the block's thread still lives."""


class WorldLock:
    """The lock of a `MemoryWorld`, which a thread may take again, but not for a task while it holds the lock
    for another one. Another thread may release it: a block may outlive its thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None
        self._depth = 0
        self._blocks: list[TaskBlock] = []

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take the lock. Raises `OutsideTransaction`."""
        # Not by its ident, which another thread gets after its end.
        thread = threading.current_thread()
        if self._owner is not thread:
            while not self._lock.acquire(blocking=False):
                if not blocking:
                    return False
                # Another thread may end one in the meantime.
                for block in tuple(self._blocks):
                    block.check_wait()
                if self._lock.acquire(timeout=_LONGEST_TURN_SECONDS):
                    break
            self._owner = thread
        self._depth += 1
        try:
            self.check_task()
        except BaseException:
            self.release()
            raise
        return True

    def check_task(self) -> None:
        """Raise `OutsideTransaction` if this thread holds the lock for another task."""
        # Another thread may end the block in the meantime.
        for block in self._blocks[-1:]:
            block.check_task()

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @contextmanager
    def owned_by(self, block: TaskBlock) -> Iterator[None]:
        """Hold the lock for a task, which must have taken it."""
        with opened_in_memory(block, self._blocks):
            yield


class MemoryWorld:
    """An in-memory database: stores and managers that share one see each other's data.

    Every write holds ``lock`` from start to end, so there is one transaction at a time.

    Example::

        world = MemoryWorld()
        InMemoryStore(world=world).new_session("order", agent_type="support")
        print(InMemoryStore(world=world).session("order").load().status)
    """

    def __init__(self) -> None:
        self.lock = WorldLock()
        self._transaction: MemoryTransaction | None = None
        self._tenants: dict[str, dict[type[MemoryTable], Any]] = {}

    def table(self, kind: type[T], tenant: str) -> T:
        """Return the table of this kind and tenant; the first call creates it."""
        with self.lock:
            table: T = self._tenants.setdefault(tenant, {}).setdefault(kind, kind())
            return table

    @contextmanager
    def transaction(self, task_block: TaskBlock | None = None) -> Iterator[None]:
        """Hold the lock for a ``with`` block.

        After an exception, all tables are restored to their previous contents. With a ``task_block``, other
        tasks cannot join the transaction.
        """
        # Without the lock, because a receiver of a signal may wait for another thread that writes.
        with self._locked_transaction(task_block) as opened:
            yield
        if opened.is_committed:
            for call in opened.after_commit:
                call()

    @contextmanager
    def _locked_transaction(self, task_block: TaskBlock | None) -> Iterator[MemoryTransaction]:
        with self.lock:
            saved = [table.saved() for tables in self._tenants.values() for table in tables.values()]
            outer = self._transaction
            opened = self._transaction = MemoryTransaction(outer)
            try:
                with nullcontext() if task_block is None else self.lock.owned_by(task_block):
                    yield opened
            except BaseException:
                for put_back in saved:
                    put_back()
                opened.end(is_kept=False)
                raise
            else:
                opened.end(is_kept=True)
            finally:
                self._transaction = outer

    def after_commit(self, call: Callable[[], object]) -> None:
        """Call a function after this thread's outermost open transaction is kept, or at once without one.

        The rollback of any transaction around this call discards the function.
        """
        opened = self.open_transaction
        if opened is None:
            call()
        else:
            opened.after_commit.append(call)

    @property
    def open_transaction(self) -> MemoryTransaction | None:
        """The innermost open transaction of this thread. Reading it does not wait for other threads."""
        opened = self._transaction
        return opened if opened is not None and opened.thread_id == threading.get_ident() else None

    def session_is_gone(self, tenant: str, session_id: str, *, keep_usage: bool) -> None:
        """Notify every table of a tenant that a session was deleted. The caller must hold the lock."""
        for table in list(self._tenants.get(tenant, {}).values()):
            table.session_is_gone(session_id, keep_usage=keep_usage)
