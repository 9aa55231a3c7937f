"""Reader of another store's SQLite file: one moment, read-only, in constant memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from helix_store.transfer.pages import Pace
from helix_store.transfer.sources.postgres import SourceUnreadable

__all__ = ["SqliteReader"]

_Row = tuple[Any, ...]
_MOST_ROWS: Final = 500


class SqliteReader:
    """Reads of one connection, all in one transaction that writes nothing."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._connection: sqlite3.Connection | None = None
        self._pace = Pace(_MOST_ROWS)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Open the file, and show one moment until the end of the block. Raises `SourceUnreadable`."""
        if not self._file.is_file():
            raise SourceUnreadable(f"There is no file {self._file}.")
        with _errors_shown():
            address = f"{self._file.resolve().as_uri()}?mode=ro"
            connection = sqlite3.connect(address, uri=True, isolation_level=None)
        with closing(connection):
            self._connection = connection
            try:
                with _errors_shown():
                    connection.execute("BEGIN")
                yield
            finally:
                self._connection = None

    def rows(self, query: str, *values: Any) -> Iterator[_Row]:
        """Yield the rows of a query, in pages that get shorter for larger rows."""
        with _errors_shown():
            found = self._open.execute(query, values)
        yield from self._pace.rows_of(found, _errors_shown)

    def one(self, query: str, *values: Any) -> _Row:
        """Return the only row of a query."""
        for row in self.rows(query, *values):
            return row
        raise SourceUnreadable

    def row_counts(self, *tables: str) -> dict[str, int]:
        """Return the number of rows of each table; a table that does not exist has none."""
        return {
            table: self.one(f"SELECT count(*) FROM {table}")[0] if self.has_table(table) else 0
            for table in tables
        }

    def has_table(self, name: str) -> bool:
        return bool(self.one("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?", name)[0])

    @property
    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise SourceUnreadable("The source can only be read inside reading().")
        return self._connection


@contextmanager
def _errors_shown() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as exc:
        raise SourceUnreadable(f"The source cannot be read: {exc}.") from exc
