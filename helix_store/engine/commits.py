"""A transaction whose COMMIT may stay without a reply, and how its outcome is found.

On PostgreSQL each transaction of the store reads its number when it begins, in the same trip as ``BEGIN``.
When the reply to COMMIT is lost, another connection asks the server what became of that number. A server
that crashed, or another one that was promoted in its place, may have given the number out a second time.
So the time since when the server counts its statistics is read too: it changes with each of the two.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.engine.errors import mapped_errors
from helix_store.exceptions import OutcomeUnknown, StoreBusy, StoreTimeout, StoreUnavailable

__all__ = ["NO_ANSWER", "WatchedTransaction", "patient_pauses"]

NO_ANSWER: Final = (OutcomeUnknown, StoreUnavailable, StoreBusy, StoreTimeout)

_PATIENCE_SECONDS: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 0.5

_STATUS: Final = """
    SELECT CASE
        WHEN pg_catalog.pg_is_in_recovery() THEN NULL
        WHEN pg_catalog.pg_stat_get_bgwriter_stat_reset_time() = %(server)s::timestamptz
        THEN pg_catalog.pg_xact_status(%(number)s::xid8)
        ELSE 'another server'
    END"""
# A client that has gone sends no COMMIT. The server may learn of it hours later, and keeps the locks so long.
_END_IF_IDLE: Final = """
    SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity
    WHERE backend_xid = %(number)s::xid8::xid AND state LIKE 'idle in transaction%%'"""


class WatchedTransaction:
    """One try of a transaction: a context inside of its ``atomic()`` block.

    Nothing is watched that is part of another transaction.
    """

    def __init__(self, connection: BaseDatabaseWrapper, *, only_reads: bool = False) -> None:
        self._connection = connection
        self._only_reads = only_reads
        self._beginnings: Any = None
        self._mark: tuple[str, str] | None = None
        self._hooks: list[Any] = []
        self._has_ended = False
        self.result: Any = None

    def __enter__(self) -> None:
        connection = self._connection
        if self._only_reads or connection.vendor != "postgresql" or connection.savepoint_ids:
            return
        if conf.is_citus(connection.settings_dict):
            # The node with the tables commits first: it may have committed what the entry node gave up.
            return
        self._beginnings = _of_psycopg()
        if self._beginnings is not None:
            self._beginnings.watch(connection)
            connection.execute_wrappers.append(self._begin_first)

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        connection = self._connection
        if self._beginnings is not None:
            connection.execute_wrappers.remove(self._begin_first)
            self._mark = self._beginnings.mark_of(connection)
        # When COMMIT fails, Django puts another list in its place.
        self._hooks = connection.run_on_commit
        self._has_ended = kind is None

    def _begin_first(self, execute: Callable[..., Any], *statement: Any) -> Any:
        # A prepared cursor, which has no adapters, begins the transaction in the trip of its statement.
        *_, context = statement
        if hasattr(context["cursor"], "adapters"):
            self._beginnings.begin_with_mark(self._connection)
        return execute(*statement)

    def has_committed(self, lost: OutcomeUnknown) -> bool:
        """Whether a transaction whose COMMIT was ``lost`` is stored. Waits while the server does not know.

        Raises `OutcomeUnknown` with the number of the transaction.
        """
        if not self._has_ended or self._mark is None:
            raise lost
        number, server = self._mark
        parameters = {"number": number, "server": server}
        for pause in patient_pauses():
            try:
                status = self._ask(parameters)
            except NO_ANSWER:
                status = None
            if status in ("committed", "aborted"):
                return status == "committed"
            if status == "another server":
                break
            time.sleep(pause)
        raise OutcomeUnknown(f"xid-{number}") from lost.__cause__

    def finish(self) -> Any:
        """The result, after what waits for the commit was called. Call when it `has_committed`."""
        for _, hook, is_robust in self._hooks:
            transaction.on_commit(hook, using=self._connection.alias, robust=is_robust)
        return self.result

    def _ask(self, parameters: dict[str, str]) -> str | None:
        with mapped_errors(self._connection), self._connection.cursor() as cursor:
            cursor.execute(_STATUS, parameters)
            (status,) = cursor.fetchone()
            if status == "in progress":
                cursor.execute(_END_IF_IDLE, parameters)
        return None if status is None else str(status)


@functools.cache
def _of_psycopg() -> Any:
    """`engine.beginnings`; ``None`` with another driver, with which nothing is watched."""
    try:
        from helix_store.engine import beginnings
    except ImportError:
        return None
    return beginnings


def patient_pauses() -> Iterator[float]:
    """The pauses between looks at a server that gives no answer; they end after a few seconds."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield random.uniform(pause / 2, pause)  # noqa: S311  jitter, no secret
        if time.monotonic() >= deadline:
            return
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
