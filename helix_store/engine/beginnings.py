"""The beginning of a transaction on psycopg, and the number of the transaction in the same trip."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Connection, IsolationLevel
from psycopg.errors import error_from_result
from psycopg.generators import execute
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

__all__ = ["READ_MARK", "begin", "begin_with_mark", "is_watched", "keep_mark", "mark_of", "watch"]

Mark = tuple[str, str]

READ_MARK: Final = (
    b"SELECT pg_catalog.pg_current_xact_id(), pg_catalog.pg_stat_get_bgwriter_stat_reset_time()"
)

_marks: Final[WeakKeyDictionary[Connection[Any], Mark | None]] = WeakKeyDictionary()
"""The number of the open transaction and the server that gave it out, for connections that are watched."""


def watch(connection: BaseDatabaseWrapper) -> None:
    """Read the mark of the transaction that begins next on this connection."""
    _marks[connection.connection] = None


def begin_with_mark(connection: BaseDatabaseWrapper) -> None:
    """Begin the transaction now, for a statement that does not do so."""
    psycopg_connection = connection.connection
    pgconn = psycopg_connection.pgconn
    if pgconn.transaction_status != TransactionStatus.IDLE:
        return
    with connection.wrap_database_errors, psycopg_connection.lock:
        pgconn.send_query(begin(psycopg_connection) + b"; " + READ_MARK)
        result = psycopg_connection.wait(execute(pgconn))[-1]
        if result.status != ExecStatus.TUPLES_OK:
            raise error_from_result(result, encoding=psycopg_connection.info.encoding)
    keep_mark(psycopg_connection, result)


def is_watched(connection: Connection[Any]) -> bool:
    return connection in _marks


def keep_mark(connection: Connection[Any], result: PGresult) -> None:
    """Keep the result of `READ_MARK`."""
    number, server = result.get_value(0, 0), result.get_value(0, 1)
    if number is not None and server is not None:
        _marks[connection] = number.decode(), server.decode()


def mark_of(connection: BaseDatabaseWrapper) -> Mark | None:
    """The mark of the open transaction, which is not watched from here on."""
    return _marks.pop(connection.connection, None)


def begin(connection: Connection[Any]) -> bytes:
    """The command by which the driver itself would begin a transaction."""
    words = ["BEGIN"]
    if connection.isolation_level is not None:
        words.append(f"ISOLATION LEVEL {IsolationLevel(connection.isolation_level).name.replace('_', ' ')}")
    if connection.read_only is not None:
        words.append("READ ONLY" if connection.read_only else "READ WRITE")
    if connection.deferrable is not None:
        words.append("DEFERRABLE" if connection.deferrable else "NOT DEFERRABLE")
    return " ".join(words).encode()
