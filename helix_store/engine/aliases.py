"""Which databases the app is in, and which one has a tenant. The project's routers decide both."""

from __future__ import annotations

from django.db import connections, router

from helix_store.models import Session

__all__ = ["alias_of", "app_aliases"]


def alias_of(tenant: str) -> str:
    """The database of a tenant: what the routers answer for writing sessions, with the hint ``tenant``."""
    return router.db_for_write(Session, tenant=tenant)


def app_aliases() -> list[str]:
    """The databases that the routers let the app migrate, in the order of ``DATABASES``."""
    return [alias for alias in connections if router.allow_migrate_model(alias, Session)]
