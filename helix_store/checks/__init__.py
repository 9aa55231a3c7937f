"""System checks for settings and databases that would lose data or fail later.

A check that queries PostgreSQL has the tag ``database``, so it runs only for databases that ``migrate`` or
``check --database`` names: Django 6.1 passes all databases to the other checks, with every command.
"""

from __future__ import annotations

from collections.abc import Callable

from django.core.checks import CheckMessage

from helix_store.checks import databases, settings

__all__ = ["check_database", "databases", "settings"]


def check_database(alias: str, *, deploy: bool = False) -> list[CheckMessage]:
    """Run every check that concerns one database, which is queried for its actual settings. ``deploy`` adds
    the checks that ``check --deploy`` adds. If the project's settings cannot be read, only this error is
    returned, because the other checks need them.
    """
    of_settings = settings.check_settings()
    if any(message.id in ("helix_store.E002", "helix_store.E004") for message in of_settings):
        return of_settings
    checks: list[Callable[..., list[CheckMessage]]] = [
        settings.check_database_alias,
        settings.check_routed_tables,
        databases.check_sqlite_settings,
        *([databases.check_sqlite_version] if deploy else []),
        *([databases.check_orphaned_transactions] if deploy else []),
        databases.check_connections_under_asgi,
        databases.check_citus_settings,
        databases.check_citus,
        settings.check_stream_permission,
        settings.check_references,
        databases.check_postgres_durability,
        databases.check_search_path,
        databases.check_policies,
        databases.check_functions,
        settings.check_table_prefix,
        settings.check_migrations,
    ]
    return of_settings + [message for check in checks for message in check(databases=[alias], only=alias)]
