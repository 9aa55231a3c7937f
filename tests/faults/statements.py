"""A fault at the Nth statement of a call, made by the server or the connection itself where that can be.

Every statement of the app passes a cursor of Django, also a prepared one, so a wrapper sees them all. COMMIT
is none of them: Django asks the driver for it, by ``_commit`` of its connection, and so does this module.
"""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.exceptions import HelixStoreError, StoreBusy, StoreFull, StoreTimeout, StoreUnavailable

__all__ = ["CONTROL", "Fault", "Faults", "Kind", "Point", "faults"]

CONTROL: Final = ("BEGIN", "SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK", "SET TRANSACTION")

_SQLSTATES: Final = {"deadlock": "40P01", "timeout": "57014", "full": "53100"}
_RAISE: Final = "DO $helix$ BEGIN RAISE EXCEPTION 'planted' USING ERRCODE = '{}'; END $helix$"
_SQLITE_NAMES: Final = {
    "lost": "SQLITE_IOERR",
    "deadlock": "SQLITE_BUSY",
    "timeout": "SQLITE_INTERRUPT",
    "full": "SQLITE_FULL",
}


class Kind(StrEnum):
    """What happens: the connection breaks, or the database answers with an error."""

    LOST = "lost"
    DEADLOCK = "deadlock"
    TIMEOUT = "timeout"
    FULL = "full"

    @property
    def error(self) -> type[HelixStoreError]:
        """What a call raises for it when nothing was written."""
        return _ERRORS[self]


_ERRORS: Final = {
    Kind.LOST: StoreUnavailable,
    Kind.DEADLOCK: StoreBusy,
    Kind.TIMEOUT: StoreTimeout,
    Kind.FULL: StoreFull,
}


@dataclass(frozen=True)
class Fault:
    """``after``: the statement has done its work. Only a broken connection then leaves it committed."""

    nth: int
    kind: Kind
    after: bool

    def __str__(self) -> str:
        return f"{self.kind} {'after' if self.after else 'before'} statement {self.nth}"


@dataclass(frozen=True)
class Point:
    """A statement that was sent."""

    sql: str
    is_commit: bool
    in_transaction: bool

    @property
    def may_commit(self) -> bool:
        """Whether a write may be stored when this has run."""
        return self.is_commit or not (self.in_transaction or self.sql.startswith(CONTROL))


Execute = Callable[..., Any]


@dataclass
class Faults:
    """Counts the statements of a connection, and makes one of them fail."""

    connection: BaseDatabaseWrapper
    fault: Fault | None
    on_commit: Callable[[], None]
    points: list[Point] = field(default_factory=list)
    hit: Point | None = None

    def statement(self, execute: Execute, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        connection = self.connection
        in_transaction = connection.in_atomic_block or not connection.autocommit
        point = Point(str(sql), is_commit=False, in_transaction=in_transaction)

        def run() -> Any:
            return execute(sql, params, many, context)

        if not self._is_due(point):
            result = run()
            if point.may_commit:
                self.on_commit()
            return result
        return _Failing(connection, context["cursor"], execute, many, context).fail(self._due, point, run)

    def commit(self, commit: Callable[[], None]) -> None:
        if not self._is_due(Point("COMMIT", is_commit=True, in_transaction=True)):
            commit()
            self.on_commit()
            return
        _fail_commit(self.connection, self._due, commit)

    @property
    def _due(self) -> Fault:
        assert self.fault is not None
        return self.fault

    def _is_due(self, point: Point) -> bool:
        self.points.append(point)
        if self.fault is None or len(self.points) != self.fault.nth:
            return False
        self.hit = point
        return True


@contextmanager
def faults(
    connection: BaseDatabaseWrapper, fault: Fault | None, on_commit: Callable[[], None] = lambda: None
) -> Iterator[Faults]:
    """Inside, the fault is met once. ``on_commit`` is called whenever something may have been committed."""
    made = Faults(connection, fault, on_commit)
    private: Any = connection
    commit = connection._commit  # type: ignore[attr-defined]  # of Django, which sends COMMIT with it
    private._commit = lambda: made.commit(commit)
    try:
        with connection.execute_wrapper(made.statement):
            yield made
    finally:
        del private._commit


# --- A statement -----------------------------------------------------------------------------------


@dataclass
class _Failing:
    connection: BaseDatabaseWrapper
    cursor: Any
    execute: Execute
    many: bool
    context: dict[str, Any]

    def fail(self, fault: Fault, point: Point, run: Callable[[], Any]) -> Any:
        if self.connection.vendor == "sqlite":
            return self._on_sqlite(fault, point, run)
        if fault.kind is Kind.LOST:
            return self._lost(fault, run)
        broken = _RAISE.format(_SQLSTATES[fault.kind])
        if not fault.after:
            return self._send(broken)
        return self._after(broken, point, run)

    def _send(self, sql: str) -> Any:
        """Another text on the same way: the error is the server's, and a savepoint is undone as always."""
        if isinstance(getattr(self.cursor, "cursor", None), psycopg.ServerCursor):
            # A cursor on the server takes a query alone.
            with self.connection.wrap_database_errors:
                return self.connection.connection.execute(sql)
        return self.execute(sql, None if self._is_plain else [], self.many, self.context)

    @property
    def _is_plain(self) -> bool:
        return hasattr(self.cursor, "fetchall")

    def _lost(self, fault: Fault, run: Callable[[], Any]) -> Any:
        result = run() if fault.after else None
        _break(self.connection)
        self._send("SELECT 1")
        return result

    def _after(self, broken: str, point: Point, run: Callable[[], Any]) -> Any:
        """The work of a statement that fails at its end is undone by the server."""
        raw = self.connection.connection.pgconn
        is_alone = not point.in_transaction
        has_savepoint = not (is_alone or self._is_plain)
        if is_alone:
            raw.exec_(b"BEGIN")
        elif has_savepoint:
            self.connection.connection.execute("SAVEPOINT planted")
        try:
            run()
            self._send(broken)
        finally:
            if is_alone:
                raw.exec_(b"ROLLBACK")
            elif has_savepoint:
                raw.exec_(b"ROLLBACK TO SAVEPOINT planted")

    def _on_sqlite(self, fault: Fault, point: Point, run: Callable[[], Any]) -> None:
        connection = self.connection.connection
        is_open = connection.in_transaction
        # A BEGIN that failed has begun nothing.
        is_done = fault.after and not point.sql.startswith(CONTROL)
        if is_done and (fault.kind is Kind.LOST or is_open):
            run()
            # A statement that still has rows to return keeps the lock.
            self.cursor.fetchall()
        if fault.kind is not Kind.DEADLOCK and is_open:
            # SQLite may roll back the whole transaction for the others.
            connection.rollback()
        _raise_sqlite(self.connection, fault.kind)


def _raise_sqlite(connection: BaseDatabaseWrapper, kind: Kind) -> None:
    error = sqlite3.OperationalError(f"planted {kind}")
    error.sqlite_errorname = _SQLITE_NAMES[kind]
    with connection.wrap_database_errors:
        raise error


def _break(connection: BaseDatabaseWrapper) -> None:
    """Shut the socket: the server finds the end of its input, and the driver that of the connection."""
    with socket.socket(fileno=_duplicate(connection.connection.pgconn.socket)) as end:
        end.shutdown(socket.SHUT_RDWR)


def _duplicate(number: int) -> int:
    return os.dup(number)


# --- COMMIT ----------------------------------------------------------------------------------------


def _fail_commit(connection: BaseDatabaseWrapper, fault: Fault, commit: Callable[[], None]) -> None:
    if fault.after and fault.kind is Kind.LOST:
        commit()
    if connection.vendor == "sqlite":
        _raise_sqlite(connection, fault.kind)
    if fault.kind is Kind.LOST:
        _break(connection)
        broken = "SELECT 1"
    else:
        broken = _RAISE.format(_SQLSTATES[fault.kind])
    with connection.wrap_database_errors:
        connection.connection.execute(broken)
