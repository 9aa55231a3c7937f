"""The few threads in which all readers of a process read, so that their number costs no connections.

A thread per reader, which is what Django gives an asynchronous request, would be a connection per reader.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from django.db import connections

__all__ = ["LINGER_SECONDS", "ReadingThreads", "reading_threads"]

R = TypeVar("R")

_MOST_THREADS: Final = 4
LINGER_SECONDS: Final = 1.0
"""How long a thread keeps its connection when nobody asks for anything."""


@dataclass(slots=True)
class _Reading:
    """One query, and everybody who waits for its answer."""

    key: Hashable
    body: Callable[[], Any]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    answers: list[Future[Any]] = field(default_factory=list)


class ReadingThreads:
    """Runs queries of readers. Those that wait under one key share the one that has not begun yet."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: queue.SimpleQueue[_Reading] = queue.SimpleQueue()
        self._waiting: dict[Hashable, _Reading] = {}
        self._threads = 0
        self._idle = 0

    async def run(self, key: Hashable, body: Callable[[], R]) -> R:
        answer: Future[R] = Future()
        with self._mutex:
            reading = self._waiting.get(key)
            if reading is None:
                # Only one that has not begun is shared: what wakes a reader was committed before it asks.
                reading = self._waiting[key] = _Reading(key, body)
                self._queue.put(reading)
                if len(self._waiting) > self._idle and self._threads < _MOST_THREADS:
                    self._threads += 1
                    threading.Thread(target=self._work, name="helix_store reading", daemon=True).start()
            reading.answers.append(answer)
        return await asyncio.wrap_future(answer)

    def _work(self) -> None:
        try:
            while (reading := self._next()) is not None:
                self._answer(reading)
        finally:
            connections.close_all()

    def _next(self) -> _Reading | None:
        with self._mutex:
            self._idle += 1
        try:
            reading = self._queue.get(timeout=LINGER_SECONDS)
        except queue.Empty:
            reading = None
        with self._mutex:
            self._idle -= 1
            if reading is None and self._waiting:
                # It was put there between the two.
                reading = self._queue.get()
            if reading is None:
                self._threads -= 1
            else:
                del self._waiting[reading.key]
        return reading

    def _answer(self, reading: _Reading) -> None:
        try:
            value = reading.context.run(reading.body)
        except BaseException as exc:  # noqa: BLE001  it belongs to those who wait
            connections.close_all()
            for answer in reading.answers:
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(exc)
        else:
            for answer in reading.answers:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(value)


_of_process = ReadingThreads()


def reading_threads() -> ReadingThreads:
    """Those of this process."""
    return _of_process


def _start_anew() -> None:
    global _of_process
    _of_process = ReadingThreads()


os.register_at_fork(after_in_child=_start_anew)
