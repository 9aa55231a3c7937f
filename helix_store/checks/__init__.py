"""System checks for settings and databases that would lose data or fail later. Only checks that take
``databases`` query a database, and only a database that ``check --database`` or ``migrate`` names.
"""

from __future__ import annotations

from collections.abc import Callable

from django.core.checks import CheckMessage

from helix_store.checks.postgresql import (
    check_citus,
    check_connections_under_asgi,
    check_orphaned_transactions,
    check_policies,
    check_postgres_durability,
    check_search_path,
)
from helix_store.checks.settings import (
    check_database_alias,
    check_settings,
    check_stream_permission,
)
from helix_store.checks.sqlite import (
    check_row_level_security,
    check_sqlite_settings,
    check_sqlite_version,
)
from helix_store.checks.tables import check_app_tables, check_table_prefix

__all__ = [
    "check_app_tables",
    "check_citus",
    "check_connections_under_asgi",
    "check_database",
    "check_database_alias",
    "check_orphaned_transactions",
    "check_policies",
    "check_postgres_durability",
    "check_row_level_security",
    "check_search_path",
    "check_settings",
    "check_sqlite_settings",
    "check_sqlite_version",
    "check_stream_permission",
    "check_table_prefix",
]


def check_database(alias: str, *, deploy: bool = False) -> list[CheckMessage]:
    """Run every check that concerns one database, which is queried for its actual settings. ``deploy`` adds
    what ``check --deploy`` adds. If the project's settings cannot be read, only this error is returned,
    because the other checks need them.
    """
    of_settings = check_settings()
    if any(message.id in ("helix_store.E002", "helix_store.E004") for message in of_settings):
        return of_settings
    checks: list[Callable[..., list[CheckMessage]]] = [
        check_database_alias,
        check_sqlite_settings,
        *([check_sqlite_version] if deploy else []),
        *([check_orphaned_transactions] if deploy else []),
        check_connections_under_asgi,
        check_citus,
        check_stream_permission,
        check_postgres_durability,
        check_search_path,
        check_policies,
        check_table_prefix,
    ]
    return of_settings + [message for check in checks for message in check(databases=[alias], only=alias)]
