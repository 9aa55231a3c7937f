"""The in-memory database: tables by tenant, and one lock in place of transactions."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

__all__ = ["MemoryTable", "MemoryWorld"]


class MemoryTable:
    """The data of one kind and one tenant. Hold the world's lock to change it."""

    def session_is_gone(self, session_id: str, *, keep_usage: bool) -> None:
        """Delete the data of a deleted session, as a foreign key would. The lock is held."""


T = TypeVar("T", bound=MemoryTable)


class MemoryWorld:
    """An in-memory database: stores and managers that share one see each other's data.

    ``lock`` is held for the whole of every write: one transaction at a time.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._tenants: dict[str, dict[type[MemoryTable], Any]] = {}

    def table(self, kind: type[T], tenant: str) -> T:
        """The table of this kind and tenant; the first call creates it."""
        with self.lock:
            table: T = self._tenants.setdefault(tenant, {}).setdefault(kind, kind())
            return table

    def session_is_gone(self, tenant: str, session_id: str, *, keep_usage: bool) -> None:
        """Tell every table of a tenant that a session was deleted. The lock is held."""
        for table in list(self._tenants.get(tenant, {}).values()):
            table.session_is_gone(session_id, keep_usage=keep_usage)
