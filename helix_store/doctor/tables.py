"""The checks that tables declare: that their payloads are readable, and the checks of their apps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from helix_store.catalogue import Table, declared, tables
from helix_store.doctor.findings import Fault
from helix_store.doctor.invariants.owners import table_of
from helix_store.doctor.readable import can_read, paged, place_of, rows_of
from helix_store.doctor.registry import Check, fault, over
from helix_store.doctor.scope import Scope, fetched
from helix_store.engine.database import Database
from helix_store.models import Session
from helix_store.models.fields import PayloadField

__all__ = ["declared_checks"]


def declared_checks() -> tuple[Check, ...]:
    """Return the checks of the tables in the catalogue."""
    return tuple(check for table in tables() for check in _checks_of(table))


def _checks_of(table: Table) -> Iterator[Check]:
    fields = table.model._meta.concrete_fields
    payloads = [field.attname for field in fields if isinstance(field, PayloadField)]
    if payloads and table.reads is not None:
        yield _readable(table, payloads, table.reads)
    if table.check is not None:
        yield _own(table)


def _readable(table: Table, payloads: list[str], read: Callable[[str], object]) -> Check:
    parent, names = "pk", [table.parent, "pk"]
    if table.owner is not None:
        parent = table.parent
        owner = table.parent_field.name
        names = [f"{owner}__tenant", f"{owner}__{declared(table.owner).order[0]}"]

    @over("unreadable-payload")
    def check(scope: Scope) -> Iterator[Fault]:
        for keys in _pages(scope, table):
            rows, order = rows_of(scope, table.model, parent, keys), (table.parent, *table.order)
            for place, (tenant, name, *texts) in paged(scope, rows, order, (*names, *payloads)):
                if any(text is not None and not can_read(partial(read, text)) for text in texts):
                    shown = None if table.is_of_tenant else name
                    yield fault("unreadable-payload", table_of(table.model), tenant, shown, place_of(place))

    return check


def _own(table: Table) -> Check:
    """Return a table's own check as a check of the doctor."""
    of: Any = table.model if table.is_of_tenant else Session
    columns = ("pk", "tenant", "pk" if table.is_of_tenant else "session_id")

    @over("app-rows-unsound")
    def check(scope: Scope) -> Iterator[Fault]:
        for keys in _pages(scope, table):
            found = list(scope.db.query(partial(_found, table, scope.db, keys)))
            rows = of._base_manager.using(scope.db.alias).filter(pk__in={key for key, _ in found})
            owners = {key: owner for key, *owner in fetched(scope.db, rows.values_list(*columns))}
            for key, text in found:
                tenant, name = owners.get(key, (None, None))
                shown = None if table.is_of_tenant else name
                yield fault("app-rows-unsound", table_of(table.model), tenant, shown, text, key=key)

    return check


def _found(table: Table, db: Database, keys: list[int]) -> list[tuple[int, str]]:
    return [] if table.check is None else list(table.check(db, keys))


def _pages(scope: Scope, table: Table) -> Iterator[list[int]]:
    """Yield the keys of owners, or of a tenant's own rows, which belong to no session."""
    if table.owner is not None:
        yield from scope.pages(table.owner)
    elif scope.session_id is None:
        yield from scope.pages(table.model)
