"""The conversion of another store's session from its rows to records, with an account of its rows."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO, Any, Final, NamedTuple

from django.db.models import Model

from helix_store.adapters import session_id_for
from helix_store.catalogue import declared, tables
from helix_store.core.payloads import size_of
from helix_store.core.types import CheckpointSource
from helix_store.core.validation import milliseconds_to_datetime
from helix_store.exceptions import HelixStoreError, InvalidPayload, shown_id
from helix_store.models import Checkpoint, CheckpointKind, Message, Session
from helix_store.sessions.requests import NewSession
from helix_store.transfer.layout import format_of
from helix_store.transfer.records import Counts, Problem, Record, line_of, lines_from, spool

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


def session_of(kind: str, source_id: str) -> ForeignSession:
    """Return a session of a framework with the id that `session_id_for` returns, if it can have one."""
    try:
        return ForeignSession(kind, source_id, session_id_for(source_id))
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
