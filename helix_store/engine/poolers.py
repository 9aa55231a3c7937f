"""Detection of poolers between Django and PostgreSQL that change sessions between transactions."""

from __future__ import annotations

import secrets
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper

_ROUNDS: Final = 6


def loses_prepared_statements(connection: BaseDatabaseWrapper) -> bool:
    """Return whether statements that are prepared on a connection may be missing later.

    To test for a pooler, this opens two more connections with the same settings. Between their statements
    they hold no server session. A pooler that tracks prepared statements renames them and does not lose any.
    """
    if connection.vendor != "postgresql" or not _is_pooled(connection):
        return False
    one, two = _fresh(connection), _fresh(connection)
    try:
        return _share_sessions(one, two) and _keeps_names(one)
    finally:
        one.close()
        two.close()


def _fresh(connection: BaseDatabaseWrapper) -> Any:
    """Return a connection with the same settings that does not come from the pool in this process."""
    fresh = connection.copy()
    fresh.settings_dict["OPTIONS"].pop("pool", None)
    return fresh


def _session(connection: Any) -> int:
    """Return the server process that runs this statement."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_catalog.pg_backend_pid()")
        (pid,) = cursor.fetchone()
    return int(pid)


def _is_pooled(connection: Any) -> bool:
    """Return whether there is a pooler, which makes up a process number when a connection starts."""
    actual = _session(connection)
    info = getattr(connection.connection, "info", None)
    return getattr(info, "backend_pid", actual) != actual


def _share_sessions(one: Any, two: Any) -> bool:
    """Return whether one process serves both open connections, which only happens in transaction mode."""
    of_one: set[int] = set()
    of_two: set[int] = set()
    # The connections take turns of different lengths, because otherwise a round-robin pooler would never
    # repeat a session.
    for turn in range(1, _ROUNDS + 1):
        of_one.update(_session(one) for _ in range(turn))
        of_two.update(_session(two) for _ in range(turn + 1))
        if of_one & of_two:
            return True
    return False


def _keeps_names(connection: Any) -> bool:
    """Return whether the server knows a prepared statement by the name that the client gave it."""
    pgconn = getattr(connection.connection, "pgconn", None)
    if pgconn is None:
        # Other drivers do not prepare statements.
        return False
    name = f"helix_store_probe_{secrets.token_hex(8)}"
    # This is one transaction, so that all statements reach the same session of the server.
    connection.set_autocommit(False)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            pgconn.prepare(name.encode(), b"SELECT 1")
            cursor.execute("SELECT 1 FROM pg_catalog.pg_prepared_statements WHERE name = %s", [name])
            is_known = cursor.fetchone() is not None
            if is_known:
                # Deallocate it by name, because other clients will use the session.
                cursor.execute(f"DEALLOCATE {name}")
        return is_known
    finally:
        connection.rollback()
