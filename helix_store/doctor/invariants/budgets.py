"""The invariant of budgets: a counter is the sum of the ledger for its value and period."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from helix_store.budgets.database import counters_of, sums_of
from helix_store.budgets.rules import NOTHING, Amounts
from helix_store.counters.rules import bounded
from helix_store.doctor.findings import Fault
from helix_store.doctor.registry import each, fault
from helix_store.engine.database import Database
from helix_store.models import Budget

__all__ = ["CHECKS"]

_ATTEMPTS: Final = 3


@each(Budget, "budget-counter-off")
def counters(db: Database, keys: list[int]) -> Iterator[Fault]:
    rows = Budget.objects.using(db.alias).filter(pk__in=keys).order_by("pk")
    for tenant, name, key in db.query(lambda: list(rows.values_list("tenant", "name", "pk"))):
        for value, period in _differing(Database(db.alias, tenant), name):
            row = " ".join(filter(None, (value, period)))
            yield fault("budget-counter-off", "budget_counter", tenant, name, row or None, key=key)


def _differing(db: Database, name: str) -> list[tuple[str, str]]:
    """Return the value and period of each counter that differs from the ledger, unless counters change."""
    before = db.query(partial(counters_of, db, name))
    for _ in range(_ATTEMPTS):
        sums = db.query(partial(sums_of, db, name))
        stored = db.query(partial(counters_of, db, name))
        if stored == before:
            return [place for place in sorted({*stored, *sums}) if _differs(stored, sums, place)]
        before = stored
    return []


_Amounts = Mapping[tuple[str, str], Amounts]


def _differs(stored: _Amounts, sums: _Amounts, place: tuple[str, str]) -> bool:
    return stored.get(place, NOTHING) != tuple(map(bounded, sums.get(place, NOTHING)))


CHECKS: Final = (counters,)
