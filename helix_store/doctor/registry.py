"""What a check is: a function that yields faults, and the rules that it looks after."""

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
    """``keyed`` examines the rows of ``of`` with some keys, which a fix repeats under their lock."""

    rules: tuple[str, ...]
    of: type[Model] | None = None
    keyed: KeyedCheck | None = None
    whole: RowCheck | None = None

    @property
    def name(self) -> str:
        return ", ".join(self.rules)

    def run(self, scope: Scope) -> Iterator[list[Fault]]:
        """The faults in scope, page by page: each page is examined in one statement, so that it agrees."""
        if self.keyed is not None and self.of is not None:
            for keys in scope.pages(self.of):
                yield list(self.keyed(scope.db, keys))
        if self.whole is not None:
            for found in self.whole(scope):
                yield [found]


def each(of: type[Model], *rules: str) -> Callable[[KeyedCheck], Check]:
    """Make a function of a database and keys a check of every row of a model."""
    return lambda function: Check(rules, of=of, keyed=function)


def over(*rules: str) -> Callable[[RowCheck], Check]:
    """Make a function of a scope a check."""
    return lambda function: Check(rules, whole=function)


def by_statement(rule: str, of: type[Model], table: str, statement: Statement) -> Check:
    """A check by a statement that returns the tenant, the name, the key and the row of each fault."""

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
    """A fault with its sample; ``row`` is what tells a row from the others of the same name."""
    sample = Sample(tenant=tenant, name=name, row=None if row is None else str(row))
    return Fault(rule, table, sample, key)
