"""The threads in which the readers of a process run their queries."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from django.db import connections

from helix_store.core.processes import PerProcess
from helix_store.engine.connections import keep_open, return_to_pool

R = TypeVar("R")

_THREADS: Final = 4
LINGER_SECONDS: Final = 1.0
"""The time for which the threads of streams keep their connections without a reader."""


@dataclass(eq=False, slots=True)
class _Query:
    """A query that waits for a thread. Each reader has a result, so that it can be cancelled alone."""

    alias: str
    call: Callable[[], Any]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    results: list[Future[Any]] = field(default_factory=list)

    def run(self) -> None:
        wanted = [result for result in self.results if result.set_running_or_notify_cancel()]
        try:
            value = self.context.run(self._answer)
        except BaseException as exc:  # noqa: BLE001  the readers get it
            for result in wanted:
                result.set_exception(exc)
        else:
            for result in wanted:
                result.set_result(value)

    def _answer(self) -> Any:
        try:
            with keep_open():
                return self.call()
        finally:
            return_to_pool(connections[self.alias])


class ReaderPool:
    """A pool that runs queries on at most four threads, which close their connections and end when no reader
    has used the pool for a while. Readers that wait for a query with the same key share it until it begins.
    A running query is not shared, because it may have begun before the commit of the write that woke the
    reader.
    """

    def __init__(self, linger_seconds: float = LINGER_SECONDS) -> None:
        self._linger_seconds = linger_seconds
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, _Query] = {}
        self._threads = 0
        self._running = 0

    async def run(self, alias: str, key: tuple[object, ...], query: Callable[[], R]) -> R:
        """Run a query on this database in the context of the task, and return its result."""
        result: Future[R] = Future()
        with self._changed:
            shared = self._waiting.setdefault((alias, *key), _Query(alias, query))
            shared.results.append(result)
            idle = self._threads - self._running
            if idle < len(self._waiting) and self._threads < _THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="helix_store reader", daemon=True).start()
            self._changed.notify()
        return await asyncio.wrap_future(result)

    def _work(self) -> None:
        try:
            while query := self._next():
                query.run()
                with self._changed:
                    self._running -= 1
        finally:
            connections.close_all()

    def _next(self) -> _Query | None:
        """Wait for a query. Return ``None`` to end the thread, if no query has run for a while."""
        with self._changed:
            while not self._waiting:
                is_woken = self._changed.wait(self._linger_seconds)
                if not (is_woken or self._waiting or self._running):
                    self._threads -= 1
                    return None
            self._running += 1
            return self._waiting.pop(next(iter(self._waiting)))


reader_pool: Final = PerProcess(ReaderPool).get
"""Return the pool of this process."""
