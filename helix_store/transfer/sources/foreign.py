"""The common base of sources from other stores: one unit per session, and an account of every row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

from helix_store import conf
from helix_store.core import validation
from helix_store.exceptions import HelixStoreError
from helix_store.transfer.records import Counts, Problem, Unit
from helix_store.transfer.sources.readers import Reader
from helix_store.transfer.sources.sessions import ForeignSession, Head, Tally

_NAMES: Final = dict.fromkeys(("schema", "table"), validation.optional_identifier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The place where another store keeps its tables, and the tenant that its sessions get here.

    ``schema`` and ``table`` default to the names of the store. With ``only_whole``, a session with a fault in
    one of its rows is left out; otherwise it is imported without that row. With ``leaves_tables``, rows of
    tables without a counterpart here are counted, but are not a problem.
    """

    dsn: str = field(repr=False)
    tenant: str = ""
    schema: str | None = None
    table: str | None = None
    only_whole: bool = False
    leaves_tables: bool = False


class ForeignSource(ABC):
    """A store of another project, which is read once, inside `reading`: a `Source`.

    ``tally`` contains the rows found so far, the rows left in the source, and the problems.
    """

    kind: ClassVar[str]
    """The other store's word for a session."""
    session_count_query: ClassVar[str]
    sessions_query: ClassVar[str]
    """A query that returns one row for each session, starting with its id."""

    def __init__(self, origin: Origin, reader: Reader) -> None:
        self.tally = Tally()
        self._tenant = validation.tenant(origin.tenant)
        validation.arguments(_NAMES, schema=origin.schema, table=origin.table)
        self._only_whole = origin.only_whole
        self._leaves_tables = origin.leaves_tables
        self._limits = conf.limits()
        self._reader = reader

    @property
    def session_count(self) -> int:
        count: int = self._reader.one(self.session_count_query)[0]
        return count

    def reading(self) -> AbstractContextManager[None]:
        return self._reader.reading()

    def units(self) -> Iterator[Unit]:
        for row in self._reader.rows(self.sessions_query):
            with closing(self._session(row)) as session:
                head = self._read(session, row)
                self.tally.add(session.tally)
                if head is not None:
                    yield Unit(
                        "session", self._tenant, session.id, partial(session.records, head, self._tenant)
                    )

    @abstractmethod
    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Report rows that belong to no session; call it after all units."""

    def _session(self, row: tuple[Any, ...]) -> ForeignSession:
        return ForeignSession(self.kind, row[0])

    @abstractmethod
    def _head(self, session: ForeignSession, row: tuple[Any, ...]) -> Head:
        """Return the session itself. Raises `HelixStoreError` if it cannot be imported."""

    @abstractmethod
    def _read_parts(self, session: ForeignSession) -> None:
        """Read all rows of the session."""

    def _completed(self, head: Head, session: ForeignSession) -> Head:
        """Return the head, completed with data from the rows. Raises `HelixStoreError` as `_head` does."""
        return head

    def _without_table_here(self, *tables: str) -> Iterator[Problem]:
        """Report rows of tables without a counterpart here, unless the origin lets them be left out."""
        for table, count in self._reader.row_counts(*tables).items():
            self.tally.found[table] += count
            if count:
                self.tally.left[table] += count
                if not self._leaves_tables:
                    yield Problem(text=f"{table}: {count} left out, because there is no such table here")

    def _is_empty(self, session: ForeignSession) -> bool:
        """Return whether a session with skipped rows has nothing to import."""
        return False

    def _read(self, session: ForeignSession, row: tuple[Any, ...]) -> Head | None:
        """Read a whole session, or return ``None`` if it is left out."""
        head, reason = None, ""
        try:
            head = self._head(session, row)
        except HelixStoreError as exc:
            reason = str(exc)
        # Errors here are not caught: they come from the source, not from a row.
        self._read_parts(session)
        try:
            head = head and self._completed(head, session)
        except HelixStoreError as exc:
            head, reason = None, str(exc)
        problems = len(session.tally.problems)
        if head is not None and problems and (self._only_whole or self._is_empty(session)):
            head, reason = None, f"problems in its rows: {problems}"
        if head is None:
            session.tally.leave_all(f"{session} is left out: {reason}")
        return head
