"""Checks of the project's settings, which do not query a database."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.urls import URLResolver, get_resolver

from helix_store import conf
from helix_store.engine.aliases import alias_of


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
    for name in ("FAST_PATHS", "ROW_LEVEL_SECURITY", "RUN_ERROR_DETAILS"):
        if type(conf.get(name)) is not bool:
            yield f'HELIX_STORE["{name}"] must be True or False.'
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
def check_database_alias(**kwargs: Any) -> list[CheckMessage]:
    """Report E003: the database of sessions is not in DATABASES."""
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


@register(Tags.urls, "helix_store")
def check_stream_permission(**kwargs: Any) -> list[CheckMessage]:
    """Report W006: the URLs of the app are included, but no permission is set."""
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
