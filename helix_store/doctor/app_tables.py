"""Rows that other apps keep: whether their payloads can be read, and what the apps themselves find."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from helix_store.app_tables import AppTable, registered_tables
from helix_store.core.payloads import decode
from helix_store.doctor.findings import Fault
from helix_store.doctor.invariants.owners import table_of
from helix_store.doctor.readable import can_read, paged, place_of
from helix_store.doctor.registry import Check, fault, over
from helix_store.doctor.scope import Scope, fetched
from helix_store.engine.database import Database
from helix_store.models import Session
from helix_store.models.fields import PayloadField

__all__ = ["app_checks"]


def app_checks() -> tuple[Check, ...]:
    """The checks of the tables that are registered."""
    return tuple(check for table in registered_tables() for check in _checks_of(table))


def _checks_of(table: AppTable) -> Iterator[Check]:
    payloads = [
        field.attname for field in table.model._meta.concrete_fields if isinstance(field, PayloadField)
    ]
    if payloads:
        yield _readable(table, payloads)
    if table.check is not None:
        yield _own(table)


def _readable(table: AppTable, payloads: list[str]) -> Check:
    owner = (table.parent, "pk") if table.is_of_tenant else _session_of(table)

    @over("unreadable-payload")
    def check(scope: Scope) -> Iterator[Fault]:
        for keys in _pages(scope, table):
            parent = "pk" if table.is_of_tenant else table.parent
            rows = scope.all_rows(table.model).filter(**{f"{parent}__in": keys})
            order = (table.parent, *table.order)
            for place, (tenant, name, *texts) in paged(scope, rows, order, (*owner, *payloads)):
                if any(text is not None and not can_read(partial(decode, text)) for text in texts):
                    shown = None if table.is_of_tenant else name
                    yield fault("unreadable-payload", table_of(table.model), tenant, shown, place_of(place))

    return check


def _own(table: AppTable) -> Check:
    """The check of a table, as one of the doctor."""
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


def _found(table: AppTable, db: Database, keys: list[int]) -> list[tuple[int, str]]:
    return [] if table.check is None else list(table.check(db, keys))


def _pages(scope: Scope, table: AppTable) -> Iterator[list[int]]:
    """The keys of sessions, or of the rows of a tenant; none of these belongs to one session."""
    if not table.is_of_tenant:
        yield from scope.pages(Session)
    elif scope.session_id is None:
        yield from scope.pages(table.model)


def _session_of(table: AppTable) -> tuple[str, str]:
    session = table.model._meta.get_field(table.parent).name
    return f"{session}__tenant", f"{session}__session_id"
