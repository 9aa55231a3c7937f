"""The database's own clock, in SQL: the only clock that decides whether a term is over.

A worker's clock may be wrong, and ``now()`` of PostgreSQL stands still for a whole transaction. SQLite runs
on the worker's machine; its clock stands still within a statement.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from helix_store.engine.statement import Statement

if TYPE_CHECKING:
    # It runs `engine.citus`, which reads the clock.
    from helix_store.engine.database import Database

__all__ = [
    "CITUS",
    "POSTGRESQL",
    "SQLITE",
    "Clock",
    "as_utc",
    "database_moment",
    "database_now",
    "with_clock",
]


@dataclass(frozen=True, slots=True)
class Clock:
    """SQL expressions in the form in which a `MomentField` is stored."""

    now: str
    _in_milliseconds: str

    def after(self, parameter: str) -> str:
        """The time in as many milliseconds as the named parameter holds."""
        return self._in_milliseconds.format(parameter)


# With its schema: a function of the same name on the search path must not replace it.
POSTGRESQL: Final = Clock(
    now="pg_catalog.clock_timestamp()",
    _in_milliseconds="pg_catalog.clock_timestamp() + %({})s * interval '1 millisecond'",
)
SQLITE: Final = Clock(
    now="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')",
    _in_milliseconds="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', (%({})s / 1000.0) || ' seconds')",
)
# Parameters that `engine.citus` fills in.
CITUS: Final = Clock(now="%(clock)s::timestamptz", _in_milliseconds="%(clock_plus_{})s::timestamptz")


def with_clock(text: Callable[[Clock], str], *, locks: str | None = None) -> Statement:
    """A statement on the clock of each database.

    ``locks`` is given where it may wait for a row: the query that locks the row first on Citus.
    """
    citus = text(CITUS)
    return Statement(text(POSTGRESQL), text(SQLITE), citus=(locks, citus) if locks else (citus,))


_NOW: Final = Statement(postgresql=f"SELECT {POSTGRESQL.now}", sqlite=f"SELECT {SQLITE.now}")


def database_now(db: Database) -> datetime:
    """What the database's clock shows: one statement, inside of a query or transaction."""
    ((value,),) = db.execute(_NOW, {})
    return as_utc(datetime.fromisoformat(value) if isinstance(value, str) else value)


def database_moment(db: Database, earlier: float) -> datetime:
    """What the database's clock showed at an earlier ``time.monotonic()``, or a little less."""
    now = database_now(db)
    # SQLite cuts a moment off at its millisecond, so one that was stored later may look earlier.
    tick = timedelta(0) if db.is_postgresql else timedelta(milliseconds=1)
    return now - timedelta(seconds=time.monotonic() - earlier) - tick


def as_utc(value: datetime) -> datetime:
    """An aware datetime from what `Database` returns for a column: on SQLite it is naive, and in UTC."""
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
