"""Prepared statements on PostgreSQL, with a separate cursor class. Planning a small statement costs more than
running it, and psycopg's own cursors take longer to send a statement than the server takes to run it. This
cursor sends text. Inside a transaction, it sends a statement together with its savepoint, and with ``BEGIN``
if the transaction has not begun, in one round trip.

Behind a pooler that picks another server connection for each transaction, a prepared statement may be missing
on the server. The name of a statement is a digest of its text, so a name that already exists refers to the
same statement. A connection on which a statement is missing stops preparing. ``DISABLE_SERVER_SIDE_CURSORS``,
Django's setting for such poolers, switches preparing off.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from struct import Struct
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import psycopg
from django.db import Error, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Connection, DataError, IsolationLevel
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.errors import DuplicatePreparedStatement, error_from_result
from psycopg.generators import execute, fetch_many, send
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.types.string import TextLoader

from helix_store.engine.errors import is_stale_prepared_statement
from helix_store.engine.statement import Mark, PreparedStatement, Statement, has_committed
from helix_store.exceptions import OutcomeUnknown

Rows = list[tuple[Any, ...]]

_SAVE: Final = b"SAVEPOINT helix_store_statement"
_RELEASE: Final = b"RELEASE SAVEPOINT helix_store_statement"
_UNDO: Final = b"ROLLBACK TO SAVEPOINT helix_store_statement; " + _RELEASE
_PLACEHOLDER: Final = re.compile(r"\$(\d+)")
_READ_MARK: Final = (
    b"SELECT pg_catalog.pg_current_xact_id(), pg_catalog.pg_stat_get_bgwriter_stat_reset_time()"
)
_kept: Final[WeakKeyDictionary[Connection[Any], _Kept]] = WeakKeyDictionary()
_unpreparable: Final[WeakSet[Connection[Any]]] = WeakSet()
"""Connections on which a prepared statement was missing."""
_marks: Final[WeakKeyDictionary[Connection[Any], Mark | None]] = WeakKeyDictionary()
"""The number of the open transaction, and the server that assigned it, for each watched connection."""


def fetch_prepared(
    connection: BaseDatabaseWrapper,
    statement: Statement,
    parameters: Mapping[str, Any],
    *,
    in_savepoint: bool,
) -> Rows | None:
    """Run a statement with named placeholders as a prepared one, or return ``None`` if that is not possible.

    ``in_savepoint`` is for an open transaction that must survive a failure of the statement.
    """
    if not _may_prepare(connection):
        return None
    prepared = statement.prepared
    cursor = _PreparedCursor(connection.connection, prepared, in_savepoint=in_savepoint)
    # This is a private method of Django, which checks the thread, logs and wraps as for Django's own cursors.
    wrapped = connection._prepare_cursor(cursor)  # type: ignore[attr-defined]
    try:
        wrapped.execute(prepared.text, _arguments(prepared, parameters))
    except Error as exc:
        if not is_stale_prepared_statement(exc):
            raise
        _unpreparable.add(connection.connection)
        return None
    return cursor.rows


def _may_prepare(connection: BaseDatabaseWrapper) -> bool:
    if connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
        return False
    if getattr(connection.cursor, "__func__", None) is not type(connection).cursor:
        # A `TestCase` that allows no queries has replaced it, or a toolbar that records them.
        return False
    # Django cannot log a statement in a form other than its own if the server binds the parameters.
    is_loggable = not (connection.features.uses_server_side_binding and connection.queries_logged)  # type: ignore[attr-defined]
    return is_loggable and connection.connection not in _unpreparable


@contextmanager
def read_committed(connection: Connection[Any]) -> Iterator[None]:
    """Begin transactions with this isolation level, without another statement. Do not call this in a
    transaction. After a statement has waited for a lock, it must see what others have committed.
    """
    level = connection.isolation_level
    connection.isolation_level = IsolationLevel.READ_COMMITTED
    try:
        yield
    finally:
        if connection.pgconn.transaction_status == TransactionStatus.IDLE:
            connection.isolation_level = level


# --- Parameters ------------------------------------------------------------------------------------


_Argument = str | bytes | None
"""A value as the server reads it: text in the server's text form, bytes in its binary form."""
_Values = Sequence[bytes | None]
_Formats = Sequence[int] | None
"""For each value, whether it is in binary form; ``None`` if none is."""


def _arguments(prepared: PreparedStatement, parameters: Mapping[str, Any]) -> list[_Argument]:
    """Return the values for the server. The server derives the type of an untyped parameter from its position
    in the statement. The driver would derive it from the value, and would prepare a statement for each size
    of integer. Only bytes are sent in binary form: as text, they would be twice as long.
    """
    return [
        value if value is None or type(value) in _AS_THEY_ARE else _WRITERS[type(value)](value)
        for value in map(parameters.__getitem__, prepared.parameters)
    ]


def _list(values: list[Any]) -> str | bytes:
    return _byte_array(values) if values and type(values[0]) is bytes else _text_array(values)


def _text_array(values: list[Any]) -> str:
    return f"{{{','.join(map(_element, values))}}}"


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    text = value if type(value) is str else str(_WRITERS[type(value)](value))
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _byte_array(values: list[bytes]) -> bytes:
    """Return a ``bytea[]`` in binary form: its header, and each element after its length."""
    elements = [part for value in values for part in (_LENGTH.pack(len(value)), value)]
    return b"".join([_ARRAY_HEADER.pack(1, 0, _BYTEA_OID, len(values), 1), *elements])


# The number of dimensions, whether an element may be NULL, and the type of the elements; then the length and
# the first index of the only dimension.
_ARRAY_HEADER: Final = Struct("!5i")
_LENGTH: Final = Struct("!i")
_BYTEA_OID: Final = 17

_AS_THEY_ARE: Final = frozenset({str, bytes})
_WRITERS: Final[dict[type, Callable[[Any], str | bytes]]] = {
    bool: str,
    int: str,
    float: repr,
    datetime: datetime.isoformat,
    list: _list,
}


# --- Results ---------------------------------------------------------------------------------------


class _TimestamptzLoader(Loader):
    """A loader for UTC that is ten times as fast as the driver's own, which applies time zone rules."""

    def load(self, data: Buffer) -> datetime:
        text = bytes(data).decode()
        try:
            if text.startswith(_AFTER_THE_LAST_DAY):
                # Python has no such year, but a time zone east of Greenwich may reach it.
                return _in_utc(text.replace(_AFTER_THE_LAST_DAY, "9999-12-31")) + timedelta(days=1)
            return _in_utc(text)
        except (ValueError, OverflowError):
            raise DataError("can't read a timestamp that is not in ISO format") from None


_AFTER_THE_LAST_DAY: Final = "10000-01-01"


def _in_utc(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is UTC else moment.astimezone(UTC)


_ADAPTERS: Final = AdaptersMap(psycopg.adapters)
_ADAPTERS.register_loader("timestamptz", _TimestamptzLoader)
_ADAPTERS.register_loader("jsonb", TextLoader)


def read_moments(execute: Callable[..., Any], sql: Any, params: Any, many: Any, context: Any) -> Any:
    """Wrap the execution of a statement, so that its cursor reads aware datetimes."""
    # A prepared cursor has no such setting, and always reads aware datetimes.
    if adapters := getattr(context["cursor"], "adapters", None):
        adapters.register_loader("timestamptz", _TimestamptzLoader)
    return execute(sql, params, many, context)


# Here the driver looks up how to read columns. The loaders in use need no connection, and one that they kept
# alive would never leave `_kept`.
_LOADING: Final[Any] = SimpleNamespace(adapters=_ADAPTERS, connection=None)


class _Kept:
    """What is kept for the next statement of a connection."""

    def __init__(self) -> None:
        self.prepared: set[bytes] = set()
        """The names of the statements that were prepared."""
        self._transformer = Transformer(_LOADING)

    def rows_of(self, result: PGresult) -> Rows:
        # A new transformer looks up the loader of each column again, which takes microseconds.
        self._transformer.set_pgresult(result)
        try:
            return self._transformer.load_rows(0, result.ntuples, tuple)
        finally:
            self._transformer.set_pgresult(None)


# --- The cursor ------------------------------------------------------------------------------------


class _PreparedCursor:
    """A cursor that Django wraps like its own, so that Django's wrappers, query log and errors apply."""

    def __init__(
        self, connection: Connection[Any], prepared: PreparedStatement, *, in_savepoint: bool
    ) -> None:
        self._connection = connection
        self._prepared = prepared
        self._in_savepoint = in_savepoint
        self._arguments: Sequence[_Argument] = ()
        self._kept = _kept.get(connection) or _kept.setdefault(connection, _Kept())
        self._known = self._kept.prepared
        self.rows: Rows = []

    @property
    def _query(self) -> _PreparedCursor:
        """Return this cursor, because Django looks for the query to log there."""
        return self

    @property
    def query(self) -> bytes:
        """The statement with its values, as Django's own cursors show it."""
        text = self._prepared.text
        return _PLACEHOLDER.sub(lambda match: _quoted(self._arguments[int(match[1]) - 1]), text).encode()

    def execute(self, sql: str, arguments: Sequence[_Argument]) -> None:
        """Run the statement with each argument in a form of the server's own."""
        if sql != self._prepared.text:
            # A wrapper has changed it, perhaps differently each time, so it is not worth preparing.
            self._prepared, self._known = PreparedStatement(b"", sql, ()), set()
        self._arguments = arguments
        connection = self._connection
        values = [each.encode() if isinstance(each, str) else each for each in arguments]
        formats = [type(each) is bytes for each in arguments] if bytes in map(type, arguments) else None
        with connection.lock:
            result = (self._run_in_savepoint if self._in_savepoint else self._run)(values, formats)
            self.rows = self._kept.rows_of(result)

    def _run(self, values: _Values, formats: _Formats) -> PGresult:
        pgconn, name = self._connection.pgconn, self._prepared.name
        if name not in self._known:
            pgconn.send_prepare(name, self._prepared.text.encode())
            # Another client of the pooler may have prepared the statement; the same name means the same text.
            with suppress(DuplicatePreparedStatement):
                self._received()
            self._known.add(name)
        pgconn.send_query_prepared(name, values, formats)
        return self._received()

    def _run_in_savepoint(self, values: _Values, formats: _Formats) -> PGresult:
        pgconn, name = self._connection.pgconn, self._prepared.name
        must_begin = self._must_begin
        reads_mark = must_begin and self._connection in _marks
        before = must_begin + reads_mark
        must_prepare = name not in self._known
        pgconn.enter_pipeline_mode()
        try:
            if must_begin:
                pgconn.send_query_params(_begin(self._connection), None)
            if reads_mark:
                pgconn.send_query_params(_READ_MARK, None)
            pgconn.send_query_params(_SAVE, None)
            if must_prepare:
                pgconn.send_prepare(name, self._prepared.text.encode())
            pgconn.send_query_prepared(name, values, formats)
            pgconn.send_query_params(_RELEASE, None)
            pgconn.pipeline_sync()
            results = self._connection.wait(_results(pgconn))
        finally:
            if pgconn.status == ConnStatus.OK:
                pgconn.exit_pipeline_mode()
        if reads_mark and results[1].status == ExecStatus.TUPLES_OK:
            _keep_mark(self._connection, results[1])
        if must_prepare and results[before + 1].status == ExecStatus.COMMAND_OK:
            # The name is kept even if the statement fails later, because the prepared statement survives the
            # rollback.
            self._known.add(name)
        for index, result in enumerate(results):
            if result.status == ExecStatus.FATAL_ERROR:
                if index > before:
                    pgconn.send_query(_UNDO)
                    self._received()
                raise error_from_result(result, encoding=self._connection.info.encoding)
        return results[-2]

    @property
    def _must_begin(self) -> bool:
        connection = self._connection
        return not connection.autocommit and connection.pgconn.transaction_status == TransactionStatus.IDLE

    def _received(self) -> PGresult:
        """Return the result of the last command that was sent."""
        result: PGresult = self._connection.wait(execute(self._connection.pgconn))[-1]
        if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            raise error_from_result(result, encoding=self._connection.info.encoding)
        return result


def _quoted(argument: _Argument) -> str:
    if isinstance(argument, bytes):
        return f"'\\x{argument.hex()}'"
    return "NULL" if argument is None else f"""'{argument.replace("'", "''")}'"""


def _results(pgconn: PGconn) -> Generator[Any, Any, list[PGresult]]:
    """Send the commands in the pipeline and return the result of each."""
    yield from send(pgconn)
    results: list[PGresult] = []
    while True:
        (result,) = yield from fetch_many(pgconn)
        if result.status == ExecStatus.PIPELINE_SYNC:
            return results
        results.append(result)


# --- The start of a transaction, with its number in the same round trip ------------------------------


class WatchedTransaction:
    """One attempt of a transaction: a context inside its ``atomic()`` block. It watches nothing if it is part
    of another transaction.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._mark: Mark | None = None
        self._hooks: list[Any] = []
        self._is_outermost = False
        self._has_ended = False
        self.result: Any = None

    def __enter__(self) -> None:
        connection = self._connection
        self._is_outermost = not connection.savepoint_ids
        if self._is_outermost:
            _marks[connection.connection] = None
            connection.execute_wrappers.append(self._begin_first)

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        connection = self._connection
        if self._is_outermost:
            self._stop_wrapping()
            self._mark = _marks.pop(connection.connection, None)
        # When COMMIT fails, Django replaces this list with another.
        self._hooks = connection.run_on_commit
        self._has_ended = kind is None

    def _begin_first(self, execute: Callable[..., Any], *statement: Any) -> Any:
        self._stop_wrapping()
        # A prepared cursor, which has no adapters, sends BEGIN in the round trip of its statement.
        *_, context = statement
        if hasattr(context["cursor"], "adapters"):
            _begin_with_mark(self._connection)
        return execute(*statement)

    def _stop_wrapping(self) -> None:
        """Return the statements after the first one unchanged."""
        if self._begin_first in self._connection.execute_wrappers:
            self._connection.execute_wrappers.remove(self._begin_first)

    def has_committed(self, lost: OutcomeUnknown) -> bool:
        """Return whether the transaction, whose COMMIT was ``lost``, committed: see `engine.statement`."""
        if not self._has_ended or self._mark is None:
            raise lost
        return has_committed(self._connection, self._mark, lost)

    def finish(self) -> Any:
        """Run the hooks that wait for the commit and return the result. Call this if it `has_committed`."""
        for _, hook, is_robust in self._hooks:
            transaction.on_commit(hook, using=self._connection.alias, robust=is_robust)
        return self.result


def _begin_with_mark(connection: BaseDatabaseWrapper) -> None:
    """Begin the transaction now, because the next statement does not do so."""
    psycopg_connection = connection.connection
    pgconn = psycopg_connection.pgconn
    if pgconn.transaction_status != TransactionStatus.IDLE:
        return
    with connection.wrap_database_errors, psycopg_connection.lock:
        pgconn.send_query(_begin(psycopg_connection) + b"; " + _READ_MARK)
        result = psycopg_connection.wait(execute(pgconn))[-1]
        if result.status != ExecStatus.TUPLES_OK:
            raise error_from_result(result, encoding=psycopg_connection.info.encoding)
    _keep_mark(psycopg_connection, result)


def _keep_mark(connection: Connection[Any], result: PGresult) -> None:
    """Keep the result of `_READ_MARK`."""
    number, server = result.get_value(0, 0), result.get_value(0, 1)
    if number is not None and server is not None:
        _marks[connection] = number.decode(), server.decode()


def _begin(connection: Connection[Any]) -> bytes:
    """Return the command by which the driver itself would begin a transaction."""
    words = ["BEGIN"]
    if connection.isolation_level is not None:
        words.append(f"ISOLATION LEVEL {IsolationLevel(connection.isolation_level).name.replace('_', ' ')}")
    if connection.read_only is not None:
        words.append("READ ONLY" if connection.read_only else "READ WRITE")
    if connection.deferrable is not None:
        words.append("DEFERRABLE" if connection.deferrable else "NOT DEFERRABLE")
    return " ".join(words).encode()


# --- Poolers -----------------------------------------------------------------------------------------

_ROUNDS: Final = 6


def loses_prepared_statements(connection: BaseDatabaseWrapper) -> bool:
    """Return whether statements that are prepared on a connection may be missing later.

    To test for a pooler, this opens two more connections with the same settings. Between their statements
    they hold no server session. A pooler that tracks prepared statements renames them and does not lose any.
    """
    if connection.vendor != "postgresql" or not _is_pooled(connection):
        return False
    one, two = _fresh(connection), _fresh(connection)
    try:
        return _share_sessions(one, two) and _keeps_names(one)
    finally:
        one.close()
        two.close()


def _fresh(connection: BaseDatabaseWrapper) -> Any:
    """Return a connection with the same settings that does not come from the pool in this process."""
    fresh = connection.copy()
    fresh.settings_dict["OPTIONS"].pop("pool", None)
    return fresh


def _session(connection: Any) -> int:
    """Return the server process that runs this statement."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_catalog.pg_backend_pid()")
        (pid,) = cursor.fetchone()
    return int(pid)


def _is_pooled(connection: Any) -> bool:
    """Return whether there is a pooler, which makes up a process number when a connection starts."""
    actual = _session(connection)
    info = getattr(connection.connection, "info", None)
    return getattr(info, "backend_pid", actual) != actual


def _share_sessions(one: Any, two: Any) -> bool:
    """Return whether one process serves both open connections, which only happens in transaction mode."""
    of_one: set[int] = set()
    of_two: set[int] = set()
    # The connections take turns of different lengths, because otherwise a round-robin pooler would never
    # repeat a session.
    for turn in range(1, _ROUNDS + 1):
        of_one.update(_session(one) for _ in range(turn))
        of_two.update(_session(two) for _ in range(turn + 1))
        if of_one & of_two:
            return True
    return False


def _keeps_names(connection: Any) -> bool:
    """Return whether the server knows a prepared statement by the name that the client gave it."""
    pgconn = connection.connection.pgconn
    name = f"helix_store_probe_{secrets.token_hex(8)}"
    # This is one transaction, so that all statements reach the same session of the server.
    connection.set_autocommit(False)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            pgconn.prepare(name.encode(), b"SELECT 1")
            cursor.execute("SELECT 1 FROM pg_catalog.pg_prepared_statements WHERE name = %s", [name])
            is_known = cursor.fetchone() is not None
            if is_known:
                # Deallocate it by name, because other clients will use the session.
                cursor.execute(f"DEALLOCATE {name}")
        return is_known
    finally:
        connection.rollback()
