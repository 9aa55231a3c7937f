"""Checks of the tables that refer to sessions, and of the app's own table names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder

from helix_store import conf
from helix_store.catalogue import tables
from helix_store.catalogue.rows import children_of_sessions
from helix_store.engine.aliases import app_connections
from helix_store.transfer.layout import format_of

Databases = Sequence[str] | None

_FIRST_TABLES: Final = ("session", "message", "checkpoint", "run", "lock", "usage_entry")


@register(Tags.models, "helix_store")
def check_app_tables(**kwargs: Any) -> list[CheckMessage]:
    """Report E013, registered tables that cannot be exported, and W008, unregistered rows of sessions."""
    messages: list[CheckMessage] = []
    for table in tables():
        try:
            format_of(table)
        except TypeError as exc:
            messages.append(
                Error(
                    f"The registered table of {table.model._meta.label} cannot be exported: {exc}",
                    hint="Use a field that can be exported, or name the column in not_exported.",
                    obj=table.model,
                    id="helix_store.E013",
                )
            )
    known = {table.model for table in tables()}
    return messages + [
        Warning(
            f"The rows of {model._meta.label} are deleted with their session, but not exported or branched.",
            hint="Call helix_store.adapters.register_table in the ready() of its app; or silence this check.",
            obj=model,
            id="helix_store.W008",
        )
        for model in (relation.related_model for relation in children_of_sessions())
        if model not in known
    ]


@register(Tags.database, "helix_store")
def check_table_prefix(databases: Databases = None, **kwargs: Any) -> list[CheckMessage]:
    """Report E012: the tables were created with a different table prefix."""
    prefix = conf.table_name("")
    return [
        Error(
            f"The tables of helix_store in the database {connection.alias!r} begin with "
            f'"{other}", but HELIX_STORE["TABLE_PREFIX"] is "{prefix}": there are no such tables.',
            hint=f'Set HELIX_STORE["TABLE_PREFIX"] = "{other}". For tables that begin with "{prefix}", '
            "migrate another database or schema.",
            id="helix_store.E012",
        )
        for connection in (*app_connections("sqlite"), *app_connections("postgresql"))
        if connection.alias in (databases or ())
        if (other := _prefix_of_the_tables(connection)) is not None
    ]


def _prefix_of_the_tables(connection: BaseDatabaseWrapper) -> str | None:
    """Return the prefix of the tables that the migrations created, if none has the configured prefix."""
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
