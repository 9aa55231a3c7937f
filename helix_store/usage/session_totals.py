"""Tokens and costs of the sessions of a list, with a bound on what is read for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from helix_store.core.usage import cost_from_units
from helix_store.engine.database import Database
from helix_store.engine.expressions import exact_sum, list_parameter, summed
from helix_store.engine.statement import Statement, table
from helix_store.models import UsageEntry as UsageRow

__all__ = ["ENTRIES_READ", "SessionTotal", "session_totals"]

ENTRIES_READ: Final = 1_000
"""Entries of one session that are added up."""


@dataclass(frozen=True, slots=True)
class SessionTotal:
    """``is_partial``: the session has more entries than were added up."""

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
    sums = ", ".join(read(column, "keys.value") for column in ("count(*)", tokens_sqlite, cost_sqlite))
    return Statement(
        f"""SELECT keys.value, sums.* FROM unnest(%(keys)s::bigint[]) AS keys(value),
            LATERAL {read(f"count(*), {tokens}, {cost}", "keys.value")} AS sums""",
        f"SELECT keys.value, {sums} FROM json_each(%(keys)s) AS keys",
    )


_TOTALS: Final = _statement()


def session_totals(keys: Sequence[int], *, using: str) -> dict[int, SessionTotal]:
    """What sessions have spent without their sub-agents, by the keys of their rows. One statement."""
    db = Database(using, "")
    return {
        key: SessionTotal(
            tokens=summed(tokens), cost_usd=cost_from_units(summed(cost)), is_partial=count > ENTRIES_READ
        )
        for key, count, tokens, cost in db.read(_TOTALS, {"keys": list_parameter(db, keys)})
    }
