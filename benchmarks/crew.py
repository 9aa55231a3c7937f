"""Worker processes that stay alive over the rounds: their start is not measured."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, Self

from benchmarks.rounds import Ran

__all__ = ["Crew", "WorkerFailed"]

_CONTEXT = multiprocessing.get_context("spawn")


class WorkerFailed(RuntimeError):
    """A worker raised an error or died; the message holds its traceback."""


class Crew:
    """So many processes; each keeps the operations that it made, by key, with their connections."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Kept: a barrier that nobody here holds is gone before a worker gets at it.
        self._start = _CONTEXT.Barrier(size)
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_work, args=(number, theirs, self._start), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.terminate()

    def make(self, key: str, make: Any) -> None:
        """Have every worker make an operation under this key."""
        self._ask("make", key, make)

    def prepare(self, key: str, count: int) -> None:
        """Have every worker get ready for `run` with this count."""
        self._ask("prepare", key, self._each(count))

    def run(self, key: str, count: int) -> Ran:
        """Do about so many operations, all workers at once, from the first start to the last end."""
        each = self._each(count)
        spans = self._ask("run", key, each)
        self._ask("check", key, None)
        seconds = max(end for _, end in spans) - min(start for start, _ in spans)
        return Ran(each * self.size, seconds)

    def _each(self, count: int) -> int:
        return max(1, round(count / self.size))

    def report(self, key: str) -> list[Any]:
        """What each worker's operation has to say."""
        return self._ask("report", key, None)

    def close(self, key: str) -> None:
        self._ask("close", key, None)

    def _ask(self, verb: str, key: str, argument: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((verb, key, argument))
        return [self._answer(pipe) for pipe in self._pipes]

    def _answer(self, pipe: Connection) -> Any:
        try:
            is_error, answer = pipe.recv()
        except (EOFError, ConnectionError) as exc:
            raise WorkerFailed("A worker died.") from exc
        if is_error:
            raise WorkerFailed(answer)
        return answer


def _work(number: int, pipe: Connection, start: Barrier) -> None:
    """In a worker process: answer until the pipe is closed."""
    import django

    # Before anything is unpickled that imports models.
    django.setup()
    operations: dict[str, Any] = {}
    while True:
        try:
            verb, key, argument = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, _do(operations, number, start, verb, key, argument)))
        except Exception:  # noqa: BLE001  the parent has to know
            start.abort()
            pipe.send((True, traceback.format_exc()))


def _do(operations: dict[str, Any], number: int, start: Barrier, verb: str, key: str, argument: Any) -> Any:
    if verb == "make":
        operations[key] = argument(number)
        return None
    if verb == "close":
        return operations.pop(key).close()
    if verb == "run":
        start.wait(60)
        started = time.monotonic()
        operations[key].run(argument)
        return started, time.monotonic()
    if verb == "prepare":
        return operations[key].prepare(argument)
    return getattr(operations[key], verb)()
