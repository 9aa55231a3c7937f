"""Checks: functions that yield faults, together with the rules that they cover."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from django.db.models import Model

from helix_store.doctor.findings import Fault, Sample
from helix_store.doctor.scope import Scope, read_keys
from helix_store.engine.database import Database
from helix_store.engine.statement import Statement

__all__ = ["Check", "KeyedCheck", "RowCheck", "by_statement", "each", "fault", "over"]

KeyedCheck = Callable[[Database, list[int]], Iterable[Fault]]
RowCheck = Callable[[Scope], Iterable[Fault]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check. ``keyed`` examines rows of ``of`` by their keys; a fix repeats it under the row's lock."""

    rules: tuple[str, ...]
    of: type[Model] | None = None
    keyed: KeyedCheck | None = None
    whole: RowCheck | None = None

    @property
    def name(self) -> str:
        return ", ".join(self.rules)

    def run(self, scope: Scope) -> Iterator[list[Fault]]:
        """Yield the faults in scope, page by page. One statement examines each page, so it is consistent."""
        if self.keyed is not None and self.of is not None:
            for keys in scope.pages(self.of):
                yield list(self.keyed(scope.db, keys))
        if self.whole is not None:
            for found in self.whole(scope):
                yield [found]


def each(of: type[Model], *rules: str) -> Callable[[KeyedCheck], Check]:
    """Turn a function of a database and keys into a check of every row of a model."""
    return lambda function: Check(rules, of=of, keyed=function)


def over(*rules: str) -> Callable[[RowCheck], Check]:
    """Turn a function of a scope into a check."""
    return lambda function: Check(rules, whole=function)


def by_statement(rule: str, of: type[Model], table: str, statement: Statement) -> Check:
    """Return a check by a statement that returns the tenant, name, key and row of each fault."""

    def keyed(db: Database, keys: list[int]) -> Iterator[Fault]:
        for tenant, name, key, row in read_keys(db, statement, keys):
            yield fault(rule, table, tenant, name, row, key=key)

    return Check((rule,), of=of, keyed=keyed)


def fault(
    rule: str,
    table: str | None,
    tenant: str | None,
    name: str | None,
    row: Any = None,
    *,
    key: int | None = None,
) -> Fault:
    """Return a fault with its sample. ``row`` distinguishes a row from others with the same name."""
    sample = Sample(tenant=tenant, name=name, row=None if row is None else str(row))
    return Fault(rule, table, sample, key)
