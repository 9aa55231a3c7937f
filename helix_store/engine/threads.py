"""Threads and processes: forks, Django's own thread, and the connections and waits of calls.

**Django's thread.** If code blocks the thread in which asgiref runs thread-sensitive code, and waits for an
event loop, as a synchronous view with ``asyncio.run`` does, it would wait forever for a call that asgiref has
queued for the same thread.

**Connections.** A connection belongs to a thread, so a call cannot join the transaction of a caller that
waits for it in another thread. If it ran, it would commit even if the caller rolls back, or wait forever for
rows that the caller has locked. Django closes a thread's connections when a request ends there. A thread of
an agent framework's executor, or one that the project started, never ends a request, so it would keep its
connection forever: a call there releases it when it ends.

**Waits.** Some calls would wait forever for a lock of a caller that itself waits for the call. A caller in an
``atomic()`` block may wait for another thread, as `graph.invoke` does. If that thread waits for a row that
the block has locked, neither ever continues, and the database cannot see why. The context of the call
usually names the block (see `require_thread_of_caller`), but some frameworks make calls with an empty
context. So a statement that has waited for a while, in a thread that Django does not manage, looks for the
open blocks of the other threads of this process. If the thread of such a block does nothing but wait, the
call is refused.

On PostgreSQL, psycopg already wakes up every tenth of a second while it waits, so this costs no statement.
It asks the server over another connection which transactions the statement waits for, and cancels it. On
SQLite, a call waits in shorter turns while another thread of this process has a block open.
"""

from __future__ import annotations

import asyncio
import gc
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from itertools import accumulate, chain, repeat
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet, ref

from asgiref.current_thread_executor import CurrentThreadExecutor
from asgiref.sync import AsyncToSync, SyncToAsync
from django.core.signals import request_finished, request_started
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from helix_store import conf
from helix_store.core.ids import after_fork
from helix_store.engine.errors import raise_mapped
from helix_store.exceptions import HelixStoreError, OutsideTransaction, StoreBusy

# --- Forks ---------------------------------------------------------------------------------------------

_CLOSE_TIMEOUT_SECONDS: Final = 1.0

_opened: Final[WeakSet[BaseDatabaseWrapper]] = WeakSet()
"""The connections of all threads, because the locks of a file belong to the process."""
used_aliases: Final[set[str]] = set()
"""The aliases that stores use. Connections of other aliases are left to the project."""
_kept: Final[list[object]] = []
"""Objects that must not be garbage-collected, because that would affect the parent."""


def watch_connections() -> None:
    """Track which connections are open; called once, when the app is ready."""
    connection_created.connect(_note_opened, dispatch_uid="helix_store.forks")


def _note_opened(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    _opened.add(connection)


def opened_connections() -> list[BaseDatabaseWrapper]:
    """Return all connections, in any thread, that have been opened and still exist."""
    while True:
        # Another thread may open one in the meantime.
        with suppress(RuntimeError):
            return list(_opened)


def _give_up_inherited() -> None:
    files = []
    for connection in [
        each for each in opened_connections() if each.alias in used_aliases and not each.closed_in_transaction
    ]:
        if connection.vendor == "postgresql":
            _leave_server(connection)
        elif connection.vendor == "sqlite" and _has_file_open(connection):
            files.append(connection.connection)
            _forget(connection)
    if files:
        _leave_files(files)
    if used_aliases:
        # Its thread runs only in the parent, so the child's first async call would wait for it forever.
        SyncToAsync.single_thread_executor = ThreadPoolExecutor(max_workers=1)


def _leave_server(connection: Any) -> None:
    pools = getattr(connection, "_connection_pools", {})
    if connection.alias in pools:
        # Its threads run only in the parent, and they may hold its locks.
        _kept.append(pools.pop(connection.alias))
    inherited = connection.connection
    if inherited is None:
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    # A driver error means that the connection has already lost the server.
    with suppress(connection.Database.Error):
        os.dup2(nowhere, inherited.fileno(), inheritable=False)
    os.close(nowhere)
    # On this socket, it would tell the server to end the session of the parent.
    inherited.close()
    _forget(connection)


def _has_file_open(connection: Any) -> bool:
    return connection.connection is not None and not connection.is_in_memory_db()


def _leave_files(inherited: list[Any]) -> None:
    """Close the files before another one is opened, or their locks would be taken for its own."""
    _kept.extend(inherited)

    def close_all() -> None:
        for each in inherited:
            # That would roll back the transaction of the parent.
            if not each.in_transaction:
                each.close()

    # If another thread of the parent was using a file, it stays locked in the child.
    closing = threading.Thread(target=close_all, name="helix_store fork", daemon=True)
    closing.start()
    closing.join(_CLOSE_TIMEOUT_SECONDS)


def _forget(connection: Any) -> None:
    """Make the next statement open a new connection; inside a block of the caller, make it fail."""
    connection.run_on_commit = []
    if connection.in_atomic_block:
        connection.closed_in_transaction = connection.needs_rollback = True
    else:
        connection.connection = None


after_fork(_give_up_inherited)


# --- Django's thread ---------------------------------------------------------------------------------

# asgiref has no API that reports what its threads are doing, but the code that they run is known.
_RUNS_A_CALL: Final = SyncToAsync.thread_handler.__code__
_IS_PARKED: Final = CurrentThreadExecutor.run_until_future.__code__

_LOOKS: Final = 20
_BETWEEN_LOOKS_SECONDS: Final = 0.01
_WAITING: Final = ("asyncio", "asgiref", "concurrent.futures", "queue", "selectors", "threading")
"""The modules whose functions a thread is in while it waits for another thread."""

# asgiref's own variable is empty in the threads to which a framework copies a context.
_parked: Final[ContextVar[Callable[[], CurrentThreadExecutor | None] | None]] = ContextVar(
    "helix_store_parked", default=None
)


class DjangosThread(NamedTuple):
    """The thread; ``caller`` is its ident if a call in it created this context, otherwise 0."""

    caller: int
    is_blocked: bool


def find_djangos_thread() -> DjangosThread:
    """Find the thread for the running event loop and this context.

    It is blocked if asgiref refuses calls, or if another loop made the call that is running there, because
    that call may have started this loop. A call from this loop will end by itself.
    """
    loop = asyncio.get_running_loop()
    executor = executor_of(loop)
    if executor is None:
        return DjangosThread(0, is_blocked=True)
    if isinstance(executor, CurrentThreadExecutor):
        _parked.set(ref(executor))
    thread = _thread_of(executor)
    if thread is None or thread.ident is None:
        return DjangosThread(0, is_blocked=False)
    # The threads of the parent do not exist in a forked child.
    is_blocked = (
        thread is threading.current_thread()
        or not thread.is_alive()
        or _is_refused(executor)
        or _calling_loop(thread.ident, executor, loop) is not loop
    )
    # All event loops outside of requests share one thread, and most of its calls are unrelated to this one.
    is_shared = executor is SyncToAsync.single_thread_executor and not _is_refused(executor)
    return DjangosThread(0 if is_shared else thread.ident, is_blocked)


def find_parked_caller() -> CurrentThreadExecutor | None:
    """Return the executor of the thread that waits in ``async_to_sync`` for this context.

    There is none if that thread has begun something else, which waits for another thread, perhaps this one.
    """
    known = _parked.get()
    executor = None if known is None else known()
    if executor is None or executor._broken:
        return None
    thread = executor._work_thread
    if thread.ident is None or thread is threading.current_thread():
        return None
    for look in range(_LOOKS):
        if look:
            # A thread that works also takes locks, for a moment.
            time.sleep(_BETWEEN_LOOKS_SECONDS)
        frames = frames_of(thread.ident)
        outer = next((each for each in frames if each.f_code in (_RUNS_A_CALL, _IS_PARKED)), None)
        if outer is None:
            return None
        if outer.f_code is _IS_PARKED:
            return executor if outer.f_locals.get("self") is executor else None
        if not waits_in(frames[0]):
            return executor
    return None


def waits_in(frame: FrameType) -> bool:
    """Return whether a thread waits for another thread if this is its innermost frame."""
    module = frame.f_globals.get("__name__") or ""
    return module in _WAITING or module.startswith(tuple(f"{each}." for each in _WAITING))


def executor_of(loop: asyncio.AbstractEventLoop) -> Any:
    """Return the executor that asgiref would choose, or ``None`` if the context's executor has ended."""
    parked = getattr(AsyncToSync.executors, "current", None)
    if parked is not None:
        while parked is not None and parked._broken:
            parked = parked._old_executor
        return parked
    request = SyncToAsync.thread_sensitive_context.get(None)
    if request is not None:
        # If there is no such thread, asgiref starts one.
        return SyncToAsync.context_to_thread_executor.get(request, _NOT_STARTED)
    return AsyncToSync.loop_thread_executors.get(loop) or SyncToAsync.single_thread_executor


_NOT_STARTED: Final = object()


def _thread_of(executor: Any) -> threading.Thread | None:
    if isinstance(executor, CurrentThreadExecutor):
        return executor._work_thread
    if not isinstance(executor, ThreadPoolExecutor):
        return None
    if not executor._threads:
        # `submit` starts a thread before it adds it to this set, and holds the lock until it has done both.
        with executor._shutdown_lock:
            pass
    return next(iter(executor._threads), None)


def _is_refused(executor: Any) -> bool:
    return executor is SyncToAsync.single_thread_executor and SyncToAsync.deadlock_context.get(False)


def _calling_loop(
    thread: int, executor: Any, default: asyncio.AbstractEventLoop
) -> asyncio.AbstractEventLoop:
    """Return the loop that made the call that is running in a thread; ``default`` if the thread is free."""
    for frame in frames_of(thread):
        if frame.f_code is _RUNS_A_CALL:
            return cast(asyncio.AbstractEventLoop, frame.f_locals.get("loop", default))
        if frame.f_code is _IS_PARKED and frame.f_locals.get("self") is executor:
            break
    return default


_without_gc: Final = threading.Lock()
# No thread may hold this lock when the process forks: in the child it would stay locked, and garbage would
# never be collected. Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_without_gc.acquire, after_in_parent=_without_gc.release, after_in_child=_without_gc.release
    )


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first.

    A single call of a built-in method creates them all, so that the thread cannot continue in the meantime:
    CPython 3.11 has crashed in ``f_back`` of a frame that had ended. For the same reason, the garbage
    collector must not run here. In addition, CPython before 3.12.4 holds the lock of its threads while it
    creates the frames. A garbage collection may run code that lets another thread continue. That thread would
    wait for the lock when it ends, and block all other threads.
    """
    current = map(operator.methodcaller("get", thread), map(operator.call, [sys._current_frames]))
    frames: list[Any] = []
    with _without_gc:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            frames.extend(accumulate(chain(current, repeat("f_back")), getattr))
        except AttributeError:
            # After the outermost frame, there is None, which has no further frame.
            frames.pop()
        finally:
            if was_enabled:
                gc.enable()
    return frames


# --- The connections of calls ------------------------------------------------------------------------

# This is not a context variable: a thread that copies the context of a request does not serve that request.
_requests: Final = threading.local()


_opened_by_calls: Final[WeakKeyDictionary[BaseDatabaseWrapper, ref[Any]]] = WeakKeyDictionary()
"""The driver's connection that a call has opened, until the call ends."""


is_kept_open: ContextVar[bool] = ContextVar("helix_store_connection_is_kept_open", default=False)


class _Block(NamedTuple):
    """The outermost ``atomic()`` of a connection, with weak references because contexts may live long."""

    connection: ref[Any]
    block: ref[Any]

    def is_open(self) -> bool:
        connection, block = self.connection(), self.block()
        return connection is not None and block is not None and outermost_block(connection) is block


# Executors of agent frameworks copy the context of the thread that waits for them.
open_blocks: Final[ContextVar[Mapping[str, _Block]]] = ContextVar(
    "helix_store_open_blocks",
    default=MappingProxyType({}),
)


def require_thread_of_caller(connection: BaseDatabaseWrapper) -> None:
    """Raise `OutsideTransaction` if a caller has a transaction of this database open in another thread.

    A caller is recognised by its context: through a call in its block, or through `engine.tasks`, which notes
    the transactions of threads that wait.
    """
    blocks = open_blocks.get()
    known = blocks.get(connection.alias)
    if known is not None and known.is_open():
        if known.connection() is not connection:
            raise OutsideTransaction
    elif connection.in_atomic_block:
        note_block(connection)
    elif known is not None:
        open_blocks.set({alias: block for alias, block in blocks.items() if block is not known})


def note_block(connection: BaseDatabaseWrapper) -> None:
    block = outermost_block(connection)
    if block is not None:
        open_blocks.set({**open_blocks.get(), connection.alias: _Block(ref(connection), ref(block))})


def outermost_block(connection: Any) -> object | None:
    """Return the outermost ``atomic()`` block that is open on a connection."""
    # Another thread may end the block in the meantime.
    return next(iter(connection.atomic_blocks), None)


def release(connection: BaseDatabaseWrapper) -> None:
    """Close what the end of a request would close, in a thread that Django does not manage.

    As at the end of a request, this honours ``CONN_MAX_AGE`` and returns a pooled connection. A connection
    with an open transaction stays open: it belongs to the caller, in an ``atomic()`` block or with autocommit
    off.

    The main thread returns a pooled connection that a call of the store has opened, because it may run for
    hours, and a small pool cannot spare the connection.
    """
    if connection.in_atomic_block or is_kept_open.get():
        return
    if is_managed():
        _return_what_calls_opened(connection)
        return
    if connection.connection is None or connection.autocommit:
        connection.close_if_unusable_or_obsolete()


def note_opened_by_call(connection: BaseDatabaseWrapper) -> None:
    """Record that a call of the store, not other code in its thread, has taken a pooled connection."""
    if connection.settings_dict["OPTIONS"].get("pool"):
        _opened_by_calls[connection] = ref(connection.connection)


def _return_what_calls_opened(connection: BaseDatabaseWrapper) -> None:
    if not connection.settings_dict["OPTIONS"].get("pool"):
        return
    opened = _opened_by_calls.pop(connection, None)
    is_ours = opened is not None and opened() is connection.connection
    if is_ours and connection.autocommit and not getattr(_requests, "is_served", False):
        return_to_pool(connection)


@contextmanager
def keep_open() -> Iterator[None]:
    """Leave connections open in a ``with`` block, because the caller of the thread releases them."""
    token = is_kept_open.set(True)
    try:
        yield
    finally:
        is_kept_open.reset(token)


@contextmanager
def return_to_pool_after() -> Iterator[None]:
    """Leave connections open in a ``with`` block, then return the pooled ones that calls in it have opened.

    Use this for one of Django's threads outside of requests, where nothing else closes its connections.
    """
    try:
        with keep_open():
            yield
    finally:
        for connection in connections.all(initialized_only=True):
            if not connection.in_atomic_block:
                _return_what_calls_opened(connection)


@contextmanager
def release_once(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """`release` the connection once after several calls instead of after each one."""
    try:
        with keep_open():
            yield
    finally:
        release(connection)


def return_to_pool(connection: BaseDatabaseWrapper) -> None:
    """Return a pooled connection; keep any other one open.

    Use this for a background thread between two uses: it must not occupy a place in a small pool while it
    waits.
    """
    if connection.settings_dict["OPTIONS"].get("pool"):
        connection.close()


def watch_requests() -> None:
    """Track which threads serve a Django request; called once, when the app is ready."""
    request_started.connect(_begin_request, dispatch_uid="helix_store.connections")
    request_finished.connect(_end_request, dispatch_uid="helix_store.connections")


def _begin_request(**kwargs: Any) -> None:
    _requests.is_served = True


def _end_request(**kwargs: Any) -> None:
    _requests.is_served = False


def is_managed() -> bool:
    """Return whether the end of a request or of the process releases the connections of this thread."""
    if threading.current_thread() is threading.main_thread():
        return True
    return getattr(_requests, "is_served", False)


# --- Waits for the own caller ------------------------------------------------------------------------

_IDLE_SECONDS: Final = 0.3
"""The time for which the thread of a block must have done nothing but wait."""


_LONGEST_SECONDS: Final = 5.0
"""The time after which a call stops waiting for a block of this process, whatever its thread does."""


_SERVER_SECONDS: Final = 5


_OWN_THREADS: Final = "helix_store "
"""The names of the store's background threads begin with this. No caller waits for them."""


_HELD_HERE: Final = (
    "Another thread of this process has held the lock for several seconds in an atomic() block. If it waits "
    "for this call, leave the block first, or make the call in its thread; otherwise try again shortly."
)


# A statement may wait behind another one that waits for the same row. Through a pooler, the server does not
# know the number of the session; then any ungranted lock counts.
_BLOCKERS: Final = """
    WITH RECURSIVE blockers(pid) AS (
        SELECT unnest(pg_catalog.pg_blocking_pids(%(waiting)s))
        UNION SELECT unnest(pg_catalog.pg_blocking_pids(pid)) FROM blockers
    )
    SELECT
        EXISTS (SELECT 1 FROM pg_catalog.pg_stat_activity WHERE pid = %(waiting)s),
        EXISTS (SELECT 1 FROM blockers WHERE pid = ANY(%(holding)s)),
        EXISTS (SELECT 1 FROM pg_catalog.pg_locks WHERE NOT granted)"""


class Passed(NamedTuple):
    """The blocks that a call in another thread passes. As far as anyone knows, they do not wait for it."""

    holds: Callable[[BaseDatabaseWrapper], bool]
    """Return whether the transaction of a connection is one of these blocks."""
    longest_wait_seconds: float
    """The time for which the call waits for one of them."""


passed_blocks: Final[ContextVar[Passed | None]] = ContextVar("helix_store_passed_blocks", default=None)


class _Refused(NamedTuple):
    """The block because of which a thread was refused, with weak references: none of them is kept alive."""

    connection: Any
    block: Any
    thread: Any
    """The thread, because the system gives its ident to another one after its end. None for a pool."""

    def is_open(self) -> bool:
        connection, block = self.connection(), self.block()
        if self.thread is not None:
            thread = self.thread()
            if thread is None or not thread.is_alive():
                return False
        return connection is not None and block is not None and outermost_block(connection) is block


refused_threads: Final[dict[int | str, _Refused]] = {}
"""Threads, by their ident, that waited for a block, and pools that work for the caller of one, by their name.
Their next calls need not wait: see `refuse_again`.
"""
after_fork(refused_threads.clear)


def remember_refused(holder: BaseDatabaseWrapper | None) -> None:
    """Remember that this thread works for the thread that has this connection, while its block is open."""
    block = None if holder is None else outermost_block(holder)
    if holder is not None and block is not None:
        thread = threading.current_thread()
        refused_threads[threading.get_ident()] = _Refused(ref(holder), ref(block), ref(thread))


def remember_pool(holder: BaseDatabaseWrapper | None) -> None:
    """Remember that the pool of this thread works for the thread that has this connection.

    The context of a call has shown it. The pool's other calls may have an empty context, and would commit
    even if the caller rolls back.
    """
    pool = _pool_of_thread()
    block = None if holder is None else outermost_block(holder)
    if holder is not None and block is not None and pool:
        refused_threads[pool] = _Refused(ref(holder), ref(block), None)


def _pool_of_thread() -> str:
    """Return the name of the executor whose thread this is, if the name is that of no other executor."""
    pool, _, _ = threading.current_thread().name.rpartition("_")
    return pool if pool.startswith("ThreadPoolExecutor-") else ""


def refuse_again(connection: BaseDatabaseWrapper) -> None:
    """Raise `OutsideTransaction` if this thread was refused because of a block that is still waiting."""
    if passed_blocks.get() is not None:
        return
    thread = threading.get_ident()
    for key in (_pool_of_thread(), thread):
        refused = refused_threads.get(key)
        if refused is None or not refused.is_open():
            continue
        holder = refused.connection()
        is_other = holder is not connection and holder.alias == connection.alias
        if is_other and (type(key) is str or _waits_at(holder) is not None):
            raise OutsideTransaction
    for ident, each in list(refused_threads.items()):
        if not each.is_open():
            refused_threads.pop(ident, None)


def blocks_elsewhere(connection: BaseDatabaseWrapper) -> list[BaseDatabaseWrapper]:
    """Return the connections to the same database on which other threads have a block open."""
    thread = threading.get_ident()
    return [
        each
        for each in opened_connections()
        if each.in_atomic_block and each.alias == connection.alias and ident_of_thread(each) != thread
    ]


def ident_of_thread(connection: Any) -> int:
    return connection._thread_ident  # type: ignore[no-any-return]


def _waits_at(holder: BaseDatabaseWrapper) -> tuple[int, int] | None:
    """Return a mark of the place where the thread of a connection waits for another thread, or ``None``.

    A mark that is the same a while later means that the thread has done nothing in between.
    """
    frames = frames_of(ident_of_thread(holder))
    if not frames:
        # The thread has ended, and nothing ends its block.
        return 0, 0
    innermost = frames[0]
    return (id(innermost), innermost.f_lasti) if waits_in(innermost) else None


class Wait:
    """A call in a thread that Django does not manage, which must not wait for its own caller."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection: Any = connection
        self._began: float | None = None
        self._marks: dict[int, tuple[tuple[int, int], float]] = {}

    def _idle_holders(self, holders: list[BaseDatabaseWrapper], now: float) -> list[BaseDatabaseWrapper]:
        """Return the holders whose threads have done nothing but wait for `_IDLE_SECONDS`."""
        idle, marks, passed = [], {}, passed_blocks.get()
        for holder in holders:
            mark = None if passed is not None and passed.holds(holder) else _waits_at(holder)
            if mark is None:
                continue
            known, since = self._marks.get(id(holder), (mark, now))
            marks[id(holder)] = (mark, since if known == mark else now)
            if known == mark and now - since >= _IDLE_SECONDS:
                idle.append(holder)
        self._marks = marks
        return idle


class _WaitOnServer(Wait):
    """A block in which psycopg's waits on one connection are watched."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        super().__init__(connection)
        self._native = connection.connection
        self._refusal: HelixStoreError | None = None

    def __enter__(self) -> None:
        native = self._native
        wait = type(native).wait

        def watched(statement: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
            return wait(native, _ticking(statement, self._tick), *args, **kwargs)

        native.wait = watched

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Otherwise the connection would refer to itself.
        del self._native.wait
        if self._refusal is not None and isinstance(error, Error | HelixStoreError):
            raise self._refusal from error

    def _tick(self, began: float) -> None:
        """Called every tenth of a second while a statement, which ``began`` at this time, waits."""
        now = time.monotonic()
        if self._refusal is not None:
            return
        if began != self._began:
            self._began, self._marks = began, {}
        holders = blocks_elsewhere(self._connection)
        idle = self._idle_holders(holders, now)
        passed = passed_blocks.get()
        is_late = now - began >= (_LONGEST_SECONDS if passed is None else passed.longest_wait_seconds)
        blocking = idle or (holders if is_late else [])
        if not blocking or not self._is_blocked_by(blocking):
            return
        self._refusal = OutsideTransaction() if idle else StoreBusy(_HELD_HERE, database_code="57014")
        if idle:
            remember_refused(idle[0])
        with suppress(self._connection.Database.Error):
            self._native.cancel_safe(timeout=_SERVER_SECONDS)

    def _is_blocked_by(self, holders: list[BaseDatabaseWrapper]) -> bool:
        """Ask the server over another connection; assume that it is blocked if the server cannot tell."""
        if conf.is_citus(self._connection.settings_dict):
            return True
        params = {**self._connection.get_connection_params(), "connect_timeout": _SERVER_SECONDS}
        holding = [
            pgconn.backend_pid for each in holders if (pgconn := getattr(each.connection, "pgconn", None))
        ]
        waiting = self._native.pgconn.backend_pid
        try:
            with self._connection.Database.connect(**params) as other:
                row = other.execute(_BLOCKERS, {"waiting": waiting, "holding": holding}).fetchone()
        except self._connection.Database.Error:
            return True
        is_known, is_blocked, waits_anybody = row
        return bool(is_blocked or (not is_known and waits_anybody))


def _ticking(statement: Generator[Any, Any, Any], tick: Callable[[float], None]) -> Generator[Any, Any, Any]:
    """Run one of psycopg's generators, and call ``tick`` whenever psycopg wakes up without an answer."""
    began = time.monotonic()
    try:
        wanted = next(statement)
        while True:
            ready = yield wanted
            if not ready:
                tick(began)
            wanted = statement.send(ready)
    except StopIteration as end:
        return end.value


UNWATCHED: Final = nullcontext()
"""The wait of a main thread, which works for no other thread's block. Hot calls check this themselves."""


def watched_wait(connection: BaseDatabaseWrapper) -> AbstractContextManager[object]:
    """Return a context in which a statement on PostgreSQL never waits for the caller of this thread.

    Enter it with an open connection. Raises `OutsideTransaction`, or `StoreBusy` after several seconds.
    """
    if connection.vendor != "postgresql" or _may_wait():
        return UNWATCHED
    native = connection.connection
    if not hasattr(native, "cancel_safe") or "wait" in vars(native):
        # This is another driver, or an enclosing block watches the connection.
        return UNWATCHED
    return _WaitOnServer(connection)


def _may_wait() -> bool:
    return is_managed() or threading.current_thread().name.startswith(_OWN_THREADS)


class ShortWaits(Wait):
    """The attempts of a transaction on SQLite while another thread of this process has a block open.

    SQLite reports nothing while it waits for a lock, so that each attempt waits only for a short time.
    """

    def __enter__(self) -> None:
        try:
            self._connection.ensure_connection()
        except Exception as exc:
            raise_mapped(self._connection, exc)
            raise
        self._attempt_began = time.monotonic()
        self._began = self._began or self._attempt_began
        self._idle_holders(blocks_elsewhere(self._connection), self._attempt_began)
        self._wait_up_to(round(_IDLE_SECONDS * 1000))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait_up_to(round(_longest_wait_on_sqlite(self._connection) * 1000))

    def _wait_up_to(self, milliseconds: int) -> None:
        native = self._connection.connection
        if native is not None:
            native.execute(f"PRAGMA busy_timeout = {milliseconds}")

    def may_go_on(self, busy: StoreBusy) -> bool:
        """Return whether to try again because less time has passed than SQLite would have waited.

        Raises `OutsideTransaction` if the thread of an open block has done nothing but wait.
        """
        now = time.monotonic()
        if now - self._attempt_began < _IDLE_SECONDS:
            # This was no wait: the transaction had read something that has changed since.
            return False
        if idle := self._idle_holders(blocks_elsewhere(self._connection), now):
            remember_refused(idle[0])
            raise OutsideTransaction from busy
        longest = min(_longest_wait_on_sqlite(self._connection), _LONGEST_SECONDS)
        return now - (self._began or now) < longest


def _longest_wait_on_sqlite(connection: BaseDatabaseWrapper) -> float:
    """Return the seconds for which SQLite waits for a lock; the default is that of Python's driver."""
    return float(connection.settings_dict["OPTIONS"].get("timeout", 5.0))


def has_waited(connection: BaseDatabaseWrapper, began: float) -> bool:
    """Return whether SQLite may have waited for a lock since ``began`` for as long as its settings allow.

    SQLite also refuses some transactions at once: those are worth another attempt.
    """
    return connection.vendor == "sqlite" and time.monotonic() - began >= _longest_wait_on_sqlite(connection)


def short_waits(connection: BaseDatabaseWrapper) -> ShortWaits | None:
    """Return how a call waits on SQLite, or ``None`` if it may wait as long as SQLite does."""
    if connection.vendor != "sqlite" or connection.in_atomic_block or _may_wait():
        return None
    return ShortWaits(connection) if blocks_elsewhere(connection) else None
