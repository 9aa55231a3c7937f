"""The database's own clock, in SQL: the only one that decides when a term is over.

A worker's clock may be wrong, and ``now()`` of PostgreSQL stands still for a whole transaction. SQLite runs
on the worker's machine; its clock stands still within a statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["CLOCKS", "Clock", "database_now", "moment"]


@dataclass(frozen=True, slots=True)
class Clock:
    """SQL expressions in the form in which Django stores a ``DateTimeField``."""

    now: str
    in_milliseconds: str
    """The moment so many milliseconds from now; takes one parameter."""


# PostgreSQL: with its schema, so that no function of that name on the search path takes its place.
CLOCKS: Final = {
    "postgresql": Clock(
        now="pg_catalog.clock_timestamp()",
        in_milliseconds="pg_catalog.clock_timestamp() + %s * interval '1 millisecond'",
    ),
    "sqlite": Clock(
        now="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')",
        in_milliseconds="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', (%s / 1000.0) || ' seconds')",
    ),
}


def database_now(connection: BaseDatabaseWrapper) -> datetime:
    """What the database's clock shows: one statement."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {CLOCKS[connection.vendor].now.replace('%%', '%')}")
        (value,) = cursor.fetchone()
    return moment(datetime.fromisoformat(value) if isinstance(value, str) else value)


def moment(value: datetime) -> datetime:
    """An aware datetime from what a cursor returns of a column: on SQLite it is naive, and in UTC."""
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
