"""Clients in processes of their own, which live on from one history to the next.

with Crew(settings, 4) as crew:
    crew.begin(seed, tenant)
    ...                       # whatever is done to the database meanwhile
    history = crew.end()      # what all clients were told
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final, Self

from helix_store.exceptions import OutcomeUnknown, StoreUnavailable
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseUsageStore
from tests.database.separate import separate_connection
from tests.faults.clients import client
from tests.faults.history import History
from tests.processes import PROCESSES, WorkerProcess

__all__ = ["Crew", "pause", "until"]

_PATIENCE_SECONDS: Final = 60.0
_ENDLESS: Final = 100_000
_PAUSE_WITHOUT_AN_ANSWER_SECONDS: Final = 0.02


def pause(seconds: float) -> None:
    select.select([], [], [], seconds)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not after {_PATIENCE_SECONDS:.0f} s: {what}"
        pause(0.001)


class Crew:
    """Clients of a database with these settings. Each has one connection, and is never started again."""

    def __init__(self, settings: dict[str, Any], size: int) -> None:
        # Of shared memory, without a lock: each client writes its own element.
        self._calls = PROCESSES.RawArray("q", size)
        self._successes = PROCESSES.RawArray("q", size)
        self._orders: list[Connection] = []
        self._workers: list[WorkerProcess] = []
        for number in range(size):
            ours, theirs = PROCESSES.Pipe()
            self._workers.append(
                WorkerProcess(_serve, settings, number, theirs, self._calls, self._successes)
            )
            self._orders.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers:
            worker.kill()

    def begin(self, seed: int, tenant: str, *, calls: int = _ENDLESS) -> None:
        """Let every client make so many calls in a tenant, or go on until `end`."""
        for number, orders in enumerate(self._orders):
            self._calls[number] = 0
            orders.send((seed, tenant, calls))

    def end(self) -> History:
        """Stop every client after the call that it makes, and return what they were told."""
        for orders in self._orders:
            orders.send(None)
        return self.outcome()

    def outcome(self) -> History:
        """Wait until every client has made its calls, and return what they were told."""
        events = []
        for orders, worker in zip(self._orders, self._workers, strict=True):
            try:
                assert orders.poll(_PATIENCE_SECONDS), "a client does not answer"
                events += orders.recv()
            except EOFError:
                worker.outcome().unwrap()
        return History(events)

    def wait_for_calls(self, number: int) -> None:
        """Wait until so many calls have ended since `begin`."""
        until(lambda: sum(self._calls) >= number, f"{number} calls")

    def have_all_succeeded_after(self, moment: int) -> bool:
        """Whether each client has made a call that began after a moment, with success."""
        return all(each > moment for each in self._successes)


def _serve(settings: dict[str, Any], number: int, orders: Connection, calls: Any, successes: Any) -> None:
    with separate_connection(**settings) as connection:
        while True:
            try:
                seed, tenant, length = orders.recv()
            except EOFError:
                return
            history = History(client=number)
            going_on = client(
                DatabaseStateStore(connection.alias, tenant=tenant),
                DatabaseLockManager(connection.alias, tenant=tenant),
                history,
                number,
                seed,
                length,
                usage=DatabaseUsageStore(connection.alias, tenant=tenant),
            )
            for _ in going_on:
                calls[number] += 1
                last = history.events[-1]
                if last.result == "ok":
                    successes[number] = last.begin
                if isinstance(last.error, StoreUnavailable | OutcomeUnknown):
                    pause(_PAUSE_WITHOUT_AN_ANSWER_SECONDS)
                if length == _ENDLESS and orders.poll():
                    orders.recv()
                    break
            orders.send(history.events)
