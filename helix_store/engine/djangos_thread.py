"""The thread in which asgiref would run thread-sensitive code, and whether it is waiting for its caller.

If code blocks such a thread and waits for an event loop, as a synchronous view with ``asyncio.run`` does, it
would wait forever for a call that asgiref has queued for the same thread.
"""

from __future__ import annotations

import asyncio
import gc
import operator
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain, repeat
from types import FrameType
from typing import Any, Final, NamedTuple, cast

from asgiref.current_thread_executor import CurrentThreadExecutor
from asgiref.sync import AsyncToSync, SyncToAsync

# asgiref has no API that reports what its threads are doing, but the code that they run is known.
_RUNS_A_CALL: Final = SyncToAsync.thread_handler.__code__
_IS_PARKED: Final = CurrentThreadExecutor.run_until_future.__code__


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
    for frame in _frames_of(thread):
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


def _frames_of(thread: int) -> list[FrameType]:
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
