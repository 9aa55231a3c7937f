"""Statements: their texts, the clock in them, the form for Citus, and the marks of commits.

Statements for Citus, whose planner refuses some statements that PostgreSQL runs.

With schema-based sharding, all tables of an alias are on one node, and statements reach them through the
entry node, the server that the alias names. A statement has a different form there if it would break a rule:

- A statement with a table must not call a volatile function, and ``CASE`` and ``COALESCE`` in a write may
  only call immutable ones. A separate statement reads the clock, on the entry node and directly before the
  statement that needs the time as a parameter (`clocks.CITUS`).
- A separate query locks a row before the clock is read: a clock read before the wait would extend a term that
  has ended.
- A statement writes to only one table, so there are no one-statement steps. Writes are not prepared.
- Triggers are not allowed. A statement that has no other form there has a `Refusal`.

A transaction that writes begins with `engine.database.stay_on_node`.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model

from helix_store.engine.errors import mapped_errors
from helix_store.exceptions import (
    NotSupportedOnBackend,
    OutcomeUnknown,
    StoreBusy,
    StoreTimeout,
    StoreUnavailable,
)

_NAMED_PLACEHOLDER = re.compile(r"%\((\w+)\)s")


class Refusal(str):
    """The reason why a statement is not run on Citus: the call raises `NotSupportedOnBackend`, with a message
    that ends with this text, ``"<alias> is on Citus, …"``.
    """


class PreparedStatement(NamedTuple):
    """A statement in the form in which PostgreSQL prepares it.

    ``text`` has the placeholders ``$1``, ``$2``…, and ``parameters`` lists their names in that order.
    ``name`` is a digest of the text: behind a pooler, where processes share a server connection, a name must
    refer to only one statement.
    """

    name: bytes
    text: str
    parameters: tuple[str, ...]


class Statement:
    """An SQL statement with placeholders ``%(name)s`` or ``%s``; ``%%`` is a percent sign. Pass ``sqlite`` if
    the text for PostgreSQL does not run on SQLite, and ``citus`` if it does not run on Citus; ``citus`` is a
    list of statements that run in order instead (see `engine.statement`).
    """

    def __init__(self, postgresql: str, sqlite: str | None = None, *, citus: Sequence[str] = ()) -> None:
        self.postgresql = postgresql
        self.sqlite = postgresql if sqlite is None else sqlite
        # A form with the same text is omitted, so that a write need not be a transaction.
        self.citus = () if list(citus) == [postgresql] else tuple(citus)

    def __repr__(self) -> str:
        return f"<Statement {self.postgresql.strip()[:60]!r}>"

    @cached_property
    def prepared(self) -> PreparedStatement:
        """The form to prepare, for statements with named placeholders."""
        numbers: dict[str, int] = {}

        def number(match: re.Match[str]) -> str:
            return f"${numbers.setdefault(match[1], len(numbers) + 1)}"

        text = _NAMED_PLACEHOLDER.sub(number, self.postgresql).replace("%%", "%")
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return PreparedStatement(f"helix_{digest}".encode(), text, tuple(numbers))


def table(model: type[Model]) -> str:
    """Return the quoted name of a model's table. Table prefixes are plain names."""
    return f'"{model._meta.db_table}"'


@dataclass(frozen=True, slots=True)
class Clock:
    """The SQL expressions of a clock, in the form that a `MomentField` stores."""

    now: str
    _in_milliseconds: str
    next: str
    """A moment that is later than whatever has ended by now, although SQLite's clock tells milliseconds."""

    def after(self, parameter: str) -> str:
        """Return the time that is later by the number of milliseconds in the named parameter."""
        return self._in_milliseconds.format(parameter)


# The name includes the schema, so that a function of the same name on the search path cannot replace it.
POSTGRESQL: Final = Clock(
    now="pg_catalog.clock_timestamp()",
    _in_milliseconds="pg_catalog.clock_timestamp() + %({})s * interval '1 millisecond'",
    next="pg_catalog.clock_timestamp()",
)
# Exactly the text that a `MomentField` stores, because SQLite compares texts: six digits of the second's
# fraction, and none if it is zero.
_SQLITE_MOMENT: Final = "replace(strftime('%%Y-%%m-%%d %%H:%%M:%%f', {}) || '000', '.000000', '')"
SQLITE: Final = Clock(
    now=_SQLITE_MOMENT.format("'now'"),
    _in_milliseconds=_SQLITE_MOMENT.format("'now', (%({})s / 1000.0) || ' seconds'"),
    next=_SQLITE_MOMENT.format("'now', '+0.001 seconds'"),
)
# These are parameters that `engine.statement` fills in.
CITUS: Final = Clock(
    now="%(clock)s::timestamptz",
    _in_milliseconds="%(clock_plus_{})s::timestamptz",
    next="%(clock)s::timestamptz",
)


def with_clock(text: Callable[[Clock], str], *, locks: str | None = None) -> Statement:
    """Return a statement with the clock of each database. If it may wait for a row, ``locks`` is the query
    that first locks that row on Citus.
    """
    citus = text(CITUS)
    return Statement(text(POSTGRESQL), text(SQLITE), citus=(locks, citus) if locks else (citus,))


NOW: Final = Statement(postgresql=f"SELECT {POSTGRESQL.now}", sqlite=f"SELECT {SQLITE.now}")


Mark: TypeAlias = tuple[str, str]
"""The number of a transaction, and the server that assigned it."""

NO_ANSWER: Final = (OutcomeUnknown, StoreUnavailable, StoreBusy, StoreTimeout)

_PATIENCE_SECONDS: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 0.5

_STATUS: Final = """
    SELECT CASE
        WHEN pg_catalog.pg_is_in_recovery() THEN NULL
        WHEN pg_catalog.pg_stat_get_bgwriter_stat_reset_time() = %(server)s::timestamptz
        THEN pg_catalog.pg_xact_status(%(number)s::xid8)
        ELSE 'another server'
    END"""
# A vanished client sends no COMMIT. The server may notice only hours later, and keeps the locks until then.
_END_IF_IDLE: Final = """
    SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity
    WHERE backend_xid = %(number)s::xid8::xid AND state LIKE 'idle in transaction%%'"""

# The lost transaction keeps its locks until the server notices that its client is gone, which can take hours.
WAIT_BRIEFLY: Final = Statement("SELECT pg_catalog.set_config('lock_timeout', '500ms', true)")
# Its statement may be running, or may arrive later from network buffers.
END_SESSION: Final = Statement(
    """
    SELECT pg_catalog.pg_terminate_backend(pid, 1000) FROM pg_catalog.pg_stat_activity
    WHERE pid = %(number)s::integer AND usename = current_user AND wait_event IS DISTINCT FROM 'SyncRep'
        AND backend_start < pg_catalog.clock_timestamp() - %(seconds)s::float8 * interval '1 second'"""
)


def has_committed(connection: BaseDatabaseWrapper, mark: Mark, lost: OutcomeUnknown) -> bool:
    """Return whether the transaction with this mark, whose COMMIT was ``lost``, was committed. Wait as long
    as the server does not know. Raises `OutcomeUnknown` with the number of the transaction.
    """
    number, server = mark
    parameters = {"number": number, "server": server}
    for pause in patient_pauses():
        try:
            status = _ask(connection, parameters)
        except NO_ANSWER:
            status = None
        if status in ("committed", "aborted"):
            return status == "committed"
        if status == "another server":
            break
        time.sleep(pause)
    raise OutcomeUnknown(f"xid-{number}") from lost.__cause__


def _ask(connection: BaseDatabaseWrapper, parameters: dict[str, str]) -> str | None:
    with mapped_errors(connection), connection.cursor() as cursor:
        cursor.execute(_STATUS, parameters)
        (status,) = cursor.fetchone()
        if status == "in progress":
            cursor.execute(_END_IF_IDLE, parameters)
    return None if status is None else str(status)


def patient_pauses() -> Iterator[float]:
    """Yield the pauses between attempts to reach a server that does not answer, for a few seconds."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield random.uniform(pause / 2, pause)  # noqa: S311  jitter, no secret
        if time.monotonic() >= deadline:
            return
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


# --- Ids of calls ------------------------------------------------------------------------------------

# If the reply to a one-statement write was lost, the write is found by the random id of its call
# (`Call.id` of `engine.database`), which it stores with its data. A row that many calls change keeps the ids
# of the most recent calls, newest first, so that a call can find its own id behind those of other writers.
CALL_ID_BYTES: Final = 9
CALL_IDS_LENGTH: Final = 255


def recorded(column: str, value: str = "''") -> str:
    """Return the SQL that adds the value of the call, ``%(call_id)s``, to a column of ids."""
    entry = f"%(call_id)s || ':' || {value} || ' '"
    return f"left({entry} || coalesce({column}, ''), {CALL_IDS_LENGTH})"


def with_recorded(call_ids: str | None, call_id: str, value: object = "") -> str | None:
    """Return a column of ids to which a call is added, as by `recorded`; unchanged if the call has no id."""
    return f"{call_id}:{value} {call_ids or ''}"[:CALL_IDS_LENGTH] if call_id else call_ids


def recorded_value(call_ids: str | None, call_id: str) -> str | None:
    """Return the value that was recorded with a call, or ``None`` if the call never changed the row.

    Raises `OutcomeUnknown` if so many later calls are recorded that the column may have dropped this one.
    """
    kept = call_ids or ""
    for entry in kept.split(" "):
        found, _, value = entry.partition(":")
        if found == call_id:
            return value
    if len(kept) == CALL_IDS_LENGTH:
        raise OutcomeUnknown(call_id)
    return None


_MOMENT: Final = re.compile(r"%\((clock(?:_plus_(\w+))?)\)s")


def run_in_order(cursor: Any, texts: Sequence[str], parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Run statements and return the rows of the last one; stop without rows if an earlier query finds
    nothing. Several statements run in a transaction.
    """
    rows: list[tuple[Any, ...]] = []
    for text in texts:
        if isinstance(text, Refusal):
            raise NotSupportedOnBackend(f"{cursor.db.alias!r} is on Citus, {text}")
        names, clock = _reading_of_the_clock(text)
        if names:
            cursor.execute(clock, parameters)
            parameters = {**parameters, **dict(zip(names, cursor.fetchone(), strict=True))}
        cursor.execute(text, parameters)
        is_query = cursor.description is not None
        rows = cursor.fetchall() if is_query else []
        if is_query and not rows:
            break
    return rows


@lru_cache(512)
def _reading_of_the_clock(text: str) -> tuple[list[str], str]:
    """Return the moments among the parameters of a statement, and the query for their values."""
    moments = dict(_MOMENT.findall(text))
    # Moments are read as text, which is always exact to the microsecond.
    values = (f"({POSTGRESQL.after(ms) if ms else POSTGRESQL.now})::text" for ms in moments.values())
    return list(moments), f"SELECT {', '.join(values)}"
