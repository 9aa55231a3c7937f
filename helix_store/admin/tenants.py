"""The tenants of a table. Nearly every index begins with the tenant: a filter without one reads the table."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from django.db.models import Max, Model, QuerySet

from helix_store.engine.database import Database
from helix_store.engine.statement import Statement, table

__all__ = ["MOST_TENANTS", "NEWEST_FILTERED", "known_tenants", "of_tenants"]

MOST_TENANTS: Final = 200
"""Tenants that are looked up. In a table with more, a filter without a tenant sees the newest rows only."""

NEWEST_FILTERED: Final = 100_000
"""Rows that a filter looks at where the tenants are too many to look at each."""


@lru_cache
def _tenants(model: type[Model]) -> Statement:
    rows = table(model)
    # A skip scan: one look-up in an index for each tenant.
    return Statement(
        f"""
        WITH RECURSIVE known(tenant, place) AS (
            SELECT min(tenant), 1 FROM {rows}
          UNION ALL
            SELECT (SELECT min(t.tenant) FROM {rows} AS t WHERE t.tenant > known.tenant), place + 1
            FROM known WHERE known.tenant IS NOT NULL AND place <= {MOST_TENANTS}
        )
        SELECT tenant FROM known WHERE tenant IS NOT NULL"""
    )


def known_tenants(model: type[Model], using: str) -> list[str]:
    """The tenants of a table in order, at most one more than `MOST_TENANTS`. One statement."""
    return [tenant for (tenant,) in Database(using, "").read(_tenants(model), {})]


def of_tenants(queryset: QuerySet[Any], tenants: list[str]) -> QuerySet[Any]:
    """The same rows in a form that the indexes by tenant serve; of too many tenants, the newest rows."""
    if len(tenants) > MOST_TENANTS:
        highest = queryset.model._base_manager.using(queryset.db).aggregate(key=Max("pk"))["key"] or 0
        return queryset.filter(pk__gt=highest - NEWEST_FILTERED)
    if len(tenants) == 1:
        return queryset.filter(tenant=tenants[0])
    return queryset.filter(tenant__in=tenants)
