"""A call that waits for another transaction's lock, in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.exceptions import HelixStoreError
from tests.database.separate import fetch
from tests.databases import CommittedDatabase

__all__ = ["in_background", "until_it_waits"]

T = TypeVar("T")


def until_it_waits(database: CommittedDatabase, waiting: BaseDatabaseWrapper) -> None:
    """Wait until the other worker's statement waits for a lock."""
    pid = waiting.connection.info.backend_pid
    deadline = time.monotonic() + 10
    while not fetch(database.connection, "SELECT 1 FROM pg_locks WHERE pid = %s AND NOT granted", pid):
        assert time.monotonic() < deadline, "it does not wait"


def in_background(
    connection: BaseDatabaseWrapper, call: Callable[[], T]
) -> Callable[[], T | HelixStoreError]:
    """Start a call on a connection in a thread; what is returned waits for its outcome."""
    pool = ThreadPoolExecutor(1)
    connection.inc_thread_sharing()

    def outcome() -> T | HelixStoreError:
        connections[connection.alias] = connection
        try:
            return call()
        except HelixStoreError as exc:
            return exc

    future = pool.submit(outcome)
    pool.shutdown(wait=False)

    def result() -> T | HelixStoreError:
        try:
            return future.result(30)
        finally:
            connection.dec_thread_sharing()

    return result
