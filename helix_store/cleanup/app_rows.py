"""Rows of other apps that expire: which sweep a cleanup calls for which tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import NamedTuple

from django.db.models import Min, Model

from helix_store.app_tables import registered_tables
from helix_store.engine.database import Database

__all__ = ["Sweep", "sweeps"]


class Sweep(NamedTuple):
    """``delete`` deletes what has expired of one tenant in the table with this name of a record."""

    record: str
    tenant: str
    delete: Callable[[datetime], int]


def sweeps(alias: str, tenant: str | None) -> Iterator[Sweep]:
    """Those of one tenant, or of all tenants that have rows."""
    for table in registered_tables("tenant"):
        if table.sweep is not None:
            for each in _tenants(table.model, alias) if tenant is None else [tenant]:
                yield Sweep(table.record, each, partial(table.sweep, Database(alias, each)))


def _tenants(model: type[Model], alias: str) -> Iterator[str]:
    """The tenants of a table in order: each is one look-up in the unique index, which begins with them."""
    tenant = _first_tenant(model, alias)
    while tenant is not None:
        yield tenant
        tenant = _first_tenant(model, alias, tenant__gt=tenant)


def _first_tenant(model: type[Model], alias: str, **after: str) -> str | None:
    rows = model._base_manager.using(alias).filter(**after)
    first: str | None = Database(alias, "").query(lambda: rows.aggregate(first=Min("tenant"))["first"])
    return first
