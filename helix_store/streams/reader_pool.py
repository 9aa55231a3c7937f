"""The threads in which the readers of a process run their queries."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from django.db import connections

from helix_store.core.processes import PerProcess
from helix_store.engine.connections import keep_open, return_to_pool

__all__ = ["LINGER_SECONDS", "ReaderPool", "reader_pool"]

R = TypeVar("R")

_THREADS: Final = 4
LINGER_SECONDS: Final = 1.0
"""The time for which the threads of streams keep their connections without a reader."""
_CLOSE_TIMEOUT_SECONDS: Final = 5.0


class ReaderPool:
    """A pool that runs queries on at most four threads, and closes their connections when they are no longer
    used. Readers that wait for a query with the same key share it until it begins. A running query is not
    shared, because it may have begun before the commit of the write that woke the reader.
    """

    def __init__(self, linger_seconds: float = LINGER_SECONDS) -> None:
        self._linger_seconds = linger_seconds
        self._mutex = threading.Lock()
        self._waiting: dict[Hashable, Future[Any]] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._running = 0
        self._was_used = False

    async def run(self, alias: str, key: tuple[object, ...], query: Callable[[], R]) -> R:
        """Run a query on this database in the context of the task, and return its result."""
        # Each reader has a future, so that the cancellation of one reader leaves the others waiting.
        result: Future[R] = Future()
        with self._mutex:
            shared = self._waiting.get((alias, *key))
            if shared is None:
                run = partial(contextvars.copy_context().run, self._run, alias, key, query)
                shared = self._waiting[(alias, *key)] = self._executor_locked().submit(run)
        shared.add_done_callback(partial(_copy_result, to=result))
        return await asyncio.wrap_future(result)

    def _executor_locked(self) -> ThreadPoolExecutor:
        self._was_used = True
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="helix_store reader")
            threading.Thread(
                target=self._close_when_unused, name="helix_store reader pool", daemon=True
            ).start()
        return self._executor

    def _run(self, alias: str, key: tuple[object, ...], query: Callable[[], R]) -> R:
        with self._mutex:
            del self._waiting[(alias, *key)]
            self._running += 1
        try:
            with keep_open():
                return query()
        finally:
            return_to_pool(connections[alias])
            with self._mutex:
                self._running -= 1
                self._was_used = True

    def _close_when_unused(self) -> None:
        """Wait until no query has run for a while, then close the connections and end the threads."""
        while True:
            time.sleep(self._linger_seconds)
            with self._mutex:
                if not (self._was_used or self._waiting or self._running):
                    executor, self._executor = self._executor, None
                    break
                self._was_used = False
        if executor is not None:
            _close(executor)


def _close(executor: ThreadPoolExecutor) -> None:
    """End an idle executor, after each of its threads has closed its connections."""
    # A connection must be closed by its thread. The barrier keeps each thread from taking a second task.
    barrier = threading.Barrier(_THREADS, timeout=_CLOSE_TIMEOUT_SECONDS)
    # Raised while the interpreter exits, which also ends the threads.
    with suppress(RuntimeError):
        for _ in range(_THREADS):
            executor.submit(_close_connections, barrier)
    executor.shutdown(wait=False)


def _close_connections(barrier: threading.Barrier) -> None:
    connections.close_all()
    with suppress(threading.BrokenBarrierError):
        barrier.wait()


def _copy_result(done: Future[R], *, to: Future[R]) -> None:
    if not to.set_running_or_notify_cancel():
        return
    error = done.exception()
    if error is None:
        to.set_result(done.result())
    else:
        to.set_exception(error)


_pool: Final = PerProcess(ReaderPool)


def reader_pool() -> ReaderPool:
    """Return the pool of this process."""
    return _pool.get()
