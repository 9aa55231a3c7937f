"""System checks of the databases."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Tags, Warning, register
from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.catalogue import TRANSIENT_TABLES, other_references, tables
from helix_store.conf import TENANT_POLICY
from helix_store.engine.database import app_aliases, app_connections

Databases = Sequence[str] | None

_DURABILITY: Final = """
    SELECT current_setting('synchronous_commit'), current_setting('fsync'),
        current_setting('full_page_writes')"""

_UNLOGGED: Final = """
    SELECT c.relname FROM pg_catalog.pg_class AS c
    WHERE c.relname = ANY(%s::text[]) AND c.relpersistence = 'u' AND pg_catalog.pg_table_is_visible(c.oid)
    ORDER BY c.relname"""


# A policy without ENABLE ROW LEVEL SECURITY has no effect. One of an earlier version has the same expression
# for rows that are read and rows that are written.
_POLICIES: Final = """
    SELECT c.relname, c.relrowsecurity AND p.oid IS NOT NULL,
        pg_catalog.pg_get_expr(p.polqual, p.polrelid) = pg_catalog.pg_get_expr(p.polwithcheck, p.polrelid)
    FROM pg_catalog.pg_class AS c
    LEFT JOIN pg_catalog.pg_policy AS p ON p.polrelid = c.oid AND p.polname = %s
    WHERE c.relname = ANY(%s::text[]) AND c.relkind IN ('r', 'p') AND pg_catalog.pg_table_is_visible(c.oid)
    ORDER BY c.relname"""


def _queried(databases: Sequence[str] | None) -> list[BaseDatabaseWrapper]:
    """Return connections to those of ``databases`` that may contain the app's tables."""
    return [each for each in app_connections("postgresql") if each.alias in (databases or ())]


def _rows(connection: BaseDatabaseWrapper, statement: str, *parameters: Any) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        rows: list[Any] = cursor.fetchall()
    return rows


def _tables() -> list[str]:
    return [table.model._meta.db_table for table in tables()]


_WITHOUT_PERSISTENCE: Final = {
    "postgresql": 'Set CONN_MAX_AGE = 0 and use the pool: "OPTIONS": {"pool": True}.',
    "sqlite": "Set CONN_MAX_AGE = 0: opening the file again costs little.",
}


@register("helix_store")
def check_connections_under_asgi(only: str | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Report W005, persistent connections in an ASGI project, or I005, in one without ASGI_APPLICATION."""
    served_by_asgi = bool(getattr(settings, "ASGI_APPLICATION", None))
    level, id_ = (Warning, "helix_store.W005") if served_by_asgi else (Info, "helix_store.I005")
    return [
        level(
            f"The database {connection.alias!r} keeps connections open (CONN_MAX_AGE): under ASGI each "
            "request has a new thread, so connections are not reused and accumulate.",
            hint=_WITHOUT_PERSISTENCE.get(connection.vendor, "Set CONN_MAX_AGE = 0."),
            id=id_,
        )
        for connection in app_connections(None, only)
        if connection.settings_dict.get("CONN_MAX_AGE", 0) != 0 and not _is_in_memory(connection)
    ]


def _is_in_memory(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a database lives in its connection, which Django then never closes."""
    return connection.vendor == "sqlite" and connection.is_in_memory_db()  # type: ignore[attr-defined]


@register("helix_store")
def check_citus_settings(only: str | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Report E016, settings with which Citus does not work."""
    return [
        Error(f"HELIX_STORE_CITUS of the database {alias!r}: {problem}.", hint=hint, id="helix_store.E016")
        for alias, problem, hint in _citus_problems()
        if only in (None, alias)
    ]


@register(Tags.database, "helix_store")
def check_citus(databases: Databases = None, **kwargs: Any) -> list[CheckMessage]:
    """Report W009, Citus in a database without `HELIX_STORE_CITUS`."""
    return [
        Warning(
            f"The PostgreSQL database {connection.alias!r} has Citus: if it distributes the tables of "
            "helix_store, locks, streams, usage and steps are refused.",
            hint="Set HELIX_STORE_CITUS = True in its entry of DATABASES; or silence this check.",
            id="helix_store.W009",
        )
        for connection in _queried(databases)
        if not conf.is_citus(connection.settings_dict)
        if _rows(connection, "SELECT 1 FROM pg_catalog.pg_extension WHERE extname = 'citus'")
    ]


def _citus_problems() -> Iterator[tuple[str, str, str]]:
    """Yield the aliases for which the form for Citus does not work, or is not safe, each with the reason and
    a hint. Sequences, advisory locks and notifications belong to one node, so every process must reach the
    tables of an alias through the same node.
    """
    nodes: dict[tuple[Any, ...], tuple[str, Any]] = {}
    for alias in app_aliases():
        entry = connections[alias].settings_dict
        if entry.get("HELIX_STORE_CITUS", False) not in (True, False):
            yield alias, "the value is neither True nor False", "Write True or False."
        if not conf.is_citus(entry):
            continue
        if connections[alias].vendor != "postgresql":
            yield alias, "the database is not PostgreSQL", "Remove the key."
        if conf.row_level_security():
            problem = (
                "the policies of ROW_LEVEL_SECURITY are checked on the node with the tables, which does not "
                "know the tenant"
            )
            hint = "Use a schema for each group of tenants instead, or remove one of the two settings."
            yield alias, problem, hint
        options = entry["OPTIONS"]
        host = options.get("host") or options.get("hostaddr") or entry["HOST"]
        node = f"{host}:{options.get('port') or entry['PORT']}"
        hint = "Name one node, the same one in every process: the coordinator."
        if "," in node:
            yield alias, "it has several hosts: ids and locks are those of one node", hint
        tables_of = (entry["NAME"], entry["USER"], options.get("options"))
        other, other_node = nodes.setdefault(tables_of, (alias, node))
        if other_node != node:
            yield alias, f"it has the tables of {other!r} and reaches them through another node", hint


@register(Tags.database, "helix_store")
def check_postgres_durability(databases: Databases = None, **kwargs: Any) -> list[CheckMessage]:
    """Report E010, commits before they are on disk, and E011 and E014, tables that a crash can damage."""
    messages: list[CheckMessage] = []
    for connection in _queried(databases):
        ((synchronous_commit, *of_files),) = _rows(connection, _DURABILITY)
        unlogged = _rows(connection, _UNLOGGED, _tables())
        if synchronous_commit == "off":
            messages.append(
                Error(
                    f"The PostgreSQL database {connection.alias!r} runs with synchronous_commit=off: a crash "
                    "loses steps that were acknowledged.",
                    hint="Switch synchronous_commit on for this database or its role.",
                    id="helix_store.E010",
                )
            )
        messages += [
            Error(
                f"The PostgreSQL database {connection.alias!r} runs with {name}=off: a crash can corrupt it.",
                hint=f"Switch {name} on.",
                id="helix_store.E011",
            )
            for name, value in zip(("fsync", "full_page_writes"), of_files, strict=True)
            if value == "off"
        ]
        messages += [
            Error(
                f"The table {name} in the PostgreSQL database {connection.alias!r} is UNLOGGED: a crash "
                "empties it.",
                hint=f"Run ALTER TABLE {name} SET LOGGED.",
                id="helix_store.E014",
            )
            for (name,) in unlogged
        ]
    return messages


@register(Tags.database, "helix_store")
def check_search_path(databases: Databases = None, **kwargs: Any) -> list[CheckMessage]:
    """Report E015: a pooler has dropped the search path in the settings."""
    return [
        Error(
            f"The settings of the PostgreSQL database {connection.alias!r} ask for search_path="
            f'{dropped[0]}, but the server uses "{dropped[1]}": a pooler has dropped the option, '
            "so tables of another schema are read and written.",
            hint="Use a database or a role for each schema: ALTER ROLE … SET search_path = ….",
            id="helix_store.E015",
        )
        for connection in _queried(databases)
        if (dropped := _dropped_search_path(connection))
    ]


_SEARCH_PATH: Final = re.compile(r"(?:^|\s)(?:-c\s*|--)search_path=((?:\\.|[^\s\\])*)")
"""The value in the ``options`` of libpq, where a backslash escapes a space."""


def _dropped_search_path(connection: BaseDatabaseWrapper) -> tuple[str, str] | None:
    """Return the search path in ``OPTIONS`` and the actual one, if the first has not reached the server."""
    found = _SEARCH_PATH.findall(str(connection.settings_dict["OPTIONS"].get("options") or ""))
    if not found:
        return None
    # The last option counts.
    asked = re.sub(r"\\(.)", r"\1", found[-1])
    ((actual,),) = _rows(connection, "SELECT pg_catalog.current_setting('search_path')")
    return None if _schemas_in(actual) == _schemas_in(asked) else (asked, actual)


def _schemas_in(search_path: str) -> list[str]:
    return [name.strip().strip('"') for name in search_path.split(",")]


@register(Tags.database, "helix_store")
def check_policies(databases: Databases = None, **kwargs: Any) -> list[CheckMessage]:
    """Report W010: tables without the policy of row-level security, or with that of an earlier version, in a
    database or project that uses it. It is a warning, because ``migrate`` must run to add the policies.
    """
    messages: list[CheckMessage] = []
    names = [*_tables(), *(each.name for each in TRANSIENT_TABLES)]
    with_references = {each.model._meta.db_table for each in tables() if other_references(each)}
    for connection in _queried(databases):
        policies = _rows(connection, _POLICIES, TENANT_POLICY, names)
        has_policy = {name: is_there for name, is_there, _ in policies}
        outdated = [name for name, is_there, is_same in policies if is_there and is_same]
        outdated = [name for name in outdated if name in with_references]
        if outdated:
            messages.append(
                Warning(
                    f"The policies of these tables in the PostgreSQL database {connection.alias!r} are those "
                    "of an earlier version, so a role can store rows that refer to another tenant's: "
                    f"{', '.join(outdated)}.",
                    hint="Write another migration with EnableRowLevelSecurity.",
                    id="helix_store.W010",
                )
            )
        without = [name for name, is_there in has_policy.items() if not is_there]
        uses_policies = any(is_there for name, is_there in has_policy.items() if name in _tables())
        if without and (conf.row_level_security() or uses_policies):
            messages.append(
                Warning(
                    f"These tables in the PostgreSQL database {connection.alias!r} have no policy for "
                    f"row-level security, so a role can read the rows of every tenant: {', '.join(without)}.",
                    hint="Write another migration with EnableRowLevelSecurity, which depends on the newest "
                    "migrations of helix_store and of the apps of these tables.",
                    id="helix_store.W010",
                )
            )
    return messages


# The names that helix_move gives to the functions of its triggers, in this version and in earlier ones.
_OPEN_FUNCTIONS: Final = """
    SELECT p.oid::pg_catalog.regprocedure::text FROM pg_catalog.pg_proc AS p
    WHERE p.proname ~ '^helix_fence_[0-9a-f]{24}(_log)?$' AND p.prosecdef
        AND p.prorettype = 'pg_catalog.trigger'::pg_catalog.regtype AND EXISTS (
            SELECT 1 FROM pg_catalog.aclexplode(
                COALESCE(p.proacl, pg_catalog.acldefault('f', p.proowner))
            ) AS given WHERE given.grantee <> p.proowner
        )
    ORDER BY 1"""


@register(Tags.database, "helix_store")
def check_functions(databases: Databases = None, **kwargs: Any) -> list[CheckMessage]:
    """Report E018: functions of moves that run with their owner's rights, and that another role may use."""
    return [
        Error(
            f"Roles other than their owner may execute {len(found)} functions of moves in the PostgreSQL "
            f"database {connection.alias!r}, and so act with the rights of their owner: "
            f"{', '.join(name for (name,) in found)}.",
            hint="An earlier version left them there. Apply the migrations of helix_store as their owner, or "
            "run REVOKE ALL ON FUNCTION … FROM PUBLIC for each of them.",
            id="helix_store.E018",
        )
        for connection in _queried(databases)
        if (found := _rows(connection, _OPEN_FUNCTIONS))
    ]


_LONGEST_KEEPALIVE_SECONDS: Final = 900
# A socket without TCP has keepalives of 0. Before PostgreSQL 17, the setting that it introduced is NULL.
_BOUNDS: Final = """
    SELECT current_setting('idle_in_transaction_session_timeout') <> '0'
        OR coalesce(current_setting('transaction_timeout', true), '0') <> '0'
        OR current_setting('tcp_keepalives_idle')::integer
            + current_setting('tcp_keepalives_interval')::integer
            * current_setting('tcp_keepalives_count')::integer BETWEEN 1 AND %s"""


@register(Tags.database, "helix_store", deploy=True)
def check_orphaned_transactions(databases: Databases = None, **kwargs: Any) -> list[CheckMessage]:
    """Report W011, only for ``check --deploy``: a vanished client's transaction keeps its locks for hours."""
    return [
        Warning(
            f"Nothing ends a transaction of the PostgreSQL database {connection.alias!r} whose client "
            "is gone: its session stays locked for hours.",
            hint='Set idle_in_transaction_session_timeout, for example with "OPTIONS": {"options": '
            '"-c idle_in_transaction_session_timeout=60s"}, or for the role behind a pooler.',
            id="helix_store.W011",
        )
        for connection in _queried(databases)
        if not _rows(connection, _BOUNDS, _LONGEST_KEEPALIVE_SECONDS)[0][0]
    ]


_SET_OPTIONS: Final = 'Set "OPTIONS": helix_store.sqlite_options() in the settings of this database.'
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
    """Report missing IMMEDIATE transactions (W001), missing WAL (W002) and commits without sync (W003).

    All three have one remedy, so a database gets one warning, with the number of the first problem. A
    database in memory, such as Django's for tests, can have no WAL and survives no crash, so it gets none.
    """
    messages: list[CheckMessage] = []
    for connection in app_connections("sqlite", only):
        if _is_in_memory(connection):
            continue
        options = connection.settings_dict.get("OPTIONS", {})
        mode = str(options.get("transaction_mode") or "").upper()
        journal_mode, synchronous = _sqlite_pragmas(connection, ask=connection.alias in (databases or ()))
        # This also applies to a backport of the fix: a project may compare version numbers by itself.
        avoids_wal = (
            sqlite3.sqlite_version_info < conf.FIRST_SAFE_SQLITE and journal_mode in _DURABLE_WITHOUT_WAL
        )
        problems = {
            "helix_store.W001": mode not in ("IMMEDIATE", "EXCLUSIVE"),
            "helix_store.W002": journal_mode != "wal" and not avoids_wal,
            "helix_store.W003": synchronous not in ("full", "extra", "2", "3"),
        }
        found = [
            id_
            for id_, is_found in problems.items()
            if is_found and id_ not in settings.SILENCED_SYSTEM_CHECKS
        ]
        if found:
            described = " It ".join(_PROBLEMS[id_] for id_ in found)
            messages.append(
                Warning(
                    f"The SQLite database {connection.alias!r} {described}",
                    hint=_SET_OPTIONS,
                    id=found[0],
                )
            )
    return messages


def _sqlite_pragmas(connection: BaseDatabaseWrapper, *, ask: bool) -> tuple[str, str]:
    """Return the journal mode and synchronous level, from the database if ``ask``, else from its settings.

    Django 6.1 asks with every command, also where the file cannot be opened: that is not for a check to say.
    """
    if ask:
        with suppress(OperationalError), connection.cursor() as cursor:
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


@register("helix_store", deploy=True)
def check_sqlite_version(
    databases: Databases = None, only: str | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Report W004, only for ``check --deploy``: WAL mode with an SQLite that has the WAL-reset bug."""
    if not conf.has_the_wal_reset_bug():
        return []
    return [
        Warning(
            f"The SQLite database {connection.alias!r} runs on SQLite {sqlite3.sqlite_version} in WAL mode, "
            "which can corrupt it when two connections meet at a checkpoint.",
            hint=f"{_SET_OPTIONS} They choose a journal mode in which readers and writers wait for each "
            "other. Or use SQLite 3.51.3 or newer, or PostgreSQL.",
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
