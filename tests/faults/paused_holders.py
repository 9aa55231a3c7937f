"""A lock holder in a process of its own, which stands still past the end of its term, again and again."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any, Final, Self

import psutil
from django.test.utils import override_settings

from helix_store.exceptions import HelixStoreError
from helix_store.stores import DatabaseLockManager
from tests.faults.crew import until
from tests.faults.guarded import CALLS, SESSION, Place
from tests.processes import PROCESSES, WorkerProcess

__all__ = ["Holder"]

_TERM_MS: Final = 5
_PATIENCE_SECONDS: Final = 60.0


class Holder:
    """The process seen from outside. `write` begins a write; its answer comes when the process goes on."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._worker.kill()

    def start_again(self) -> None:
        """In another process, which nothing was asked of."""
        self._worker.kill()
        self._start()

    def acquire(self, tenant: str) -> int:
        """Begin a short term of the lock. Returns its token."""
        self._orders.send((tenant, None, None, True))
        token = self._answer()
        assert isinstance(token, int), token
        return token

    def write(self, tenant: str, name: str, token: int | None, *, is_fast: bool) -> None:
        """Begin a guarded write."""
        self._orders.send((tenant, name, token, is_fast))
        assert self._answer() == "begins"

    def stop(self) -> None:
        os.kill(self._worker.pid, signal.SIGSTOP)
        until(lambda: self._process.status() == psutil.STATUS_STOPPED, "the holder stands still")

    def go_on(self) -> None:
        os.kill(self._worker.pid, signal.SIGCONT)

    def outcome(self) -> HelixStoreError | None:
        """The error of the write that has begun, or ``None`` where it was made."""
        outcome = self._answer()
        assert outcome is None or isinstance(outcome, HelixStoreError), outcome
        return outcome

    def _start(self) -> None:
        self._orders, theirs = PROCESSES.Pipe()
        self._worker = WorkerProcess(_serve, self._alias, theirs)
        self._process = psutil.Process(self._worker.pid)

    def _answer(self) -> Any:
        assert self._orders.poll(_PATIENCE_SECONDS), "the holder does not answer"
        try:
            return self._orders.recv()
        except EOFError:
            return self._worker.outcome().unwrap()


def _serve(alias: str, orders: Connection) -> None:
    while True:
        try:
            tenant, name, token, is_fast = orders.recv()
        except EOFError:
            return
        if name is None:
            lock = DatabaseLockManager(alias, tenant=tenant).acquire(SESSION, ttl_ms=_TERM_MS)
            orders.send(None if lock is None else lock.fencing_token)
            continue
        with override_settings(HELIX_STORE={"FAST_PATHS": is_fast}):
            orders.send("begins")
            try:
                CALLS[name](Place(alias, tenant), token)
            except HelixStoreError as exc:
                orders.send(exc)
            else:
                orders.send(None)
