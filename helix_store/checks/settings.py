"""System checks of the settings and of registered tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import DO_NOTHING
from django.urls import URLResolver, get_resolver
from django.utils.module_loading import import_string

from helix_store import conf
from helix_store.catalogue import tables
from helix_store.catalogue.table import (
    APP,
    children_of_sessions,
    has_constraint,
    is_of_package,
    is_refusing,
    references_to,
    references_to_sessions,
)
from helix_store.cleanup.workspaces import WorkspaceProvider
from helix_store.engine.database import alias_of, app_aliases, app_connections
from helix_store.models import Session
from helix_store.transfer.records import format_of


@register("helix_store")
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """Report unknown keys (E001), an invalid table prefix (E002) and invalid values (E004)."""
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
    values: list[Callable[[], object]] = [
        *(conf.limits, conf.checkpoints_keep, conf.retention, conf.tombstone_days),
        *(conf.admin_tenants, conf.admin_views, conf.build),
        *(partial(conf.whole_number, name) for name in conf.WHOLE_NUMBERS),
    ]
    for value in values:
        try:
            value()
        except ImproperlyConfigured as exc:
            yield str(exc)
    for name in ("FAST_PATHS", "ROW_LEVEL_SECURITY", "RUN_ERROR_DETAILS", "ANSWER_PAGES"):
        if type(conf.get(name)) is not bool:
            yield f'HELIX_STORE["{name}"] must be True or False.'
    for name in ("STREAMS", "WORKSPACE_PROVIDERS"):
        if not isinstance(conf.get(name), dict):
            yield f'HELIX_STORE["{name}"] must be a dict.'
    if isinstance(conf.get("STREAMS"), dict):
        yield from _wrong_stream_options()
    for name in ("STREAM_PERMISSION", "ADMIN_USERS"):
        problem = f'HELIX_STORE["{name}"] must be None or the dotted path of a callable'
        if conf.get(name) and isinstance(conf.get(name), str):
            yield from _wrong_path(conf.get(name), problem)
        elif conf.get(name) not in (None, ""):
            yield f"{problem}."
    if isinstance(conf.get("WORKSPACE_PROVIDERS"), dict):
        for name, path in conf.get("WORKSPACE_PROVIDERS").items():
            problem = f'HELIX_STORE["WORKSPACE_PROVIDERS"][{name!r}] must be the dotted path of a provider'
            if isinstance(name, str) and isinstance(path, str):
                yield from _wrong_path(path, problem, accepts=_is_provider)
            else:
                yield f"{problem}, under a name."


def _is_provider(found: Any) -> bool:
    """Return whether an object is a workspace provider. A callable may return one; it is not called here."""
    return callable(found) or isinstance(found, WorkspaceProvider)


def _wrong_path(path: str, problem: str, *, accepts: Callable[[Any], bool] = callable) -> Iterable[str]:
    """Yield the problem if a dotted path does not lead to such an object of the project."""
    try:
        found = import_string(path)
    except Exception as exc:  # noqa: BLE001  a module of the project may raise anything
        yield f"{problem}: {type(exc).__name__}: {exc}."
        return
    if not accepts(found):
        yield f"{problem}: {path} is not callable."


def _wrong_stream_options() -> Iterable[str]:
    try:
        options = conf.stream_options()
    except ImproperlyConfigured as exc:
        yield str(exc)
        return
    if options.using and options.using not in connections:
        yield f'HELIX_STORE["STREAMS"]["using"]: DATABASES has no {options.using!r}.'
    for alias in options.named_aliases:
        if alias not in connections or connections[alias].vendor != "postgresql":
            yield f'HELIX_STORE["STREAMS"]["listen_database"]: DATABASES has no PostgreSQL {alias!r}.'


@register("helix_store")
def check_database_alias(**kwargs: Any) -> list[CheckMessage]:
    """Report E003, a database of sessions that is not in DATABASES, and E019, one that is not supported."""
    alias = alias_of("")
    if alias not in connections:
        return [
            Error(
                f"Sessions are routed to the database {alias!r}, which is not in DATABASES.",
                hint="Add the alias to DATABASES, or change DATABASE_ROUTERS.",
                id="helix_store.E003",
            )
        ]
    if problem := _unsupported(connections[alias]):
        return [
            Error(
                f"Sessions are routed to the database {alias!r}, {problem}.",
                hint="Use PostgreSQL with psycopg 3 (the extra postgres), or SQLite. To keep sessions in a "
                "database of their own, add it to DATABASES, and name it in DATABASE_ROUTERS.",
                id="helix_store.E019",
            )
        ]
    return []


@register(Tags.models, "helix_store")
def check_routed_tables(only: str | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Report E021, tables that the routers keep out of a database with sessions, and W012, the opposite."""
    messages: list[CheckMessage] = []
    aliases_of_sessions = app_aliases()
    for alias in connections if only is None else [only]:
        has_sessions = alias in aliases_of_sessions
        labels = {
            table.model._meta.app_label
            for table in tables()
            if router.allow_migrate_model(alias, table.model) != has_sessions
        }
        if labels:
            messages.append((_missing if has_sessions else _unused)(alias, ", ".join(sorted(labels))))
    return messages


def _missing(alias: str, labels: str) -> Error:
    return Error(
        f"DATABASE_ROUTERS let the database {alias!r} have sessions, but not the tables of {labels}, which "
        "belong to sessions and their tenants: calls and commands fail there.",
        hint="Let allow_migrate give the same answer for these app labels as for helix_store, and create the "
        'tables: see "Sessions in a database of their own" in docs/scale-out.md.',
        id="helix_store.E021",
    )


def _unused(alias: str, labels: str) -> Warning:
    return Warning(
        f"DATABASE_ROUTERS let the database {alias!r} have the tables of {labels}, but no sessions: the "
        "tables stay empty there.",
        hint="Let allow_migrate give the same answer for these app labels as for helix_store.",
        id="helix_store.W012",
    )


def _unsupported(connection: Any) -> str | None:
    """Return why the stores cannot use a database. One without settings, which no call can use, is left to
    Django.
    """
    if connection.vendor not in ("postgresql", "sqlite", "unknown"):
        return f"which is {connection.display_name}"
    # Without psycopg 3, Django uses psycopg2, whose errors have no SQLSTATE that the engine can read.
    if connection.vendor == "postgresql" and connection.Database.__name__ != "psycopg":
        return f"which is reached through {connection.Database.__name__}"
    return None


@register(Tags.urls, "helix_store")
def check_stream_permission(**kwargs: Any) -> list[CheckMessage]:
    """Report W006: the URLs of the app are included, but no permission is set."""
    try:
        permission = conf.stream_permission()
    except ImproperlyConfigured:
        return []  # E004 reports the settings.
    if permission is not None or not getattr(settings, "ROOT_URLCONF", None):
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


@register(Tags.models, "helix_store")
def check_references(**kwargs: Any) -> list[CheckMessage]:
    """Report E020: a foreign key of another app, because of which rows of the store cannot be deleted; and
    W013: one that protects sessions, as its ``on_delete`` says.
    """
    of_sessions = references_to_sessions()
    references = [relation for relation in of_sessions if relation.on_delete is DO_NOTHING]
    # The store deletes the rows of its other tables with SQL, without Django's on_delete.
    others = {each.model for each in tables() if is_of_package(each.model)} - {Session}
    references += [
        relation for model in others for relation in references_to(model) if has_constraint(relation)
    ]
    return [
        Error(
            f"{relation.related_model._meta.label} has a foreign key {relation.field.name} to "
            f"{relation.model._meta.label}, whose rows cannot be deleted while a row refers to them: "
            "deletions, retention and erasure fail.",
            hint="Store the session's id in a CharField instead. A foreign key to a session may also have "
            "on_delete=SET_NULL, SET_DEFAULT or CASCADE. If the database itself acts on a deletion, silence "
            "this check.",
            obj=relation.field,
            id="helix_store.E020",
        )
        for relation in sorted(references, key=lambda relation: str(relation.field))
    ] + [
        Warning(
            f"{relation.related_model._meta.label} protects sessions by its foreign key "
            f"{relation.field.name}: retention, erasure and cleanup keep a session while a row refers to it.",
            hint="Silence this check if that is what you want; otherwise use on_delete=SET_NULL.",
            obj=relation.field,
            id="helix_store.W013",
        )
        for relation in of_sessions
        if is_refusing(relation)
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


@register(Tags.database, "helix_store")
def check_migrations(databases: Databases = None, **kwargs: Any) -> list[CheckMessage]:
    """Report E017: the database has some, but not all, of the migrations that a later one replaces.

    Django would report a conflict and advise to run ``makemigrations --merge``, which cannot help: the
    missing migrations were never published.
    """
    return [
        Error(
            f"The database {connection.alias!r} was made by a version before the first release, with the "
            f"migrations {first} to {last}. {name} replaced them before they were complete, so no version "
            "can migrate this database.",
            hint="Do not merge migrations. With the version that made the database, run "
            '"manage.py helix_export --output FILE". Then migrate an empty database with this version, and '
            'run "manage.py helix_import FILE" there. See "Databases of versions before the first release" '
            "in docs/settings.md.",
            id="helix_store.E017",
        )
        for connection in (*app_connections("sqlite"), *app_connections("postgresql"))
        if connection.alias in (databases or ())
        for name, first, last in _half_replaced(connection)
    ]


def _half_replaced(connection: BaseDatabaseWrapper) -> Iterator[tuple[str, str, str]]:
    """Yield migrations of this app of which only a part is applied, with its first and last migration."""
    applied = {name for app, name in MigrationRecorder(connection).applied_migrations() if app == APP}
    for (app, name), migration in MigrationLoader(None).disk_migrations.items():
        replaced = {each for _, each in migration.replaces}
        found = sorted(replaced & applied)
        if app == APP and found and name not in applied and not replaced <= applied:
            yield name, found[0], found[-1]


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
