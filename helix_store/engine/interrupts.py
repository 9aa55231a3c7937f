"""Interrupting a running statement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from helix_store.engine.database import Database

_OPERATIONS: Final = 100_000
"""Instructions of SQLite's virtual machine, which take a few milliseconds."""


@contextmanager
def interruptible(db: Database) -> Iterator[None]:
    """End this thread's statement if a signal handler raises an error.

    PostgreSQL's driver does this by itself and cancels the statement. SQLite calls back between steps of a
    statement: Python then runs the handler, and a failed callback ends the statement with an
    `OperationalError`.
    """
    if db.is_postgresql:
        yield
        return
    db.connection.ensure_connection()
    native: Any = db.connection.connection
    native.set_progress_handler(lambda: 0, _OPERATIONS)
    try:
        yield
    finally:
        native.set_progress_handler(None, 0)
