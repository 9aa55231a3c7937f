"""Connections that a forked child inherits from its parent, and abandons at once. If two processes use one
socket, their statements get mixed up. A child that inherits an open SQLite file mistakes its parent's locks
for its own: when the parent closes the file, it deletes the write-ahead log that the child uses, and the
child's commits are lost. Each process therefore opens its own connections.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from asgiref.sync import SyncToAsync
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from helix_store.core.processes import after_fork

_CLOSE_TIMEOUT_SECONDS: Final = 1.0

_opened: Final[WeakSet[BaseDatabaseWrapper]] = WeakSet()
"""The connections of all threads, because the locks of a file belong to the process."""
used_aliases: Final[set[str]] = set()
"""The aliases that stores use. Connections of other aliases are left to the project."""
_kept: Final[list[object]] = []
"""Objects that must not be garbage-collected, because that would affect the parent."""


def watch_connections() -> None:
    """Track which connections are open; called once, when the app is ready."""
    connection_created.connect(_note_opened, dispatch_uid="helix_store.forks")


def _note_opened(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    _opened.add(connection)


def opened_connections() -> list[BaseDatabaseWrapper]:
    """Return all connections, in any thread, that have been opened and still exist."""
    while True:
        # Another thread may open one in the meantime.
        with suppress(RuntimeError):
            return list(_opened)


def _give_up_inherited() -> None:
    files = []
    for connection in [
        each for each in opened_connections() if each.alias in used_aliases and not each.closed_in_transaction
    ]:
        if connection.vendor == "postgresql":
            _leave_server(connection)
        elif connection.vendor == "sqlite" and _has_file_open(connection):
            files.append(connection.connection)
            _forget(connection)
    if files:
        _leave_files(files)
    if used_aliases:
        # Its thread runs only in the parent, so the child's first async call would wait for it forever.
        SyncToAsync.single_thread_executor = ThreadPoolExecutor(max_workers=1)


def _leave_server(connection: Any) -> None:
    pools = getattr(connection, "_connection_pools", {})
    if connection.alias in pools:
        # Its threads run only in the parent, and they may hold its locks.
        _kept.append(pools.pop(connection.alias))
    inherited = connection.connection
    if inherited is None:
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    # A driver error means that the connection has already lost the server.
    with suppress(connection.Database.Error):
        os.dup2(nowhere, inherited.fileno(), inheritable=False)
    os.close(nowhere)
    # On this socket, it would tell the server to end the session of the parent.
    inherited.close()
    _forget(connection)


def _has_file_open(connection: Any) -> bool:
    return connection.connection is not None and not connection.is_in_memory_db()


def _leave_files(inherited: list[Any]) -> None:
    """Close the files before another one is opened, or their locks would be taken for its own."""
    _kept.extend(inherited)

    def close_all() -> None:
        for each in inherited:
            # That would roll back the transaction of the parent.
            if not each.in_transaction:
                each.close()

    # If another thread of the parent was using a file, it stays locked in the child.
    closing = threading.Thread(target=close_all, name="helix_store fork", daemon=True)
    closing.start()
    closing.join(_CLOSE_TIMEOUT_SECONDS)


def _forget(connection: Any) -> None:
    """Make the next statement open a new connection; inside a block of the caller, make it fail."""
    connection.run_on_commit = []
    if connection.in_atomic_block:
        connection.closed_in_transaction = connection.needs_rollback = True
    else:
        connection.connection = None


after_fork(_give_up_inherited)
