"""Checks for SQLite databases: settings with which they lose or refuse writes."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from django.core.checks import CheckMessage, Warning, register
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.engine.aliases import app_connections

Databases = Sequence[str] | None

_FIRST_SAFE_SQLITE: Final = (3, 51, 3)
# https://sqlite.org/wal.html#walresetbug
_BACKPORTS_OF_THE_FIX: Final = ((3, 44, 6), (3, 50, 7))
_OPTIONS: Final = (
    '"OPTIONS": {{"timeout": 20, "transaction_mode": "IMMEDIATE", '
    '"init_command": "PRAGMA journal_mode={}; PRAGMA synchronous=FULL;"}}'
)
_SET_WAL: Final = f"Set {_OPTIONS.format('WAL')}."
# Not DELETE: with synchronous=FULL, a power failure after a commit may bring the deleted journal back.
_AVOID_WAL: Final = (
    f"Use SQLite 3.51.3 or newer, or PostgreSQL; else set {_OPTIONS.format('TRUNCATE')}, with which readers "
    "and writers wait for each other."
)
_PROBLEMS: Final = {
    "helix_store.W001": "begins deferred transactions: with several writers, most fail at once with "
    '"database is locked".',
    "helix_store.W002": "is not in WAL mode: readers block writers.",
    "helix_store.W003": "does not set synchronous=FULL: a power failure may lose steps that were "
    "acknowledged.",
}
_DURABLE_WITHOUT_WAL: Final = ("truncate", "persist")


@register("helix_store")
def check_sqlite_settings(
    databases: Databases = None, only: str | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Report missing IMMEDIATE transactions (W001), missing WAL (W002) and commits without sync (W003)."""
    messages: list[CheckMessage] = []
    hint = _AVOID_WAL if _has_the_wal_reset_bug() else _SET_WAL
    for connection in app_connections("sqlite", only):
        options = connection.settings_dict.get("OPTIONS", {})
        mode = str(options.get("transaction_mode") or "").upper()
        journal_mode, synchronous = _sqlite_pragmas(connection, ask=connection.alias in (databases or ()))
        # This also applies to a backport of the fix, so a project only has to compare version numbers.
        avoids_wal = sqlite3.sqlite_version_info < _FIRST_SAFE_SQLITE and journal_mode in _DURABLE_WITHOUT_WAL
        problems = {
            "helix_store.W001": mode not in ("IMMEDIATE", "EXCLUSIVE"),
            "helix_store.W002": journal_mode != "wal" and not avoids_wal,
            "helix_store.W003": synchronous not in ("full", "extra", "2", "3"),
        }
        messages += [
            Warning(
                f"The SQLite database {connection.alias!r} {_PROBLEMS[id_]}",
                hint=hint,
                id=id_,
            )
            for id_, is_found in problems.items()
            if is_found
        ]
    return messages


def _sqlite_pragmas(connection: BaseDatabaseWrapper, *, ask: bool) -> tuple[str, str]:
    """Return the journal mode and synchronous level, from the database if ``ask``, else from its settings."""
    if ask:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode")
            journal_mode = cursor.fetchone()[0]
            cursor.execute("PRAGMA synchronous")
            return str(journal_mode).lower(), str(cursor.fetchone()[0])
    command = str(connection.settings_dict.get("OPTIONS", {}).get("init_command") or "")
    pragmas = {
        name.lower(): value.lower()
        for name, value in re.findall(r"(?i)PRAGMA\s+(\w+)\s*=\s*'?(\w+)", command)
    }
    return pragmas.get("journal_mode", ""), pragmas.get("synchronous", "")


def _has_the_wal_reset_bug() -> bool:
    version = sqlite3.sqlite_version_info
    has_a_backport = any(fixed <= version < (3, fixed[1] + 1) for fixed in _BACKPORTS_OF_THE_FIX)
    return version < _FIRST_SAFE_SQLITE and not has_a_backport


@register("helix_store", deploy=True)
def check_sqlite_version(
    databases: Databases = None, only: str | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Report W004, only for ``check --deploy``: WAL mode with an SQLite that has the WAL-reset bug."""
    if not _has_the_wal_reset_bug():
        return []
    return [
        Warning(
            f"The SQLite database {connection.alias!r} runs on SQLite {sqlite3.sqlite_version} in WAL mode, "
            "which can corrupt it when two connections meet at a checkpoint.",
            hint=_AVOID_WAL,
            id="helix_store.W004",
        )
        for connection in app_connections("sqlite", only)
        if _sqlite_pragmas(connection, ask=connection.alias in (databases or ()))[0] == "wal"
    ]


@register("helix_store")
def check_row_level_security(only: str | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Report W007: row-level security for a database that does not support it."""
    if not conf.row_level_security():
        return []
    return [
        Warning(
            f'HELIX_STORE["ROW_LEVEL_SECURITY"] has no effect on the SQLite database {connection.alias!r}: '
            "SQLite has no policies, so only the stores' queries separate tenants.",
            hint="Use PostgreSQL, or a database file for each tenant; or remove the setting.",
            id="helix_store.W007",
        )
        for connection in app_connections("sqlite", only)
    ]
