"""The schema version of a database."""

from __future__ import annotations

from django.db.migrations.recorder import MigrationRecorder

from helix_store.conf import table_name
from helix_store.engine.database import Database, app_aliases
from helix_store.exceptions import InvalidQuery

__all__ = ["LATEST_VERSION", "current_version"]

LATEST_VERSION = 7
"""The newest schema version of the source documents. The migrations from 0008 on are additions to it."""


def current_version(using: str | None = None) -> int:
    """The schema version (1 to 7) of a database according to its applied migrations; 0 if there are none.

    By default, ``using`` is the database of the stores. Runs one query. Raises the same errors as a read.
    Source: the migrations table of `@helix-agents/store-postgres`.
    """
    db = Database(using, tenant="")
    if not _is_app_in(db):
        return 0
    recorded = db.query(MigrationRecorder(db.connection).applied_migrations)
    applied = {int(name[:4]) for app, name in recorded if app == "helix_store"}
    version = 0
    while version < LATEST_VERSION and version + 1 in applied:
        version += 1
    return version


def require_app(db: Database) -> None:
    """Raise `InvalidQuery` if the routers keep the app out of the database."""
    if not _is_app_in(db):
        known = ", ".join(app_aliases())
        raise InvalidQuery(f"The app is not in a database {db.alias!r}: {known}.", path="using")


def _is_app_in(db: Database) -> bool:
    """Return whether the database may have the tables of the app.

    Django also records migrations as applied where the routers let them create no table. A standby has
    tables, although the routers let nobody migrate it.
    """
    return db.alias in app_aliases() or db.query(lambda: _has_tables(db))


def _has_tables(db: Database) -> bool:
    return table_name("session") in db.connection.introspection.table_names()
