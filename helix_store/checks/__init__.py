"""System checks for settings and databases that would lose data or fail later. Only checks that take
``databases`` query a database, and only one that ``check --database`` or ``migrate`` names.
"""

from __future__ import annotations

from collections.abc import Callable

from django.core.checks import CheckMessage

from helix_store.checks import postgresql, settings, sqlite, tables

__all__ = ["check_database", "postgresql", "settings", "sqlite", "tables"]


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
        sqlite.check_sqlite_settings,
        *([sqlite.check_sqlite_version] if deploy else []),
        *([postgresql.check_orphaned_transactions] if deploy else []),
        postgresql.check_connections_under_asgi,
        postgresql.check_citus,
        settings.check_stream_permission,
        postgresql.check_postgres_durability,
        postgresql.check_search_path,
        postgresql.check_policies,
        tables.check_table_prefix,
    ]
    return of_settings + [message for check in checks for message in check(databases=[alias], only=alias)]
