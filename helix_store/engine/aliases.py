"""The databases of the app and of a tenant, according to the project's routers."""

from __future__ import annotations

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.models import Session


def alias_of(tenant: str) -> str:
    """Return the database of a tenant: the one to which the routers send writes with the hint ``tenant``."""
    return router.db_for_write(Session, tenant=tenant)


def app_aliases() -> list[str]:
    """Return the databases that the routers let the app migrate, in the order of ``DATABASES``."""
    return [alias for alias in connections if router.allow_migrate_model(alias, Session)]


def app_connections(vendor: str, only: str | None = None) -> list[BaseDatabaseWrapper]:
    """Return connections to the databases that may contain the app's tables, or to one such database."""
    return [
        connections[alias]
        for alias in app_aliases()
        if connections[alias].vendor == vendor and only in (None, alias)
    ]
