"""Ways in which a project reaches PostgreSQL: poolers, kept connections, another default isolation."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from django.core.management import call_command
from django.db import connections

from tests.databases import close_connections
from tests.pooler import PGBOUNCER, Address, can_track, pgbouncer, transaction_pooler
from tests.settings import postgres_database
from tests.streams.background import wait_for_background_threads

__all__ = [
    "CITUS_FORM",
    "DEPLOYMENTS",
    "REPEATABLE_READ",
    "Deployment",
    "Pooler",
    "another_alias",
    "changed_alias",
    "deployed",
    "socket_of",
]

_SERVERS: Final = 8
"""Server connections of a pooler: fewer than the threads of some tests, more than their transactions."""

Pooler = Callable[[Address, int], AbstractContextManager[int]]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """``settings`` are keys of ``DATABASES``; ``missing`` says why this machine cannot run it.

    ``migrates`` is for another database than that of the tests. Where it ``loses_prepared``, a transaction
    may have a session of the server that does not know what was prepared: a statement is sent once more.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    pooler: Pooler | None = None
    migrates: bool = False
    loses_prepared: bool = False
    missing: str | None = None


_UNPREPARED: Final = {"DISABLE_SERVER_SIDE_CURSORS": True}
_NO_PGBOUNCER: Final = None if PGBOUNCER else "pgbouncer is not installed"
_NO_TRACKING: Final = _NO_PGBOUNCER or (
    None if can_track() else "this PgBouncer is older than 1.21 and does not track prepared statements"
)

REPEATABLE_READ: Final = "repeatable read"

CITUS_FORM: Final = "citus form"
"""On plain PostgreSQL."""
_CITUS_FORM: Final = {"HELIX_STORE_CITUS": True}
_CITUS: Final = os.environ.get("HELIX_TEST_CITUS")
"""The URL of the entry node, for a role whose search path is a distributed schema."""

DEPLOYMENTS: Final = (
    Deployment(name="pooler of the tests", pooler=transaction_pooler, loses_prepared=True),
    Deployment(name="pgbouncer", pooler=pgbouncer, loses_prepared=True, missing=_NO_PGBOUNCER),
    Deployment(
        name="pgbouncer, nothing prepared", pooler=pgbouncer, settings=_UNPREPARED, missing=_NO_PGBOUNCER
    ),
    Deployment(name="pgbouncer, tracking", pooler=partial(pgbouncer, tracks=True), missing=_NO_TRACKING),
    Deployment(
        name="pgbouncer, tracking, nothing prepared",
        pooler=partial(pgbouncer, tracks=True),
        settings=_UNPREPARED,
        missing=_NO_TRACKING,
    ),
    Deployment(name="psycopg pool", settings={"OPTIONS": {"pool": {"min_size": 1, "max_size": _SERVERS}}}),
    Deployment(name="kept connections", settings={"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}),
    Deployment(name=CITUS_FORM, settings=_CITUS_FORM),
    Deployment(
        name="citus",
        settings={**_CITUS_FORM, **postgres_database(_CITUS)},
        migrates=True,
        missing=None if _CITUS else "HELIX_TEST_CITUS names no server",
    ),
    Deployment(
        name=REPEATABLE_READ,
        settings={"OPTIONS": {"options": "-c default_transaction_isolation=repeatable\\ read"}},
    ),
)


@contextmanager
def deployed(deployment: Deployment, alias: str) -> Iterator[None]:
    """Reach the database of an alias in this way. New connections and new processes of tests do so."""
    server = Address.of(connections[alias])
    pooler = deployment.pooler(server, _SERVERS) if deployment.pooler else nullcontext()
    options = {**connections.settings[alias]["OPTIONS"], **deployment.settings.get("OPTIONS", {})}
    with pooler as port:
        address = {} if port is None else {"HOST": "127.0.0.1", "PORT": port}
        with changed_alias(alias, **{**deployment.settings, **address, "OPTIONS": options}):
            if deployment.migrates:
                call_command("migrate", database=alias, verbosity=0)
            yield


@contextmanager
def changed_alias(alias: str, **changes: Any) -> Iterator[None]:
    """An alias of the tests with other settings, which new processes have too."""
    settings: dict[str, Any] = connections.settings[alias]
    before = dict(settings)
    close_connections()
    settings.update(changes)
    try:
        yield
    finally:
        wait_for_background_threads(alias)
        close_connections()
        connections[alias].close_pool()  # type: ignore[attr-defined]  # PostgreSQL alone has pools
        settings.clear()
        settings.update(before)


@contextmanager
def another_alias(name: str, **settings: Any) -> Iterator[str]:
    """An alias that ``DATABASES`` does not have, and that no other test has."""
    name = f"{name}-{uuid.uuid4().hex}"
    connections.settings[name] = settings
    try:
        yield name
    finally:
        wait_for_background_threads(name)
        _wait_for_readers()
        close_connections()
        connections[name].close_pool()  # type: ignore[attr-defined]  # PostgreSQL alone has pools
        del connections[name]
        del connections.settings[name]


def _wait_for_readers() -> None:
    """Reading threads close their connections in the end, those of the aliases that still exist."""
    for thread in threading.enumerate():
        if thread.name.startswith("helix_store reader"):
            thread.join(30.0)


def socket_of(alias: str) -> str | None:
    """The directory of the server's socket, which poolers need; ``None`` for another server."""
    host = Address.of(connections[alias]).host
    return host if Path(host).is_dir() else None
