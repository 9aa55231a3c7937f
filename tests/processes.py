"""Run a function at one moment in several processes or threads, each with its own database connections.

    outcomes = run_in_processes(claim, [(tenant, "a"), (tenant, "b")])
    assert [outcome.value for outcome in outcomes].count(True) == 1

What runs in a process is a function of a module, and its arguments, its value and its error are picklable.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, Final

import django
from django.apps import apps
from django.db import connections

__all__ = ["PROCESSES", "Outcome", "WorkerDied", "WorkerProcess", "run_in_processes", "run_in_threads"]

# The fork server preloads this module, so that a worker is ready in milliseconds.
# In a test process Django is set up already.
if not apps.ready:
    django.setup()

# Not fork: a child would share the sockets of our connections and the locks that our other threads hold.
PROCESSES: Final = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.processes", "helix_store.handles"])

_DEFAULT_TIMEOUT: Final = 60.0


class WorkerDied(RuntimeError):
    """The worker ended without an answer."""


@dataclass(frozen=True)
class Outcome:
    """What one worker came back with: a value, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        """The value; raises the error when there is one."""
        if self.error is not None:
            raise self.error
        return self.value


class WorkerProcess:
    """One process that runs ``function(*arguments)`` on the test databases, to be waited for or killed.

    Synchronise with ``PROCESSES.Event()`` or ``PROCESSES.Barrier(n)`` among the arguments.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, start: Barrier | None = None) -> None:
        self._answers, answer = PROCESSES.Pipe(duplex=False)
        # A semaphore goes with its last reference here, and a child that has not opened it yet would fail.
        self._kept = (start, arguments)
        # The settings of this process name the test databases; a fresh process would read the real names.
        databases = {alias: dict(connections[alias].settings_dict) for alias in connections}
        self._process = PROCESSES.Process(
            target=_work, args=(databases, answer, start, function, arguments), daemon=True
        )
        self._process.start()
        answer.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait(self, timeout: float) -> bool:
        """Wait for the end of the process, and return whether it has ended."""
        self._process.join(timeout)
        return not self.is_alive

    def kill(self) -> None:
        """End the process with SIGKILL and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def outcome(self, timeout: float = _DEFAULT_TIMEOUT) -> Outcome:
        """Wait for the answer; a worker that takes longer is killed, and ``TimeoutError`` is raised."""
        if not self._answers.poll(timeout):
            self.kill()
            raise TimeoutError(f"The worker gave no answer within {timeout} seconds.")
        try:
            outcome: Outcome = pickle.loads(self._answers.recv_bytes())  # noqa: S301  our own child wrote it
        except EOFError:
            self._process.join()
            outcome = Outcome(error=WorkerDied(f"The worker ended with code {self._process.exitcode}."))
        self._process.join()
        return outcome


def run_in_processes(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, timeout: float = _DEFAULT_TIMEOUT
) -> list[Outcome]:
    """Call ``function`` once per tuple of arguments, each in its own process, all released at one moment."""
    start = PROCESSES.Barrier(len(arguments))
    workers = [WorkerProcess(function, *each, start=start) for each in arguments]
    deadline = time.monotonic() + timeout
    try:
        return [worker.outcome(max(0.0, deadline - time.monotonic())) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def run_in_threads(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, timeout: float = _DEFAULT_TIMEOUT
) -> list[Outcome]:
    """The same in threads of this process; raises ``TimeoutError`` when one of them does not end."""
    start = threading.Barrier(len(arguments))
    outcomes: dict[int, Outcome] = {}

    def work(index: int, each: tuple[Any, ...]) -> None:
        try:
            start.wait(timeout)
            outcomes[index] = _outcome_of(function, each)
        finally:
            connections.close_all()

    threads = [
        threading.Thread(target=work, args=(index, each), daemon=True) for index, each in enumerate(arguments)
    ]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"{sum(thread.is_alive() for thread in threads)} threads did not end.")
    return [outcomes[index] for index in range(len(arguments))]


def _work(
    databases: dict[str, dict[str, Any]],
    answer: Connection,
    start: Barrier | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    for alias, settings in databases.items():
        connections.settings.setdefault(alias, {}).update(settings)
    try:
        if start is not None:
            start.wait(_DEFAULT_TIMEOUT)
        outcome = _outcome_of(function, arguments)
    finally:
        connections.close_all()
    answer.send_bytes(_pickled(outcome))


def _outcome_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Outcome:
    try:
        return Outcome(value=function(*arguments))
    except Exception as exc:  # noqa: BLE001  the error is the outcome
        return Outcome(error=exc)


def _pickled(outcome: Outcome) -> bytes:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # noqa: S301  some errors break only when they are read back
    except Exception as exc:  # noqa: BLE001  whatever a foreign __reduce__ raises
        text = "".join(traceback.format_exception(outcome.error)) if outcome.error else repr(outcome.value)
        return pickle.dumps(Outcome(error=TypeError(f"The outcome cannot be pickled ({exc}): {text}")))
    return data
