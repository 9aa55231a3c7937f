"""Transactions whose COMMIT may get no reply, and the search for their outcome. On PostgreSQL each
transaction of the store reads its number when it begins, in the same round trip as ``BEGIN``. If the reply to
COMMIT is lost, another connection asks the server for the outcome of that number. A server that has crashed,
or a promoted standby, may assign the number a second time. So the transaction also reads the time of the last
statistics reset, which changes in both cases.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

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
# A vanished client sends no COMMIT. The server may notice only hours later, and keeps the locks until then.
_END_IF_IDLE: Final = """
    SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity
    WHERE backend_xid = %(number)s::xid8::xid AND state LIKE 'idle in transaction%%'"""


class WatchedTransaction:
    """One attempt of a transaction, a context inside its ``atomic()`` block. It watches nothing if it is part
    of another transaction.
    """

    def __init__(self, connection: BaseDatabaseWrapper, driver: Any) -> None:
        """``driver`` is `engine.postgres`."""
        self._connection = connection
        self._driver = driver
        self._mark: tuple[str, str] | None = None
        self._hooks: list[Any] = []
        self._has_ended = False
        self.result: Any = None

    def __enter__(self) -> None:
        if self._connection.savepoint_ids:
            self._driver = None
        if self._driver is not None:
            self._driver.watch(self._connection)
            self._connection.execute_wrappers.append(self._begin_first)

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        connection = self._connection
        if self._driver is not None:
            self._stop_wrapping()
            self._mark = self._driver.mark_of(connection)
        # When COMMIT fails, Django puts another list in its place.
        self._hooks = connection.run_on_commit
        self._has_ended = kind is None

    def _begin_first(self, execute: Callable[..., Any], *statement: Any) -> Any:
        self._stop_wrapping()
        # A prepared cursor, which has no adapters, begins the transaction in the round trip of its statement.
        *_, context = statement
        if hasattr(context["cursor"], "adapters"):
            self._driver.begin_with_mark(self._connection)
        return execute(*statement)

    def _stop_wrapping(self) -> None:
        """Leave the statements after the first one unchanged."""
        if self._begin_first in self._connection.execute_wrappers:
            self._connection.execute_wrappers.remove(self._begin_first)

    def has_committed(self, lost: OutcomeUnknown) -> bool:
        """Return whether a transaction was committed although the reply to its COMMIT was ``lost``. Wait
        while the server does not know the outcome. Raises `OutcomeUnknown` with the number of the
        transaction.
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
        """Run the hooks that wait for the commit and return the result. Call this if it `has_committed`."""
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


def patient_pauses() -> Iterator[float]:
    """Yield the pauses between attempts to reach a server that does not answer, for a few seconds."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield random.uniform(pause / 2, pause)  # noqa: S311  jitter, no secret
        if time.monotonic() >= deadline:
            return
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
