"""``migrate``, for one process at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

from django.core.management.commands import migrate
from django.db import connections

from helix_store.migrations._operations import refuse_before_the_first

__all__ = ["Command", "migration_lock"]

_LOCK_KEY: Final = int.from_bytes(hashlib.sha256(b"helix_store.migrate").digest()[:8], signed=True)


@contextmanager
def migration_lock(alias: str) -> Iterator[None]:
    """Make other processes wait that migrate the same PostgreSQL database; do nothing on SQLite.

    A second connection holds a transaction-scoped advisory lock. It works behind a pooler in transaction
    mode, and the server releases it when the process ends.
    """
    if connections[alias].vendor != "postgresql":
        yield
        return
    connection = connections[alias].copy()
    try:
        connection.set_autocommit(False)
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK_KEY])
        yield
        connection.rollback()
    finally:
        connection.close()


class Command(migrate.Command):
    """Django's command, with a lock for the processes that migrate one database, that loses no rows.

    Django reads which migrations are missing before it applies them, so two processes that migrate a new
    database at once both create its tables. With the lock the second one waits and has nothing to do.

    If a migration of the app would lose rows backwards, the command takes none back.
    """

    def handle(self, *args: Any, **options: Any) -> str | None:
        # With --fake no table is touched.
        refusing = nullcontext() if options["fake"] else refuse_before_the_first()
        with migration_lock(options["database"]), refusing:
            return super().handle(*args, **options)
