"""Ending a statement that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from helix_store.engine.database import Database

__all__ = ["interruptible"]

_OPERATIONS: Final = 100_000
"""Of SQLite's virtual machine: a few milliseconds."""


@contextmanager
def interruptible(db: Database) -> Iterator[None]:
    """Inside, a statement of this thread ends when a handler of a signal raises an error.

    The driver of PostgreSQL does this, and cancels the statement. SQLite calls back between steps of a
    statement: then Python runs the handler, and a failed call ends the statement with an `OperationalError`.
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
