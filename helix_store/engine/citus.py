"""Statements for Citus, whose planner refuses some of those that PostgreSQL runs.

With schema-based sharding all tables of an alias are on one node, and the statements reach them through the
entry node: the server that the alias names. A statement has another form there when it would break a rule:

- Beside a table stands no volatile function, and in ``CASE`` and ``COALESCE`` of a write an immutable one
  only. The clock is read by a statement of its own, on the entry node and right before the statement that
  needs it, and comes as a parameter (`clocks.CITUS`).
- A row is locked by a query of its own, before the clock is read: a clock that is older than a wait would
  extend a term that has ended.
- A statement writes to one table. So there are no steps in one statement, and nothing is prepared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from helix_store.engine.clocks import POSTGRESQL

__all__ = ["run_in_order"]

_MOMENT: Final = re.compile(r"%\((clock(?:_plus_(\w+))?)\)s")


def run_in_order(cursor: Any, texts: Sequence[str], parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The rows of the last statement. A query before it that finds nothing is the end: then there are none.

    In a transaction, if there is more than one.
    """
    rows: list[tuple[Any, ...]] = []
    for text in texts:
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
    """The moments among the parameters of a statement, and the query for their values."""
    moments = dict(_MOMENT.findall(text))
    # As text, which has every moment to the microsecond.
    values = (f"({POSTGRESQL.after(ms) if ms else POSTGRESQL.now})::text" for ms in moments.values())
    return list(moments), f"SELECT {', '.join(values)}"
