"""The databases under test: which there are, and how a test gets committed access to one."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from asgiref.sync import SyncToAsync
from django.apps import apps
from django.conf import settings
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.catalogue import registered_tables

__all__ = [
    "ALIASES",
    "CommittedDatabase",
    "close_connections",
    "delete_all_rows",
    "forget_statistics",
    "fresh_tenant",
    "stop_keep_alives",
]

ALIASES: dict[str, str] = {
    vendor: alias
    for vendor, alias in {"sqlite": "default", "postgres": "postgres"}.items()
    if vendor in settings.TEST_DATABASES
}


@dataclass(frozen=True, kw_only=True)
class CommittedDatabase:
    """A test's access to one database: what it writes is committed, seen by others, and never flushed.

    ``tenant`` belongs to this test alone; a test that keeps to it meets no rows of another one.
    """

    alias: str
    tenant: str

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connections[self.alias]

    @property
    def vendor(self) -> str:
        """``"sqlite"`` or ``"postgresql"``."""
        return self.connection.vendor

    @contextmanager
    def second_connection(self) -> Iterator[BaseDatabaseWrapper]:
        """A connection beside the thread's own one, to see what is committed or to hold a lock against it."""
        connection = connections.create_connection(self.alias)
        try:
            yield connection
        finally:
            connection.close()


def fresh_tenant() -> str:
    return f"tenant-{uuid.uuid4().hex}"


def delete_all_rows(alias: str) -> None:
    """Empty every table of the app, and those that other apps have registered.

    DELETE and not TRUNCATE: for tables of a few rows it takes a fraction of the time on PostgreSQL.
    The foreign keys are checked at the commit, so the order does not matter.
    """
    registered = [table.model for table in registered_tables()]
    models = (*apps.get_app_config("helix_store").get_models(include_auto_created=True), *registered)
    tables = [connections[alias].ops.quote_name(each._meta.db_table) for each in models if each._meta.managed]
    statements = [f"DELETE FROM {table}" for table in tables]
    if connections[alias].vendor == "postgresql":
        # The driver of SQLite takes one statement at a time.
        statements = ["; ".join(statements)]
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def forget_statistics(alias: str) -> None:
    """Delete what ANALYZE left on SQLite: no test's statements are planned by the rows of another one.

    SQLite keeps statistics in a table, and each connection in its memory. PostgreSQL gathers its own.
    """
    connection = connections[alias]
    if connection.vendor != "sqlite" or connection.connection is None or connection.in_atomic_block:
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'")
        if cursor.fetchone() is None:
            return
        # The table stays behind. A deletion would wait for a thread or process that is still writing.
        cursor.execute("SELECT 1 FROM sqlite_stat1 LIMIT 1")
        if cursor.fetchone() is None:
            return
        cursor.execute("DELETE FROM sqlite_stat1")
    close_connections()


def stop_keep_alives() -> None:
    """Stop refreshing the locks that a test has not released, as one that abandons a turn does.

    Their threads would ask the database between two tests, where pytest-django allows nobody to.
    """
    for thread in threading.enumerate():
        if thread.name == "helix_store keep-alive":
            keep_alive = getattr(getattr(thread, "_target", None), "__self__", None)
            if keep_alive is not None:  # None in a thread that is ending
                keep_alive.stop()


def end_other_connections(alias: str) -> None:
    """End the connections to a PostgreSQL database that processes which tests have killed left behind.

    The server notices a dead client only when it writes to it, and drops no database that is in use.
    """
    connection = connections[alias]
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )


def close_connections(*, only_unclean: bool = False) -> None:
    """Close the connections of this thread and of the thread in which async tests run their database code.

    ``only_unclean`` keeps those to PostgreSQL that are outside of any transaction; SQLite's cost nothing to
    open, and some tests change their settings.
    """
    close = _close_unclean if only_unclean else connections.close_all
    close()
    SyncToAsync.single_thread_executor.submit(close).result()


def _close_unclean() -> None:
    for connection in connections.all(initialized_only=True):
        is_clean = connection.autocommit and not (connection.in_atomic_block or connection.errors_occurred)
        if connection.vendor == "sqlite" or not is_clean:
            connection.close()
