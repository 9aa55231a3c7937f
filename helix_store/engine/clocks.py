"""The database's own clock in SQL, which alone decides whether a term has expired. A worker's clock may be
wrong, and PostgreSQL's ``now()`` does not advance during a transaction. SQLite runs on the worker's machine;
its clock does not advance within a statement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from helix_store.engine.statement import Statement


@dataclass(frozen=True, slots=True)
class Clock:
    """The SQL expressions of a clock, in the form that a `MomentField` stores."""

    now: str
    _in_milliseconds: str

    def after(self, parameter: str) -> str:
        """Return the time that is later by the number of milliseconds in the named parameter."""
        return self._in_milliseconds.format(parameter)


# The name includes the schema, so that a function of the same name on the search path cannot replace it.
POSTGRESQL: Final = Clock(
    now="pg_catalog.clock_timestamp()",
    _in_milliseconds="pg_catalog.clock_timestamp() + %({})s * interval '1 millisecond'",
)
SQLITE: Final = Clock(
    now="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')",
    _in_milliseconds="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', (%({})s / 1000.0) || ' seconds')",
)
# These are parameters that `engine.citus` fills in.
CITUS: Final = Clock(now="%(clock)s::timestamptz", _in_milliseconds="%(clock_plus_{})s::timestamptz")


def with_clock(text: Callable[[Clock], str], *, locks: str | None = None) -> Statement:
    """Return a statement with the clock of each database. If it may wait for a row, ``locks`` is the query
    that first locks that row on Citus.
    """
    citus = text(CITUS)
    return Statement(text(POSTGRESQL), text(SQLITE), citus=(locks, citus) if locks else (citus,))


NOW: Final = Statement(postgresql=f"SELECT {POSTGRESQL.now}", sqlite=f"SELECT {SQLITE.now}")
