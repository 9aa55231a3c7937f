"""Checks of databases on PostgreSQL: settings of the server, of a pooler, and of Citus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.apps import AppConfig, apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Tags, Warning, register

from helix_store import conf
from helix_store.app_tables import registered_tables
from helix_store.engine.aliases import app_aliases, app_connections
from helix_store.engine.entry_nodes import citus_problems, has_citus
from helix_store.engine.poolers import dropped_search_path

__all__ = [
    "check_citus",
    "check_connections_under_asgi",
    "check_postgres_durability",
    "check_search_path",
]

Apps = Sequence[AppConfig] | None

_UNLOGGED: Final = """
    SELECT c.relname FROM pg_catalog.pg_class AS c
    WHERE c.relname = ANY(%s::text[]) AND c.relpersistence = 'u' AND pg_catalog.pg_table_is_visible(c.oid)
    ORDER BY c.relname"""


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
        for connection in app_connections("postgresql", only)
        if connection.settings_dict.get("CONN_MAX_AGE", 0) != 0
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
        for connection in app_connections("postgresql", only)
        if connection.alias in (databases or ())
        and not conf.is_citus(connection.settings_dict)
        and has_citus(connection)
    ]


@register(Tags.database, "helix_store")
def check_postgres_durability(
    app_configs: Apps = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """E010: commits return before they are on disk. E011, E014: a crash can corrupt or empty the tables."""
    messages: list[CheckMessage] = []
    for connection in app_connections("postgresql"):
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
        for connection in app_connections("postgresql")
        if connection.alias in (databases or ()) and (dropped := dropped_search_path(connection))
    ]
