"""The schema version of a database."""

from __future__ import annotations

from django.db.migrations.recorder import MigrationRecorder

from helix_store.engine.database import Database

__all__ = ["LATEST_VERSION", "current_version"]

LATEST_VERSION = 7
"""The newest schema version of the source documents. The migrations from 0008 on are additions to it."""


def current_version(using: str | None = None) -> int:
    """The schema version (1 to 7) of a database according to its applied migrations; 0 if there are none.

    By default, ``using`` is the database of the stores. Runs one query. Raises the same errors as a read.
    Source: the migrations table of `@helix-agents/store-postgres`.
    """
    db = Database(using, tenant="")
    recorded = db.query(MigrationRecorder(db.connection).applied_migrations)
    applied = {int(name[:4]) for app, name in recorded if app == "helix_store"}
    version = 0
    while version < LATEST_VERSION and version + 1 in applied:
        version += 1
    return version
