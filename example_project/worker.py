"""Agents in separate processes: one is killed while it works, the next one continues."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

import django
from django.apps import apps
from django.db import connections

from example_project.events import Event

__all__ = ["WorkerFailed", "run_in_process", "run_until_killed"]

# Not fork: the child would share the parent's database connections.
_PROCESSES: Final = multiprocessing.get_context("spawn")


class WorkerFailed(RuntimeError):
    """The process of an agent ended with an error; its traceback is on stderr."""


def run_in_process(alias: str, tenant: str, session_id: str, *, approves: bool = False) -> Iterator[Event]:
    """Run the session in another process until it ends or waits, and yield what the agent reports. With
    ``approves``, it first answers the calls that wait for a person.
    """
    with _Worker(alias, tenant, session_id, stops_at=None, approves=approves) as worker:
        yield from worker.reports()
        worker.process.join()
        if worker.process.exitcode:
            raise WorkerFailed(f"The worker ended with code {worker.process.exitcode}.")


def run_until_killed(
    alias: str, tenant: str, session_id: str, *, kind: str, step_id: str, approves: bool = False
) -> Iterator[Event]:
    """Run the session in another process, and kill it as soon as it reports an event of a kind in a step.

    The signal is SIGKILL, so the process cannot clean up.
    """
    with _Worker(alias, tenant, session_id, stops_at=(kind, step_id), approves=approves) as worker:
        for event in worker.reports():
            yield event
            if _is_end(event, (kind, step_id)):
                return
        raise WorkerFailed("The worker ended before it could be killed.")


def _is_end(event: Event, stops_at: tuple[str, str] | None) -> bool:
    return (event.kind, event.step_id) == stops_at


class _Worker:
    """A process with an agent, and the pipe through which it reports."""

    def __init__(
        self,
        alias: str,
        tenant: str,
        session_id: str,
        *,
        stops_at: tuple[str, str] | None,
        approves: bool = False,
    ) -> None:
        self._connection, connection = _PROCESSES.Pipe()
        # The current settings, so that a test's process uses the test database.
        database = dict(connections[alias].settings_dict)
        self.process = _PROCESSES.Process(
            target=_work,
            args=(alias, database, tenant, session_id, stops_at, approves, connection),
            daemon=True,
        )
        self.process.start()
        connection.close()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self._connection.close()

    def reports(self) -> Iterator[Event]:
        while True:
            try:
                yield self._connection.recv()
            except EOFError:
                return


def _work(
    alias: str,
    database: dict[str, Any],
    tenant: str,
    session_id: str,
    stops_at: tuple[str, str] | None,
    approves: bool,
    connection: Connection,
) -> None:
    # Ctrl-C is sent to all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not apps.ready:
        django.setup()
    # Models can be imported only after setup.
    from example_project.agent import Agent, answer_approval
    from example_project.travel import PLANNER
    from helix_store.stores import Store

    connections.settings[alias].update(database)

    sending = threading.Lock()

    def report(event: Event) -> None:
        with sending:
            connection.send(event)
        if _is_end(event, stops_at):
            # The parent sends nothing: this waits until the process is killed or its parent ends.
            connection.recv()

    try:
        store = Store(alias, tenant=tenant)
        if approves:
            answer_approval(store, session_id, approved=True)
        Agent(store, PLANNER, report=report).run(session_id)
    finally:
        connections.close_all()
