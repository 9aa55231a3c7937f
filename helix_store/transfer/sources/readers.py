"""Readers of another store's database, which show a single moment, are read-only and use constant memory."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from helix_store.engine.paging import Pace
from helix_store.exceptions import HelixStoreError

if TYPE_CHECKING:
    from psycopg import Connection

_Row = tuple[Any, ...]

_MOST_ROWS: Final = 500
# The target's transactions take time between two reads.
_FOR_THIS_TRANSACTION: Final = {
    "idle_in_transaction_session_timeout": "0",
    "statement_timeout": "0",
    "timezone": "UTC",
    "datestyle": "ISO",
    # A policy that would hide rows raises an error, as in pg_dump.
    "row_security": "off",
}
_SET: Final = "SELECT pg_catalog.set_config(%s, %s, true)"

_KNOWN_REASONS: Final = (
    "Connection refused",
    "No such file or directory",
    "timeout expired",
    "failed to resolve host",
    "could not translate host name",
    "definition of service",
    "password authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "does not exist",
    "too many clients",
    "certificate verify failed",
    "server does not support SSL",
)
"""The parts of a driver's message that may be shown; other parts may contain part of a mistyped password."""


class SourceUnreadable(HelixStoreError):
    """The database of the other store cannot be read."""

    code = "source_unreadable"


class Reader(ABC):
    """Reads on one connection, all in one transaction that writes nothing."""

    def __init__(self) -> None:
        self._connection: Any = None
        self._pace = Pace(_MOST_ROWS)

    @abstractmethod
    def reading(self) -> AbstractContextManager[None]:
        """Connect, and show a single moment until the end of the block. Raises `SourceUnreadable`."""

    @abstractmethod
    def rows(self, query: str, *values: Any) -> Iterator[_Row]:
        """Yield the rows of a query, in pages that get shorter if the rows are larger."""

    @abstractmethod
    def one(self, query: str, *values: Any) -> _Row:
        """Return the only row of a query."""

    @abstractmethod
    def has_table(self, name: str) -> bool: ...

    def row_counts(self, *tables: str) -> dict[str, int]:
        """Return the number of rows of each table; a table that does not exist has none."""
        return {
            table: self.one(f"SELECT count(*) FROM {table}")[0] if self.has_table(table) else 0
            for table in tables
        }

    def _pages_of(self, cursor: Any, reading: Callable[[], AbstractContextManager[None]]) -> Iterator[_Row]:
        """Yield the rows of a cursor in pages, each fetched in a ``reading`` block."""
        is_all = False
        while not is_all:
            size = self._pace.rows
            with reading():
                page = cursor.fetchmany(size)
            self._pace.measure(page)
            yield from page
            is_all = len(page) < size

    @property
    def _open(self) -> Any:
        if self._connection is None:
            raise SourceUnreadable("The source can only be read inside reading().")
        return self._connection


class PostgresReader(Reader):
    """A reader of a PostgreSQL database, with ``REPEATABLE READ`` and server-side cursors.

    With ``schema``, all tables are looked up there. ``table`` is the one that a query names ``{table}``. The
    address never appears in a message.
    """

    def __init__(self, dsn: str, *, schema: str | None = None, table: str = "") -> None:
        super().__init__()
        self._dsn = dsn
        self._schema = schema
        # The driver looks for placeholders even inside a quoted name.
        self._table = '"{}"'.format(table.replace('"', '""').replace("%", "%%"))
        self._numbers = count(1)

    @contextmanager
    def reading(self) -> Iterator[None]:
        connection = self._connection = _connected(self._dsn)
        try:
            for name, value in _FOR_THIS_TRANSACTION.items():
                self.one(_SET, name, value)
            if self._schema is not None:
                self.one("SELECT pg_catalog.set_config('search_path', quote_ident(%s), true)", self._schema)
            yield
        finally:
            self._connection = None
            connection.close()

    def rows(self, query: str, *values: Any) -> Iterator[_Row]:
        with self._open.cursor(f"helix_import_{next(self._numbers)}") as cursor:
            with _postgres_errors_shown():
                cursor.execute(query.replace("{table}", self._table), values)
            yield from self._pages_of(cursor, _postgres_errors_shown)

    def one(self, query: str, *values: Any) -> _Row:
        with _postgres_errors_shown():
            row: _Row | None = self._open.execute(query.replace("{table}", self._table), values).fetchone()
        if row is None:
            raise SourceUnreadable
        return row

    def has_table(self, name: str) -> bool:
        return bool(self.one("SELECT pg_catalog.to_regclass(%s) IS NOT NULL", name)[0])


def _connected(dsn: str) -> Connection[_Row]:
    """Return a connection outside a transaction. Raises `SourceUnreadable`, which hides the address."""
    try:
        import psycopg
    except ImportError:
        raise SourceUnreadable(
            "The source is read by psycopg, which is not installed: pip install 'helix-store[postgres]'."
        ) from None
    reason = None
    try:
        connection = psycopg.connect(
            dsn, client_encoding="utf8", fallback_application_name="helix_import", prepare_threshold=None
        )
    except (psycopg.ProgrammingError, ValueError):
        reason = "The address of the source is not a connection string of PostgreSQL."
    except psycopg.Error as exc:
        known = [text for text in _KNOWN_REASONS if text in str(exc)]
        reason = f"The source cannot be reached ({known[0] if known else type(exc).__name__})."
    # Raise outside the handler: the driver's error may contain the address and would become the context.
    if reason is not None:
        raise SourceUnreadable(f"{reason} For details, run psql with the same address.")
    connection.read_only = True
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    return connection


@contextmanager
def _postgres_errors_shown() -> Iterator[None]:
    """Turn errors of the driver into `SourceUnreadable`, with only the first line from the server."""
    import psycopg

    text = None
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as exc:
        text = exc.diag.message_primary or "the connection was lost"
    except psycopg.Error as exc:
        text = exc.diag.message_primary or "the driver cannot read a value"
    if text is not None:
        raise SourceUnreadable(f"The source cannot be read: {text}.")


class SqliteReader(Reader):
    """A reader of an SQLite file."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = Path(file)

    @contextmanager
    def reading(self) -> Iterator[None]:
        if not self._file.is_file():
            raise SourceUnreadable(f"There is no file {self._file}.")
        with _sqlite_errors_shown():
            address = f"{self._file.resolve().as_uri()}?mode=ro"
            connection = sqlite3.connect(address, uri=True, isolation_level=None)
        with closing(connection):
            self._connection = connection
            try:
                with _sqlite_errors_shown():
                    connection.execute("BEGIN")
                yield
            finally:
                self._connection = None

    def rows(self, query: str, *values: Any) -> Iterator[_Row]:
        with _sqlite_errors_shown():
            found = self._open.execute(query, values)
        yield from self._pages_of(found, _sqlite_errors_shown)

    def one(self, query: str, *values: Any) -> _Row:
        for row in self.rows(query, *values):
            return row
        raise SourceUnreadable

    def has_table(self, name: str) -> bool:
        return bool(self.one("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?", name)[0])


@contextmanager
def _sqlite_errors_shown() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as exc:
        raise SourceUnreadable(f"The source cannot be read: {exc}.") from exc
