"""Checks of the tables: those that hang on sessions, and the names of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.recorder import MigrationRecorder

from helix_store import conf
from helix_store.app_tables import registered_tables
from helix_store.engine.aliases import app_connections
from helix_store.models import Session
from helix_store.sessions.database.children import children_of_sessions
from helix_store.transfer.layout import app_part

__all__ = ["check_app_tables", "check_table_prefix"]

Apps = Sequence[AppConfig] | None

_FIRST_TABLES: Final = ("session", "message", "checkpoint", "run", "lock", "usage_entry")


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
        for connection in (*app_connections("sqlite"), *app_connections("postgresql"))
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
