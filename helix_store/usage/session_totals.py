"""Tokens and costs of the sessions in a list, reading a bounded number of entries for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from helix_store.core.usage import cost_from_units
from helix_store.engine.database import Database
from helix_store.engine.expressions import exact_sum, list_parameter, summed
from helix_store.engine.statement import Statement, table
from helix_store.models import UsageEntry as UsageRow

__all__ = ["ENTRIES_READ", "SessionTotal", "session_totals"]

ENTRIES_READ: Final = 1_000
"""The number of entries of one session that are added up."""


@dataclass(frozen=True, slots=True)
class SessionTotal:
    """A session's totals. ``is_partial`` means that the session has more entries than were added up."""

    tokens: int
    cost_usd: Decimal
    is_partial: bool


def _statement() -> Statement:
    def read(column: str, key: str) -> str:
        return (
            f"(SELECT {column} FROM (SELECT e.total_tokens, e.cost_usd FROM {table(UsageRow)} AS e "
            f"WHERE e.session_id = {key} LIMIT {ENTRIES_READ + 1}) AS entries)"
        )

    tokens, tokens_sqlite = exact_sum("total_tokens")
    cost, cost_sqlite = exact_sum("cost_usd")
    # A single text, because SQLite would read the entries again for each value.
    sums = f"count(*) || ';' || coalesce({tokens_sqlite}, '0 0') || ';' || coalesce({cost_sqlite}, '0 0')"
    return Statement(
        f"""SELECT keys.value, sums.* FROM unnest(%(keys)s::bigint[]) AS keys(value),
            LATERAL {read(f"count(*), {tokens}, {cost}", "keys.value")} AS sums""",
        f"SELECT keys.value, {read(sums, 'keys.value')} FROM json_each(%(keys)s) AS keys",
    )


_TOTALS: Final = _statement()


def session_totals(keys: Sequence[int], *, using: str) -> dict[int, SessionTotal]:
    """Return the usage of sessions without their sub-agents, by the keys of their rows. One statement."""
    db = Database(using, "")
    rows = db.read(_TOTALS, {"keys": list_parameter(db, keys)})
    return {key: _total(*(sums if db.is_postgresql else sums[0].split(";"))) for key, *sums in rows}


def _total(count: int | str, tokens: Any, cost: Any) -> SessionTotal:
    return SessionTotal(
        tokens=summed(tokens), cost_usd=cost_from_units(summed(cost)), is_partial=int(count) > ENTRIES_READ
    )
