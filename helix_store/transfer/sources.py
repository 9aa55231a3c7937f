"""Other stores that can be imported: reading their databases, and their formats.

JSON with the tags of obsku's serializer, read as the types that typed JSON writes.

An object with a ``value`` and a ``__type`` of ``Date``, ``Map``, ``Set`` or ``Buffer`` is a ``datetime``, a
``dict``, a ``set`` or ``bytes``. An object with any other string as ``__type`` is an ordinary object.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import re
import sqlite3
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from django.db.models import Model

from helix_store import conf
from helix_store.adapters import session_id_for
from helix_store.catalogue import declared, tables
from helix_store.checkpointers.graph.types import (
    encode_checkpoint,
    encode_message,
    encode_metadata,
    new_session,
)
from helix_store.checkpointers.snapshots import encode_snapshot, new_thread
from helix_store.core import validation
from helix_store.core.payloads import join_path, size_of
from helix_store.core.typed_json import MAX_EQUAL_HASHES
from helix_store.core.types import CheckpointSource
from helix_store.core.validation import milliseconds_to_datetime
from helix_store.engine.expressions import Pace
from helix_store.exceptions import HelixStoreError, InvalidPayload, InvalidQuery, shown_id
from helix_store.models import Checkpoint, CheckpointKind, Message, Session
from helix_store.sessions.state import NewSession
from helix_store.transfer.records import Counts, Problem, Record, Unit, format_of, line_of, lines_from, spool

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["SOURCES", "ForeignSource", "Origin", "SourceUnreadable", "Tally", "register_source"]


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
        self._numbers = itertools.count(1)

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
        # Text that is not in UTF-8 is a fault of its row. The driver would refuse to read on.
        connection.text_factory = _text_or_bytes
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


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


@contextmanager
def _sqlite_errors_shown() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as exc:
        raise SourceUnreadable(f"The source cannot be read: {exc}.") from exc


_FIRST_VERSION: Final = 1


class Head(NamedTuple):
    """A session to create here, with the times of its creation and of its last write."""

    new: NewSession
    created_at: datetime
    updated_at: datetime


@dataclass(slots=True)
class Tally:
    """Counts of rows by table name: ``found`` in the source, and the part of them that was ``left`` there.

    ``problems`` lists each row that is left out, and each row that is imported with a change.
    """

    found: Counts = field(default_factory=Counter)
    left: Counts = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)

    def leave(self, table: str, row: str, reason: object) -> None:
        """Leave one row in the source."""
        self.left[table] += 1
        self.report(f"{row} is left out: {reason}")

    def leave_all(self, text: str) -> None:
        """Leave all rows that were found."""
        self.left = Counter(self.found)
        self.report(text)

    def report(self, text: str) -> None:
        self.problems.append(Problem(text=text))

    def add(self, part: Tally) -> None:
        self.found.update(part.found)
        self.left.update(part.left)
        self.problems.extend(part.problems)

    def compare(self, stored: Mapping[str, int]) -> Iterator[Problem]:
        """Yield the tables whose number of rows differs from the number found."""
        for table, count in stored.items():
            more = count - self.found[table]
            self.found[table] = count
            if more:
                self.left[table] += more
                yield Problem(text=f"{table}: {more} left out, which belong to no session")


class ForeignSession:
    """The data that has been read of one session so far. Close it after its last record.

    ``source_id`` is its id in the other store, if it has a different ``session_id`` here.
    """

    def __init__(self, kind: str, source_id: str, session_id: str | None = None) -> None:
        self.source_id = source_id
        self.id = source_id if session_id is None else session_id
        self.tally = Tally()
        self.message_count = 0
        self.checkpoint_count = 0
        self._name = f"{kind} {shown_id(source_id)}"
        self._spools: defaultdict[str, IO[bytes]] = defaultdict(spool)

    def __str__(self) -> str:
        return self._name

    def close(self) -> None:
        for file in self._spools.values():
            file.close()

    def take(self, table: str, row: tuple[Any, ...], add: Callable[[str, tuple[Any, ...]], None]) -> None:
        """Add a row by its name, or leave it in the source. The first column of the row is its id."""
        self.tally.found[table] += 1
        name = f"{table.removesuffix('s')} {shown_id(row[0])} of {self}"
        try:
            add(name, row)
        except HelixStoreError as exc:
            self.tally.leave(table, name, exc)

    def add_checkpoint(self, **columns: Any) -> None:
        self.add(Checkpoint(**columns))
        self.checkpoint_count += 1

    def add_message(self, **columns: Any) -> None:
        self.message_count += 1
        self.add(Message(sequence=self.message_count, **columns))

    def add(self, row: Model) -> None:
        """Add a row, in the order in which an export lists the rows of its table."""
        table = declared(type(row))
        self._spools[table.record].write(line_of(format_of(table).record_from(row)))

    def records(self, head: Head, tenant: str) -> Iterator[Record]:
        """Yield all records of the session, in the order of an export."""
        yield from _head_records(head, tenant, message_count=self.message_count)
        for table in tables("session"):
            if table.record in self._spools:
                yield from map(json.loads, lines_from(self._spools[table.record]))


def session_of(kind: str, source_id: str, *parts: str) -> ForeignSession:
    """Return a session of a framework with the id that `session_id_for` returns, if it can have one.

    ``parts`` are the parts of the id, by default the id in the other store.
    """
    try:
        return ForeignSession(kind, source_id, session_id_for(*(parts or (source_id,))))
    except HelixStoreError:
        return ForeignSession(kind, source_id)


def _head_records(head: Head, tenant: str, *, message_count: int) -> list[Record]:
    """Return the session and its state, in the form in which a state store creates them."""
    new = head.new
    columns = {**new.encoded.columns, "root_session_id": new.session_id, "message_count": message_count}
    session = Session(
        tenant=tenant,
        session_id=new.session_id,
        version=_FIRST_VERSION,
        created_at=head.created_at,
        updated_at=head.updated_at,
        **columns,
    )
    state = Checkpoint(
        kind=CheckpointKind.STATE.value,
        version=_FIRST_VERSION,
        source=CheckpointSource.INPUT.value,
        payload=new.encoded.payload,
        envelope=new.encoded.envelope,
        size_bytes=size_of(new.encoded.payload, new.encoded.envelope),
        created_at=head.created_at,
    )
    current = (state.kind, state.namespace, state.version)
    return [
        format_of(declared(Session)).record_from(session, current),
        format_of(declared(Checkpoint)).record_from(state),
    ]


def moment(milliseconds: Any, path: str) -> datetime:
    """Return the time of epoch milliseconds. Raises `InvalidPayload`."""
    try:
        return milliseconds_to_datetime(milliseconds)
    except (OverflowError, TypeError):
        raise InvalidPayload(path=path, reason="it is not a time between the years 1 and 9999") from None


def parsed(text: Any, path: str) -> Any:
    """Return the value of a JSON document. Raises `InvalidPayload`, without the document."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        pass
    raise InvalidPayload(path=path, reason="it is not readable JSON")


def iso_moment(text: Any, path: str) -> datetime:
    """Return the time in ISO 8601 text, which is in UTC if it has no offset. Raises `InvalidPayload`."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise InvalidPayload(path=path, reason="it is not a time") from None


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


_TYPE: Final = "__type"
_VALUE: Final = "value"
# A date without a time means midnight UTC, as in JavaScript. A time without a zone would depend on the time
# zone of the reader.
_DATE: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?(Z|[+-][0-9]{2}:[0-9]{2}))?"
)


def revive(text: str, path: str, remarks: list[str]) -> Any:
    """Return the value of JSON text. Raises `InvalidPayload` with a JSON pointer that begins with ``path``.

    A set or map that Python cannot represent becomes a list, and a remark is added.
    """
    try:
        return _value(json.loads(text, parse_constant=_refuse_constant), path, remarks)
    except (ValueError, RecursionError):
        pass
    # This is raised outside the handler: the error of a parser holds the text and would become its context.
    raise InvalidPayload(path=path, reason="it is not JSON, or nested too deeply")


def _value(tree: Any, path: str, remarks: list[str]) -> Any:
    if type(tree) is list:
        return [_value(item, join_path(path, index), remarks) for index, item in enumerate(tree)]
    if type(tree) is not dict:
        return tree
    if _TYPE in tree:
        kind = tree[_TYPE]
        if type(kind) is not str:
            raise InvalidPayload(path=path, reason=f"its {_TYPE} is not a string")
        if kind in _TAGS:
            if _VALUE not in tree:
                raise InvalidPayload(path=path, reason=f"a {kind} needs a {_VALUE}")
            return _TAGS[kind](tree[_VALUE], path, remarks)
    return {key: _value(item, join_path(path, key), remarks) for key, item in tree.items()}


def _date(content: Any, path: str, remarks: list[str]) -> datetime:
    if type(content) is str and _DATE.fullmatch(content):
        try:
            date = datetime.fromisoformat(content)
            return date.replace(tzinfo=UTC) if date.tzinfo is None else date.astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    raise InvalidPayload(path=path, reason="a Date needs a time of the years 1 to 9999 in ISO 8601")


def _buffer(content: Any, path: str, remarks: list[str]) -> bytes:
    if type(content) is str:
        try:
            return base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError):
            pass
    raise InvalidPayload(path=path, reason="a Buffer needs base64")


def _set(content: Any, path: str, remarks: list[str]) -> set[Any] | list[Any]:
    if type(content) is not list:
        raise InvalidPayload(path=path, reason="a Set needs an array")
    items = [_value(item, join_path(path, index), remarks) for index, item in enumerate(content)]
    if _are_different(items):
        return set(items)
    remarks.append(f"the Set at {path} becomes a list, because Python has no set of its members")
    return items


def _map(content: Any, path: str, remarks: list[str]) -> dict[Any, Any] | list[Any]:
    if type(content) is not list or not all(type(entry) is list and len(entry) == 2 for entry in content):
        raise InvalidPayload(path=path, reason="a Map needs an array of pairs")
    pairs = [
        [key, _value(item, join_path(path, index), remarks)] for index, (key, item) in enumerate(content)
    ]
    if _are_different([key for key, _ in pairs]):
        return dict(pairs)
    remarks.append(f"the Map at {path} becomes a list of pairs, because Python has no dict of its keys")
    return pairs


def _are_different(members: list[Any]) -> bool:
    """Return whether Python can hold all members in one set, in which ``1`` and ``True`` are equal."""
    try:
        hashes = Counter(map(hash, members))
        return max(hashes.values(), default=0) <= MAX_EQUAL_HASHES and len(set(members)) == len(members)
    except TypeError:
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_TAGS: Final[dict[str, Callable[[Any, str, list[str]], Any]]] = {
    "Date": _date,
    "Map": _map,
    "Set": _set,
    "Buffer": _buffer,
}


_MESSAGES: Final = """
    SELECT id, created_at, role, content, tool_calls, tool_results, tokens_in, tokens_out
    FROM messages WHERE session_id = %s ORDER BY created_at, id"""
_CHECKPOINTS: Final = """
    SELECT id, created_at, namespace, parent_id, version, step, node_id, node_results, pending_nodes,
        cycle_state, source
    FROM checkpoints WHERE session_id = %s ORDER BY version, created_at, id COLLATE "C" """

_IMPORTED: Final = ("sessions", "messages", "checkpoints")
_WITHOUT_TABLE_HERE: Final = ("entities", "facts")

_STATUSES: Final = {"Complete": "completed", "Failed": "failed", "Skipped": "skipped"}
"""Additional words for the status of a node that the original accepts."""

_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)
_TICK: Final = timedelta(microseconds=1)


class ObskuSource(ForeignSource):
    """Sessions with their messages and checkpoints; entities and facts have no table here."""

    kind: ClassVar = "session"
    session_count_query: ClassVar = "SELECT count(*) FROM sessions"
    sessions_query: ClassVar = """
        SELECT id, workspace_id, title, directory, created_at, updated_at, metadata
        FROM sessions ORDER BY id COLLATE "C" """

    def __init__(self, origin: Origin) -> None:
        if origin.table is not None:
            raise InvalidQuery("The names of obsku's tables are fixed; pass a schema.", path="table")
        super().__init__(origin, PostgresReader(origin.dsn, schema=origin.schema))

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Report rows without a session, and entities and facts unless the origin lets them be left out."""
        yield from self.tally.compare(self._reader.row_counts(*_IMPORTED))
        yield from self._without_table_here(*_WITHOUT_TABLE_HERE)

    def _head(self, session: ForeignSession, row: tuple[Any, ...]) -> Head:
        session_id, workspace_id, title, directory, created_at, updated_at, text = row
        session.tally.found["sessions"] += 1
        metadata = None
        try:
            metadata = _revived(session, str(session), "metadata", text)
            encode_metadata(metadata, self._limits)
        except HelixStoreError as exc:
            session.tally.report(f"the metadata of {session} is left out: {exc}")
            metadata = None
        new = new_session(
            validation.identifier(session_id, "session_id"),
            directory=directory,
            title=title,
            workspace_id=workspace_id,
            metadata=metadata,
            limits=self._limits,
        )
        return Head(new, moment(created_at, "/created_at"), moment(updated_at, "/updated_at"))

    def _read_parts(self, session: ForeignSession) -> None:
        self._milliseconds, self._newest = array("q"), _EARLIEST
        for row in self._reader.rows(_MESSAGES, session.id):
            session.take("messages", row, partial(self._add_message, session))
        for row in self._reader.rows(_CHECKPOINTS, session.id):
            session.take("checkpoints", row, partial(self._add_checkpoint, session))

    def _add_message(self, session: ForeignSession, name: str, row: tuple[Any, ...]) -> None:
        _, milliseconds, role, content, calls, results, tokens_in, tokens_out = row
        created_at = moment(milliseconds, "/created_at")
        message = {
            "role": role,
            "content": content,
            "tool_calls": _revived(session, name, "tool_calls", calls),
            "tool_results": _revived(session, name, "tool_results", results),
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
        }
        encoded = encode_message(message, self._limits)
        self._milliseconds.append(milliseconds)
        # Times of one millisecond differ by a microsecond, so that no page by time ends between them.
        self._newest = max(created_at, self._newest + _TICK)
        session.add_message(role=encoded.role, payload=encoded.text, created_at=self._newest)

    def _add_checkpoint(self, session: ForeignSession, name: str, row: tuple[Any, ...]) -> None:
        (
            checkpoint_id, milliseconds, namespace, parent_id, version, step, node_id, node_results,
            pending_nodes, cycle_state, source,
        ) = row  # fmt: skip
        pending = _revived(session, name, "pending_nodes", pending_nodes)
        payload = encode_checkpoint(
            node_results=_with_known_statuses(_revived(session, name, "node_results", node_results)),
            pending_nodes=[] if pending is None else pending,
            cycle_state=_revived(session, name, "cycle_state", cycle_state),
            limits=self._limits,
        )
        session.add_checkpoint(
            kind=CheckpointKind.GRAPH.value,
            namespace=validation.tenant(namespace, "namespace"),
            version=validation.whole_number(version, "version", minimum=1),
            checkpoint_id=validation.identifier(checkpoint_id, "checkpoint_id"),
            parent_checkpoint_id=validation.optional_identifier(parent_id, "parent_id"),
            source=validation.enum(CheckpointSource, source, "source").value,
            step_id=validation.optional_identifier(node_id, "node_id"),
            step_count=validation.whole_number(step, "step"),
            # As in the original: the messages before this time or in the same millisecond.
            message_count=bisect_right(self._milliseconds, milliseconds),
            payload=payload,
            size_bytes=size_of(payload),
            created_at=moment(milliseconds, "/created_at"),
        )


def _revived(session: ForeignSession, name: str, field: str, text: str | None) -> Any:
    """Return the value of a column. Raises `InvalidPayload`."""
    if text is None:
        return None
    remarks: list[str] = []
    value = revive(text, f"/{field}", remarks)
    for remark in remarks:
        session.tally.report(f"{name}: {remark}")
    return value


def _with_known_statuses(node_results: Any) -> Any:
    """Return node results with the statuses of this package. Any other value is checked later."""
    if type(node_results) is not dict:
        return node_results
    return {node_id: _with_known_status(result) for node_id, result in node_results.items()}


def _with_known_status(result: Any) -> Any:
    status = result.get("status") if type(result) is dict else None
    known = _STATUSES.get(status) if type(status) is str else None
    return result if known is None else {**result, "status": known}


_SCHEMA: Final = "public"
_TABLE: Final = "ziro_checkpoints"

# Python supports neither other years nor infinity.
_TIME: Final = "CASE WHEN created_at >= '0001-01-02' AND created_at < '9999-12-31' THEN created_at END"

# An id is a UUIDv7: its first 13 characters encode a millisecond, and the others are random. For snapshots of
# the same millisecond, the database's clock shows which snapshot was written last.
_SNAPSHOTS: Final = f"""
    SELECT checkpoint_id, version, {_TIME}, snapshot::text FROM {{table}} WHERE thread_id = %s
    ORDER BY
        CASE WHEN checkpoint_id ~ '^[0-9a-f]{{8}}-[0-9a-f]{{4}}-7' THEN left(checkpoint_id, 13)
            ELSE checkpoint_id END COLLATE "C",
        created_at, checkpoint_id COLLATE "C" """


class ZiroSource(ForeignSource):
    """Threads with their snapshots. The latest snapshot becomes the newest of its thread."""

    kind: ClassVar = "thread"
    session_count_query: ClassVar = "SELECT count(DISTINCT thread_id) FROM {table}"
    sessions_query: ClassVar = f"""
        SELECT thread_id, min({_TIME}), max({_TIME}) FROM {{table}}
        GROUP BY thread_id ORDER BY thread_id COLLATE "C" """

    def __init__(self, origin: Origin) -> None:
        schema, table = origin.schema or _SCHEMA, origin.table or _TABLE
        super().__init__(origin, PostgresReader(origin.dsn, schema=schema, table=table))

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        (count,) = self._reader.one("SELECT count(*) FROM {table}")
        return self.tally.compare({"snapshots": count})

    def _head(self, session: ForeignSession, row: tuple[Any, ...]) -> Head:
        thread_id, created_at, updated_at = row
        return Head(new_thread(validation.identifier(thread_id, "thread_id")), created_at, updated_at)

    def _read_parts(self, session: ForeignSession) -> None:
        for row in self._reader.rows(_SNAPSHOTS, session.id):
            session.take("snapshots", row, partial(self._add, session))

    def _is_empty(self, session: ForeignSession) -> bool:
        return not session.checkpoint_count

    def _add(self, session: ForeignSession, name: str, row: tuple[Any, ...]) -> None:
        checkpoint_id, version, created_at, text = row
        snapshot = encode_snapshot(parsed(text, "/snapshot"), self._limits)
        session.add_checkpoint(
            kind=CheckpointKind.SNAPSHOT.value,
            version=session.checkpoint_count + 1,
            checkpoint_id=validation.identifier(checkpoint_id, "checkpoint_id"),
            source=CheckpointSource.INTERRUPT.value,
            payload=snapshot.text,
            size_bytes=snapshot.size_bytes,
            created_at=created_at,
            snapshot_version=version,
        )


SOURCES: Final[dict[str, Callable[[Origin], ForeignSource]]] = {
    "obsku": ObskuSource,
    "ziro": ZiroSource,
}


def register_source(name: str, source: Callable[[Origin], ForeignSource]) -> None:
    """Register another store that ``helix_import --from`` can read. Call this in ``AppConfig.ready()``."""
    SOURCES[name] = source
