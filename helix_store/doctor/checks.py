"""Checks, which yield faults of rules, and the scope of their rows, which they examine in pages by index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from django.db.models import Model, QuerySet

from helix_store.catalogue import declared
from helix_store.doctor.findings import Fault, Sample
from helix_store.engine.database import Database, Rows
from helix_store.engine.expressions import list_parameter
from helix_store.engine.paging import keyset_pages
from helix_store.engine.statement import Statement
from helix_store.models import Session, Stream


class Stopped(Exception):
    """Raised by the caller to end the examination after the current page."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The rows to examine. ``tenant=None`` means every tenant. A ``session_id`` belongs to one tenant.

    ``after_page`` is called with the number of rows after each page; it may raise `Stopped`.
    """

    db: Database
    tenant: str | None = None
    session_id: str | None = None
    page_size: int = 200
    after_page: Callable[[int], object] = lambda count: None

    @property
    def is_narrowed(self) -> bool:
        return self.tenant is not None

    def pages(self, model: type[Model]) -> Iterator[list[int]]:
        """Yield the keys of the rows in scope, in pages.

        Rows that are added in the meantime may be missed.
        """
        # With a tenant, this is a range of the unique index that begins with the tenant.
        table = declared(model)
        order = table.order[0] if self.is_narrowed and len(table.order) == 1 else "pk"
        rows = self.all_rows(model).filter(**self._conditions(model))
        for page in keyset_pages(self.db, rows, (order,), "pk", sizes=repeat(self.page_size)):
            yield [key for key, _ in page]
            self.after_page(len(page))

    def all_rows(self, model: type[Model]) -> QuerySet[Any]:
        return model._base_manager.using(self.db.alias)

    def _conditions(self, model: type[Model]) -> dict[str, Any]:
        if not self.is_narrowed:
            return {}
        conditions: dict[str, Any] = {"tenant": self.tenant}
        if self.session_id is None:
            return conditions
        if model is Stream:
            sessions = Session.objects.using(self.db.alias).filter(
                tenant=self.tenant, session_id=self.session_id
            )
            return {**conditions, "stream_id__in": sessions.values("stream_id")}
        column = declared(model).session_id
        # A budget belongs to no session.
        return {**conditions, "pk__in": ()} if column is None else {**conditions, column: self.session_id}


def fetched(db: Database, rows: QuerySet[Any, Any]) -> list[Any]:
    """Return the rows of an ORM query."""
    return db.query(lambda: list(rows))


def read_keys(db: Database, statement: Statement, keys: list[int]) -> Rows:
    """Run a statement that `for_keys` has built."""
    return db.read(statement, {"keys": list_parameter(db, keys)})


# --- Checks ------------------------------------------------------------------------------------------

KeyedCheck = Callable[[Database, list[int]], Iterable[Fault]]
RowCheck = Callable[[Scope], Iterable[Fault]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check. ``keyed`` examines rows of ``of`` by their keys; a fix repeats this under the row's lock."""

    rules: tuple[str, ...]
    of: type[Model] | None = None
    keyed: KeyedCheck | None = None
    whole: RowCheck | None = None

    @property
    def name(self) -> str:
        return ", ".join(self.rules)

    def run(self, scope: Scope) -> Iterator[list[Fault]]:
        """Yield the faults in scope, page by page. One statement examines each page, so each page is
        consistent.
        """
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
    """Return a check that runs a statement, which returns the tenant, name, key and row of each fault."""

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
    """Return a fault with its sample row. ``row`` distinguishes a row from others of the same name."""
    sample = Sample(tenant=tenant, name=name, row=None if row is None else str(row))
    return Fault(rule, table, sample, key)


def table_of(model: type[Model]) -> str:
    """Return the name of a table without its prefix."""
    return model._meta.db_table.removeprefix(Session._meta.db_table.removesuffix("session"))
