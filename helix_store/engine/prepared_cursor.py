"""A cursor that runs prepared statements on a connection of psycopg, and nothing else.

The driver's own cursors can prepare too, but take longer to hand a small statement over than the server takes
to run it. This one sends text as it is given. Inside a transaction a statement goes out with the savepoint
around it, and with the ``BEGIN`` before it when that is due, in one trip.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from datetime import datetime
from itertools import count
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import psycopg
from psycopg import Connection, DataError, IsolationLevel
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.errors import error_from_result
from psycopg.generators import execute, fetch_many, send
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.types.string import TextLoader

__all__ = ["PreparedCursor"]

_SAVE: Final = b"SAVEPOINT helix_store_statement"
_RELEASE: Final = b"RELEASE SAVEPOINT helix_store_statement"
_UNDO: Final = b"ROLLBACK TO SAVEPOINT helix_store_statement; " + _RELEASE
_PLACEHOLDER: Final = re.compile(r"\$(\d+)")
_numbers: Final = count(1)
_names: Final[WeakKeyDictionary[Connection[Any], dict[str, bytes]]] = WeakKeyDictionary()


class _MomentLoader(Loader):
    """Reads a moment ten times as fast as the driver's own, which goes through the time zone's rules."""

    def load(self, data: Buffer) -> datetime:
        try:
            return datetime.fromisoformat(bytes(data).decode())
        except ValueError:
            raise DataError("can't read a moment that is not in ISO format") from None


_ADAPTERS: Final = AdaptersMap(psycopg.adapters)
_ADAPTERS.register_loader("timestamptz", _MomentLoader)
_ADAPTERS.register_loader("jsonb", TextLoader)


class _Loading(NamedTuple):
    """Where the driver looks up how to read columns."""

    connection: Connection[Any]
    adapters: AdaptersMap = _ADAPTERS


class PreparedCursor:
    """What Django wraps as a cursor of its own, so that wrappers, logging and errors are Django's.

    ``in_savepoint`` says that a statement that fails must leave the transaction as it was.
    """

    def __init__(self, connection: Connection[Any], *, in_savepoint: bool) -> None:
        self._connection = connection
        self._in_savepoint = in_savepoint
        self._sql = ""
        self._arguments: Sequence[str | None] = ()
        self.rows: list[tuple[Any, ...]] = []

    @property
    def _query(self) -> PreparedCursor:
        """Where Django looks for what it logs."""
        return self

    @property
    def query(self) -> bytes:
        """The statement with its values, as Django's own cursors have it."""
        return _PLACEHOLDER.sub(lambda match: _quoted(self._arguments[int(match[1]) - 1]), self._sql).encode()

    def execute(self, sql: str, arguments: Sequence[str | None]) -> None:
        """Run a statement with ``$1``, ``$2``…, each argument in the server's own text form."""
        self._sql, self._arguments = sql, arguments
        connection = self._connection
        values = [None if argument is None else argument.encode() for argument in arguments]
        with connection.lock:
            result = self._run_in_savepoint(sql, values) if self._in_savepoint else self._run(sql, values)
        transformer = Transformer(_Loading(connection))
        transformer.set_pgresult(result)
        self.rows = transformer.load_rows(0, result.ntuples, tuple)

    def _run(self, sql: str, values: list[bytes | None]) -> PGresult:
        pgconn = self._connection.pgconn
        if self._must_begin:
            pgconn.send_query(_begin(self._connection))
            self._received()
        names = _names.setdefault(self._connection, {})
        name = names.get(sql)
        if name is None:
            name = _new_name()
            pgconn.send_prepare(name, sql.encode())
            self._received()
            names[sql] = name
        pgconn.send_query_prepared(name, values)
        return self._received()

    def _run_in_savepoint(self, sql: str, values: list[bytes | None]) -> PGresult:
        pgconn = self._connection.pgconn
        names = _names.setdefault(self._connection, {})
        name = names.get(sql)
        must_begin = self._must_begin
        pgconn.enter_pipeline_mode()
        try:
            if must_begin:
                pgconn.send_query_params(_begin(self._connection), None)
            pgconn.send_query_params(_SAVE, None)
            if name is None:
                name = _new_name()
                pgconn.send_prepare(name, sql.encode())
            pgconn.send_query_prepared(name, values)
            pgconn.send_query_params(_RELEASE, None)
            pgconn.pipeline_sync()
            results = self._connection.wait(_results(pgconn))
        finally:
            if pgconn.status == ConnStatus.OK:
                pgconn.exit_pipeline_mode()
        for index, result in enumerate(results):
            if result.status == ExecStatus.FATAL_ERROR:
                if index > must_begin:
                    pgconn.send_query(_UNDO)
                    self._received()
                raise error_from_result(result, encoding=self._connection.info.encoding)
        names[sql] = name
        return results[-2]

    @property
    def _must_begin(self) -> bool:
        connection = self._connection
        return not connection.autocommit and connection.pgconn.transaction_status == TransactionStatus.IDLE

    def _received(self) -> PGresult:
        """The result of what was sent last."""
        result: PGresult = self._connection.wait(execute(self._connection.pgconn))[-1]
        if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            raise error_from_result(result, encoding=self._connection.info.encoding)
        return result


def _quoted(argument: str | None) -> str:
    return "NULL" if argument is None else "'" + argument.replace("'", "''") + "'"


def _new_name() -> bytes:
    # Never used before: a statement may outlive our knowledge of it.
    return b"helix_store_%d" % next(_numbers)


def _results(pgconn: PGconn) -> Generator[Any, Any, list[PGresult]]:
    """Send what is waiting in the pipeline and return the result of each command."""
    yield from send(pgconn)
    results: list[PGresult] = []
    while True:
        (result,) = yield from fetch_many(pgconn)
        if result.status == ExecStatus.PIPELINE_SYNC:
            return results
        results.append(result)


def _begin(connection: Connection[Any]) -> bytes:
    """The command by which the driver itself would begin a transaction."""
    words = ["BEGIN"]
    if connection.isolation_level is not None:
        words.append(f"ISOLATION LEVEL {IsolationLevel(connection.isolation_level).name.replace('_', ' ')}")
    if connection.read_only is not None:
        words.append("READ ONLY" if connection.read_only else "READ WRITE")
    if connection.deferrable is not None:
        words.append("DEFERRABLE" if connection.deferrable else "NOT DEFERRABLE")
    return " ".join(words).encode()
