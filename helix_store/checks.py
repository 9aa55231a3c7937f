"""System checks of settings and databases that would lose data or fail later.

Only checks that take ``databases`` query a database, and only one that ``check --database`` or ``migrate``
names.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder
from django.urls import URLResolver, get_resolver

from helix_store import conf
from helix_store.app_tables import registered_tables
from helix_store.engine.aliases import alias_of, app_aliases
from helix_store.engine.entry_nodes import citus_problems, has_citus
from helix_store.engine.poolers import dropped_search_path
from helix_store.models import Session
from helix_store.sessions.database.children import children_of_sessions
from helix_store.transfer.layout import app_part

__all__ = [
    "check_app_tables",
    "check_citus",
    "check_connections_under_asgi",
    "check_database",
    "check_database_alias",
    "check_postgres_durability",
    "check_row_level_security",
    "check_search_path",
    "check_settings",
    "check_sqlite_settings",
    "check_sqlite_version",
    "check_stream_permission",
    "check_table_prefix",
]

Apps = Sequence[AppConfig] | None

_FIRST_SAFE_SQLITE: Final = (3, 51, 3)
# https://sqlite.org/wal.html#walresetbug
_BACKPORTS_OF_THE_FIX: Final = ((3, 44, 6), (3, 50, 7))
_FIRST_TABLES: Final = ("session", "message", "checkpoint", "run", "lock", "usage_entry")
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
_DURABLE_WITHOUT_WAL: Final = ("truncate", "persist")
_UNLOGGED: Final = """
    SELECT c.relname FROM pg_catalog.pg_class AS c
    WHERE c.relname = ANY(%s::text[]) AND c.relpersistence = 'u' AND pg_catalog.pg_table_is_visible(c.oid)
    ORDER BY c.relname"""


@register("helix_store")
def check_settings(app_configs: Apps = None, **kwargs: Any) -> list[CheckMessage]:
    """E001 unknown keys, E002 an invalid table prefix, E004 invalid values."""
    try:
        configured = conf.configured()
    except ImproperlyConfigured as exc:
        return [Error(str(exc), hint='Write HELIX_STORE = {"KEY": value}.', id="helix_store.E004")]
    messages: list[CheckMessage] = [
        Error(
            f"HELIX_STORE has no setting {key!r}.",
            hint=f"The settings are {', '.join(conf.DEFAULTS)}.",
            id="helix_store.E001",
        )
        for key in configured
        if key not in conf.DEFAULTS
    ]
    if problem := conf.table_prefix_problem(conf.get("TABLE_PREFIX")):
        messages.append(
            Error(
                f'HELIX_STORE["TABLE_PREFIX"] cannot be used: {problem}.',
                hint='Choose a short name of letters, digits and underscores, such as "agents_".',
                id="helix_store.E002",
            )
        )
    return messages + [
        Error(problem, hint="See the settings reference.", id="helix_store.E004")
        for problem in _wrong_values()
    ]


def _wrong_values() -> Iterable[str]:
    for value in (conf.limits, conf.checkpoints_keep, conf.retention):
        try:
            value()
        except ImproperlyConfigured as exc:
            yield str(exc)
    for name in ("DEFAULT_LOCK_TTL_MS", "PAGE_SIZE"):
        if type(conf.get(name)) is not int or conf.get(name) < 1:
            yield f'HELIX_STORE["{name}"] must be a whole number of at least 1.'
    if type(conf.get("ASYNC_THREADS")) is not int or conf.get("ASYNC_THREADS") < 0:
        yield 'HELIX_STORE["ASYNC_THREADS"] must be a whole number; 0 uses the thread Django keeps.'
    if type(conf.get("FAST_PATHS")) is not bool:
        yield 'HELIX_STORE["FAST_PATHS"] must be True or False.'
    if type(conf.get("ROW_LEVEL_SECURITY")) is not bool:
        yield 'HELIX_STORE["ROW_LEVEL_SECURITY"] must be True or False.'
    for name in ("STREAMS", "WORKSPACE_PROVIDERS"):
        if not isinstance(conf.get(name), dict):
            yield f'HELIX_STORE["{name}"] must be a dict.'
    if isinstance(conf.get("STREAMS"), dict):
        yield from _wrong_stream_options()
    permission = conf.get("STREAM_PERMISSION")
    if permission is not None and not isinstance(permission, str):
        yield 'HELIX_STORE["STREAM_PERMISSION"] must be None or the dotted path of a callable.'


def _wrong_stream_options() -> Iterable[str]:
    try:
        options = conf.stream_options()
    except ImproperlyConfigured as exc:
        yield str(exc)
        return
    for alias in options.named_aliases:
        if alias not in connections or connections[alias].vendor != "postgresql":
            yield f'HELIX_STORE["STREAMS"]["listen_database"]: DATABASES has no PostgreSQL {alias!r}.'


@register("helix_store")
def check_database_alias(app_configs: Apps = None, **kwargs: Any) -> list[CheckMessage]:
    """E003: the database of sessions is not in DATABASES."""
    alias = alias_of("")
    if alias in connections:
        return []
    return [
        Error(
            f"Sessions are routed to the database {alias!r}, which is not in DATABASES.",
            hint="Add the alias to DATABASES, or change DATABASE_ROUTERS.",
            id="helix_store.E003",
        )
    ]


@register("helix_store")
def check_sqlite_settings(
    app_configs: Apps = None, databases: Sequence[str] | None = None, only: str | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """W001 no IMMEDIATE transactions, W002 no WAL, W003 commits without sync."""
    messages: list[CheckMessage] = []
    hint = _AVOID_WAL if _has_the_wal_reset_bug() else _SET_WAL
    for connection in _store_connections("sqlite", only):
        options = connection.settings_dict.get("OPTIONS", {})
        if str(options.get("transaction_mode") or "").upper() not in ("IMMEDIATE", "EXCLUSIVE"):
            messages.append(
                Warning(
                    f"The SQLite database {connection.alias!r} begins deferred transactions: with several "
                    'writers, most fail at once with "database is locked".',
                    hint=hint,
                    id="helix_store.W001",
                )
            )
        journal_mode, synchronous = _sqlite_pragmas(connection, ask=connection.alias in (databases or ()))
        avoids_the_bug = _has_the_wal_reset_bug() and journal_mode in _DURABLE_WITHOUT_WAL
        if journal_mode != "wal" and not avoids_the_bug:
            messages.append(
                Warning(
                    f"The SQLite database {connection.alias!r} is not in WAL mode: readers block writers.",
                    hint=hint,
                    id="helix_store.W002",
                )
            )
        if synchronous not in ("full", "extra", "2", "3"):
            messages.append(
                Warning(
                    f"The SQLite database {connection.alias!r} does not set synchronous=FULL: a power "
                    "failure may lose steps that were acknowledged.",
                    hint=hint,
                    id="helix_store.W003",
                )
            )
    return messages


def _sqlite_pragmas(connection: BaseDatabaseWrapper, *, ask: bool) -> tuple[str, str]:
    """Journal mode and synchronous level: of the database if ``ask``, else of its settings."""
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
    app_configs: Apps = None, databases: Sequence[str] | None = None, only: str | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """W004: WAL mode of an SQLite version with the WAL-reset bug; only under ``check --deploy``."""
    if not _has_the_wal_reset_bug():
        return []
    return [
        Warning(
            f"The SQLite database {connection.alias!r} runs on SQLite {sqlite3.sqlite_version} in WAL mode, "
            "which can corrupt it when two connections meet at a checkpoint.",
            hint=_AVOID_WAL,
            id="helix_store.W004",
        )
        for connection in _store_connections("sqlite", only)
        if _sqlite_pragmas(connection, ask=connection.alias in (databases or ()))[0] == "wal"
    ]


@register("helix_store")
def check_connections_under_asgi(
    app_configs: Apps = None, only: str | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """W005: persistent connections in an ASGI project; I005: in a project without ASGI_APPLICATION."""
    served_by_asgi = bool(getattr(settings, "ASGI_APPLICATION", None))
    level, id_ = (Warning, "helix_store.W005") if served_by_asgi else (Info, "helix_store.I005")
    return [
        level(
            f"The database {connection.alias!r} keeps connections open (CONN_MAX_AGE): under ASGI each "
            "request has a new thread, so that connections are not used again and accumulate.",
            hint='Set CONN_MAX_AGE = 0 and use the pool: "OPTIONS": {"pool": True}.',
            id=id_,
        )
        for connection in _store_connections("postgresql", only)
        if connection.settings_dict.get("CONN_MAX_AGE", 0) != 0
    ]


@register("helix_store")
def check_row_level_security(
    app_configs: Apps = None, only: str | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """W007: row-level security for a database that has none."""
    if not conf.row_level_security():
        return []
    return [
        Warning(
            f'HELIX_STORE["ROW_LEVEL_SECURITY"] has no effect on the SQLite database {connection.alias!r}: '
            "SQLite has no policies, so that only the queries of the stores separate tenants.",
            hint="Use PostgreSQL, or a database file for each tenant; or remove the setting.",
            id="helix_store.W007",
        )
        for connection in _store_connections("sqlite", only)
    ]


@register("helix_store")
def check_citus(
    app_configs: Apps = None, databases: Sequence[str] | None = None, only: str | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """E016: what the form for Citus does not work with. W009: a database with Citus, but without the form."""
    messages: list[CheckMessage] = [
        Error(f"HELIX_STORE_CITUS of the database {alias!r}: {problem}.", hint=hint, id="helix_store.E016")
        for alias, problem, hint in citus_problems(app_aliases())
        if only in (None, alias)
    ]
    return messages + [
        Warning(
            f"The PostgreSQL database {connection.alias!r} has Citus: if it distributes the tables of "
            "helix_store, locks, streams, usage and steps are refused.",
            hint="Set HELIX_STORE_CITUS = True in its entry of DATABASES; or silence this check.",
            id="helix_store.W009",
        )
        for connection in _store_connections("postgresql", only)
        if connection.alias in (databases or ())
        and not conf.is_citus(connection.settings_dict)
        and has_citus(connection)
    ]


@register(Tags.models, "helix_store")
def check_app_tables(app_configs: Apps = None, **kwargs: Any) -> list[CheckMessage]:
    """E013: a registered table that no export can hold. W008: rows of sessions that nobody registered."""
    messages: list[CheckMessage] = []
    for table in registered_tables():
        try:
            app_part(table)
        except TypeError as exc:
            messages.append(
                Error(
                    f"The registered table of {table.model._meta.label} cannot be exported: {exc}",
                    hint="Use a field that has a form in an export, or name the column in not_exported.",
                    obj=table.model,
                    id="helix_store.E013",
                )
            )
    known = {Session._meta.app_label, *(table.model._meta.label for table in registered_tables())}
    return messages + [
        Warning(
            f"The rows of {model._meta.label} go with their session, but no export and no branch has them.",
            hint="Call helix_store.adapters.register_table in the ready() of its app; or silence this check.",
            obj=model,
            id="helix_store.W008",
        )
        for relation in children_of_sessions()
        if not known & {(model := relation.related_model)._meta.app_label, model._meta.label}
    ]


@register(Tags.urls, "helix_store")
def check_stream_permission(app_configs: Apps = None, **kwargs: Any) -> list[CheckMessage]:
    """W006: the URLs of the app are included, and no permission is named."""
    if conf.stream_permission() is not None or not getattr(settings, "ROOT_URLCONF", None):
        return []
    if not _includes("helix_store", get_resolver()):
        return []
    return [
        Warning(
            "The URLs of helix_store are included, but every request for a stream is denied: "
            'HELIX_STORE["STREAM_PERMISSION"] is not set.',
            hint='Set HELIX_STORE = {"STREAM_PERMISSION": "dotted.path"} to the path of a callable that '
            "takes the request and the id of a stream.",
            id="helix_store.W006",
        )
    ]


def _includes(app_name: str, resolver: URLResolver) -> bool:
    return resolver.app_name == app_name or any(
        _includes(app_name, pattern) for pattern in resolver.url_patterns if isinstance(pattern, URLResolver)
    )


@register(Tags.database, "helix_store")
def check_postgres_durability(
    app_configs: Apps = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """E010: commits return before they are on disk. E011, E014: a crash can corrupt or empty the tables."""
    messages: list[CheckMessage] = []
    for connection in _store_connections("postgresql"):
        if connection.alias not in (databases or ()):
            continue
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT current_setting('synchronous_commit'), current_setting('fsync'), "
                "current_setting('full_page_writes')"
            )
            synchronous_commit, *of_files = cursor.fetchone()
            cursor.execute(_UNLOGGED, [_tables()])
            unlogged = [name for (name,) in cursor.fetchall()]
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
            for name in unlogged
        ]
    return messages


def _tables() -> list[str]:
    """The app's tables, and those that other apps have registered."""
    own = apps.get_app_config("helix_store").get_models(include_auto_created=True)
    return [model._meta.db_table for model in (*own, *(table.model for table in registered_tables()))]


@register(Tags.database, "helix_store")
def check_search_path(
    app_configs: Apps = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """E015: a pooler has dropped the search path that the settings ask for."""
    return [
        Error(
            f"The settings of the PostgreSQL database {connection.alias!r} ask for search_path="
            f'{dropped.asked}, but the server uses "{dropped.actual}": a pooler has dropped the option, '
            "so that tables of another schema are read and written.",
            hint="Use a database or a role for each schema: ALTER ROLE … SET search_path = ….",
            id="helix_store.E015",
        )
        for connection in _store_connections("postgresql")
        if connection.alias in (databases or ()) and (dropped := dropped_search_path(connection))
    ]


@register(Tags.database, "helix_store")
def check_table_prefix(
    app_configs: Apps = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """E012: the tables were made with another table prefix."""
    prefix = conf.table_name("")
    return [
        Error(
            f"The tables of helix_store in the database {connection.alias!r} begin with "
            f'"{other}", but HELIX_STORE["TABLE_PREFIX"] is "{prefix}": there are no such tables.',
            hint=f'Set HELIX_STORE["TABLE_PREFIX"] = "{other}". For tables that begin with "{prefix}", '
            "migrate another database or schema.",
            id="helix_store.E012",
        )
        for connection in (*_store_connections("sqlite"), *_store_connections("postgresql"))
        if connection.alias in (databases or ())
        if (other := _prefix_of_the_tables(connection)) is not None
    ]


def _prefix_of_the_tables(connection: BaseDatabaseWrapper) -> str | None:
    """The prefix of the tables that the app's migrations made, if the configured one has none."""
    names = {name.lower(): name for name in connection.introspection.table_names()}
    if conf.table_name("session").lower() in names:
        return None
    if all(app != "helix_store" for app, _ in MigrationRecorder(connection).applied_migrations()):
        return None
    for lower_name, name in names.items():
        prefix = lower_name.removesuffix("session")
        if prefix and all(prefix + suffix in names for suffix in _FIRST_TABLES):
            return name[: len(prefix)]
    return None


def _store_connections(vendor: str, only: str | None = None) -> list[BaseDatabaseWrapper]:
    """Connections of the databases that may have the app's tables, or of one of them."""
    return [
        connections[alias]
        for alias in app_aliases()
        if connections[alias].vendor == vendor and only in (None, alias)
    ]


def check_database(alias: str, *, deploy: bool = False) -> list[CheckMessage]:
    """Every check that concerns one database, which is asked for what it really does.

    ``deploy`` adds what ``check --deploy`` adds. Settings that cannot be read are returned alone: the other
    checks read them.
    """
    of_settings = check_settings()
    if any(message.id in ("helix_store.E002", "helix_store.E004") for message in of_settings):
        return of_settings
    checks: list[Callable[..., list[CheckMessage]]] = [
        check_database_alias,
        check_sqlite_settings,
        *([check_sqlite_version] if deploy else []),
        check_connections_under_asgi,
        check_citus,
        check_stream_permission,
        check_postgres_durability,
        check_search_path,
        check_table_prefix,
    ]
    return of_settings + [message for check in checks for message in check(databases=[alias], only=alias)]
