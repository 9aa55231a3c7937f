"""The scope of an examination: one database, or a tenant or session in it, by pages and by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db.models import Model, QuerySet

from helix_store.catalogue import declared
from helix_store.engine.database import Database, Rows
from helix_store.engine.expressions import is_in_list, list_parameter
from helix_store.engine.statement import Statement
from helix_store.models import Session, Stream

__all__ = ["Scope", "Stopped", "fetched", "for_keys", "read_keys"]


class Stopped(Exception):
    """Raised by the caller to end the examination after the current page."""


def _ignore(count: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Scope:
    """The rows to examine. ``tenant=None`` means every tenant. A ``session_id`` belongs to one tenant.

    ``after_page`` is called with the number of rows after each page; it may raise `Stopped`.
    """

    db: Database
    tenant: str | None = None
    session_id: str | None = None
    page_size: int = 200
    after_page: Callable[[int], None] = _ignore

    @property
    def is_narrowed(self) -> bool:
        return self.tenant is not None

    def pages(self, model: type[Model]) -> Iterator[list[int]]:
        """Yield the keys of the rows in scope, in pages.

        Rows that are added in the meantime may be left out.
        """
        last = None
        while page := self.db.query(partial(self._page_after, model, last)):
            yield [row[0] for row in page]
            self.after_page(len(page))
            if len(page) < self.page_size:
                return
            last = page[-1][1]

    def all_rows(self, model: type[Model]) -> QuerySet[Any]:
        return model._base_manager.using(self.db.alias)

    def _page_after(self, model: type[Model], last: Any) -> list[tuple[int, Any]]:
        # With a tenant, this is a range of the unique index that begins with it.
        table = declared(model)
        order = table.order[0] if self.is_narrowed and len(table.order) == 1 else "pk"
        rows = self.all_rows(model).filter(**self._conditions(model))
        if last is not None:
            rows = rows.filter(**{f"{order}__gt": last})
        return list(rows.order_by(order).values_list("pk", order)[: self.page_size])

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


def for_keys(text: Callable[[Callable[[str], str]], str]) -> Statement:
    """Return a statement on the rows with some keys. ``text`` gets a function that builds the condition."""

    def condition(index: int) -> Callable[[str], str]:
        return lambda column: is_in_list(column, "keys", "bigint")[index]

    return Statement(postgresql=text(condition(0)), sqlite=text(condition(1)))


def read_keys(db: Database, statement: Statement, keys: list[int]) -> Rows:
    """Run a statement that `for_keys` has made."""
    return db.read(statement, {"keys": list_parameter(db, keys)})
