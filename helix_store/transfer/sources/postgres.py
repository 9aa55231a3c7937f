"""Reader of another store's PostgreSQL database: one moment, read-only, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from helix_store.exceptions import HelixStoreError
from helix_store.transfer.pages import Pace

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composed

__all__ = ["PostgresReader", "SourceUnreadable"]

_Row = tuple[Any, ...]

_MOST_ROWS: Final = 500
# The target's transactions take time between two reads.
_FOR_THIS_TRANSACTION: Final = {
    "idle_in_transaction_session_timeout": "0",
    "statement_timeout": "0",
    "timezone": "UTC",
    "datestyle": "ISO",
    # A policy that hides rows is an error, as in pg_dump.
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
"""The parts of a driver's message that may be shown: the rest may contain part of a mistyped password."""


class SourceUnreadable(HelixStoreError):
    """The database of the other store cannot be read."""

    code = "source_unreadable"


class PostgresReader:
    """Reads of one connection, all in one read-only transaction with ``REPEATABLE READ``.

    ``names`` are the tables that a query names in braces; each is a schema and a table. With ``schema``, all
    other tables are looked up there. The address never appears in a message.
    """

    def __init__(
        self, dsn: str, *, names: Mapping[str, tuple[str, str]] | None = None, schema: str | None = None
    ) -> None:
        self._dsn = dsn
        self._names = names or {}
        self._schema = schema
        self._connection: Connection[_Row] | None = None
        self._pace = Pace(_MOST_ROWS)
        self._numbers = count(1)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Connect, and show one moment until the end of the block. Raises `SourceUnreadable`."""
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
        """Yield a query's rows from a server-side cursor, in pages that get shorter for larger rows."""
        with self._open.cursor(f"helix_import_{next(self._numbers)}") as cursor:
            with _errors_shown():
                cursor.execute(self._composed(query), values)
            yield from self._pace.rows_of(cursor, _errors_shown)

    def one(self, query: str, *values: Any) -> _Row:
        """Return the only row of a query."""
        with _errors_shown():
            row = self._open.execute(self._composed(query), values).fetchone()
        if row is None:
            raise SourceUnreadable
        return row

    def row_counts(self, *tables: str) -> dict[str, int]:
        """Return the number of rows of each table; a table that does not exist has none."""
        counts = {}
        for table in tables:
            is_there = self.one("SELECT pg_catalog.to_regclass(%s) IS NOT NULL", table)[0]
            counts[table] = self.one(f"SELECT count(*) FROM {table}")[0] if is_there else 0
        return counts

    @property
    def _open(self) -> Connection[_Row]:
        if self._connection is None:
            raise SourceUnreadable("The source can only be read inside reading().")
        return self._connection

    def _composed(self, query: str) -> Composed:
        from psycopg.sql import SQL, Identifier

        # The driver looks for placeholders even in a quoted name.
        names = {
            name: Identifier(*(part.replace("%", "%%") for part in parts))
            for name, parts in self._names.items()
        }
        return SQL(query).format(**names)


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
def _errors_shown() -> Iterator[None]:
    """Turn errors of the driver into `SourceUnreadable` with only the server's first line."""
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
