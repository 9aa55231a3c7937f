"""Threads and processes: forks, Django's own thread, and the sessions that a pooler shares between them.

The thread in which asgiref would run thread-sensitive code, and whether it is waiting for its caller.

If code blocks such a thread and waits for an event loop, as a synchronous view with ``asyncio.run`` does, it
would wait forever for a call that asgiref has queued for the same thread.
"""

from __future__ import annotations

import asyncio
import gc
import operator
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from itertools import accumulate, chain, repeat
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from weakref import WeakSet, ref

from asgiref.current_thread_executor import CurrentThreadExecutor
from asgiref.sync import AsyncToSync, SyncToAsync
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from helix_store.core.ids import after_fork

if TYPE_CHECKING:
    pass


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
    executor = _executor_of(loop)
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


def _executor_of(loop: asyncio.AbstractEventLoop) -> Any:
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


_ROUNDS: Final = 6


def loses_prepared_statements(connection: BaseDatabaseWrapper) -> bool:
    """Return whether statements that are prepared on a connection may be missing later.

    To test for a pooler, this opens two more connections with the same settings. Between their statements
    they hold no server session. A pooler that tracks prepared statements renames them and does not lose any.
    """
    if connection.vendor != "postgresql" or not _is_pooled(connection):
        return False
    one, two = _fresh(connection), _fresh(connection)
    try:
        return _share_sessions(one, two) and _keeps_names(one)
    finally:
        one.close()
        two.close()


def _fresh(connection: BaseDatabaseWrapper) -> Any:
    """Return a connection with the same settings that does not come from the pool in this process."""
    fresh = connection.copy()
    fresh.settings_dict["OPTIONS"].pop("pool", None)
    return fresh


def _session(connection: Any) -> int:
    """Return the server process that runs this statement."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_catalog.pg_backend_pid()")
        (pid,) = cursor.fetchone()
    return int(pid)


def _is_pooled(connection: Any) -> bool:
    """Return whether there is a pooler, which makes up a process number when a connection starts."""
    actual = _session(connection)
    info = getattr(connection.connection, "info", None)
    return getattr(info, "backend_pid", actual) != actual


def _share_sessions(one: Any, two: Any) -> bool:
    """Return whether one process serves both open connections, which only happens in transaction mode."""
    of_one: set[int] = set()
    of_two: set[int] = set()
    # The connections take turns of different lengths, because otherwise a round-robin pooler would never
    # repeat a session.
    for turn in range(1, _ROUNDS + 1):
        of_one.update(_session(one) for _ in range(turn))
        of_two.update(_session(two) for _ in range(turn + 1))
        if of_one & of_two:
            return True
    return False


def _keeps_names(connection: Any) -> bool:
    """Return whether the server knows a prepared statement by the name that the client gave it."""
    pgconn = getattr(connection.connection, "pgconn", None)
    if pgconn is None:
        # Other drivers do not prepare statements.
        return False
    name = f"helix_store_probe_{secrets.token_hex(8)}"
    # This is one transaction, so that all statements reach the same session of the server.
    connection.set_autocommit(False)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            pgconn.prepare(name.encode(), b"SELECT 1")
            cursor.execute("SELECT 1 FROM pg_catalog.pg_prepared_statements WHERE name = %s", [name])
            is_known = cursor.fetchone() is not None
            if is_known:
                # Deallocate it by name, because other clients will use the session.
                cursor.execute(f"DEALLOCATE {name}")
        return is_known
    finally:
        connection.rollback()
