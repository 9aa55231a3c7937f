"""What is examined: one database, a tenant or a session of it, page by page and by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from django.db.models import Model, QuerySet

from helix_store.engine.database import Database, Rows
from helix_store.engine.expressions import is_in_list, list_parameter
from helix_store.engine.statement import Statement
from helix_store.models import Lock, Session, Stream, UsageEntry

__all__ = ["Scope", "Stopped", "fetched", "for_keys", "read_keys"]


class Stopped(Exception):
    """The caller wants the examination to end after the current page."""


def _ignore(count: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Scope:
    """``tenant=None`` is every tenant. A ``session_id`` is looked up in one tenant.

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
        """The keys of the rows in scope, in pages. Rows that are added meanwhile may be left out."""
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
        # With a tenant, a range of the unique index that begins with it.
        order = _NAMES.get(model, "pk") if self.is_narrowed else "pk"
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
        return {**conditions, _OF_SESSION[model]: self.session_id}


_NAMES: Final[dict[type[Model], str]] = {
    Session: "session_id",
    Stream: "stream_id",
    Lock: "name",
    UsageEntry: "entry_id",
}
_OF_SESSION: Final[dict[type[Model], str]] = {
    Session: "session_id",
    Lock: "name",
    UsageEntry: "recorded_for",
}


def fetched(db: Database, rows: QuerySet[Any, Any]) -> list[Any]:
    """The rows of a query of the ORM."""
    return db.query(lambda: list(rows))


def for_keys(text: Callable[[Callable[[str], str]], str]) -> Statement:
    """A statement about the rows with some keys; ``text`` gets what says that a column has one of them."""

    def condition(index: int) -> Callable[[str], str]:
        return lambda column: is_in_list(column, "keys", "bigint")[index]

    return Statement(postgresql=text(condition(0)), sqlite=text(condition(1)))


def read_keys(db: Database, statement: Statement, keys: list[int]) -> Rows:
    """Run a statement of `for_keys`."""
    return db.read(statement, {"keys": list_parameter(db, keys)})
