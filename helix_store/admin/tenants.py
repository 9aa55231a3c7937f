"""The tenants of a table. Nearly every index begins with it, so other filters scan the table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from django.db.models import Max, Model, QuerySet

from helix_store.engine.database import Database
from helix_store.engine.expressions import all_tenants, tenant_parameter
from helix_store.engine.statement import Statement, table

MOST_TENANTS: Final = 200
"""The maximum number of listed tenants. With more, a filter without a tenant only covers the newest rows."""

NEWEST_FILTERED: Final = 100_000
"""The number of rows that a filter covers if there are too many tenants to search each of them."""


@lru_cache
def _tenants(model: type[Model]) -> Statement:
    return Statement(all_tenants(table(model), most=MOST_TENANTS))


def known_tenants(model: type[Model], using: str) -> list[str]:
    """Return the tenants of a table in order, at most one more than `MOST_TENANTS`.

    This takes one statement.
    """
    return [tenant for (tenant,) in Database(using, "").read(_tenants(model), {})]


def of_tenants(queryset: QuerySet[Any], tenants: list[str]) -> QuerySet[Any]:
    """Return the rows in a form that uses the indexes by tenant; the newest rows if there are too many."""
    if len(tenants) > MOST_TENANTS:
        return newest_rows(queryset, NEWEST_FILTERED)[0]
    if len(tenants) == 1:
        return queryset.filter(tenant=tenants[0])
    return queryset.filter(tenant__in=tenants)


def newest_rows(queryset: QuerySet[Any], count: int) -> tuple[QuerySet[Any], bool]:
    """Return the rows that are among the newest of their table, and whether the table has others."""
    highest = queryset.model._base_manager.using(queryset.db).aggregate(key=Max("pk"))["key"] or 0
    return queryset.filter(pk__gt=highest - count), highest > count


def keys_in_order(
    rows: QuerySet[Any], tenants: Sequence[str], order: Sequence[str], *, start: int, stop: int
) -> list[Any]:
    """Return the keys of these tenants' rows from ``start`` to ``stop`` in an order, such as by time.

    This takes one statement: the database merges the tenants' rows, each in the order of an index that begins
    with the tenant.
    """
    if start >= stop:
        return []
    columns = {name.removeprefix("-") for name in order}
    values = rows.order_by().values("id", *sorted(columns - {"id"}))
    parts = [values.filter(tenant=tenant_parameter(tenant)) for tenant in tenants]
    if Database(rows.db, "").is_postgresql:
        # Without statistics, PostgreSQL would sort all rows. SQLite merges the rows itself, without limits.
        parts = [part.order_by(*order)[:stop] for part in parts]
    first, *others = parts
    merged = first.union(*others, all=True).order_by(*order)
    return [row["id"] for row in merged[start:stop]]
