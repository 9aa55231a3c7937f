"""Statements for Citus, whose planner refuses some statements that PostgreSQL runs.

With schema-based sharding, all tables of an alias are on one node, and statements reach them through the
entry node, the server that the alias names. A statement has a different form there if it would break a rule:

- A statement with a table must not call a volatile function, and ``CASE`` and ``COALESCE`` in a write may
  only call immutable ones. A separate statement reads the clock, on the entry node and directly before the
  statement that needs the time as a parameter (`clocks.CITUS`).
- A separate query locks a row before the clock is read: a clock read before the wait would extend a term that
  has ended.
- A statement writes to only one table, so there are no one-statement steps. Writes are not prepared.
- Triggers are not allowed. A statement that has no other form there has a `Refusal`.

A transaction that writes begins with `STAY_ON_NODE`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from helix_store.engine.clocks import POSTGRESQL
from helix_store.engine.statement import Refusal, Statement, table
from helix_store.exceptions import NotSupportedOnBackend
from helix_store.models import Lock

STAY_ON_NODE: Final = Statement(f"DELETE FROM {table(Lock)} WHERE id = 0")
"""Make a move of the schema wait for the end of the transaction.

A move waits for transactions that have written, but not for those that have only locked a row. Without this
statement, a transaction could lock a row on the old node and write on the new one, where the row is not
locked, so that two transactions could both write what only one of them may.
"""

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
