"""Locks in the database."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any

from helix_store import conf
from helix_store.core import validation
from helix_store.engine.clocks import as_utc
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    reads,
)
from helix_store.locks.manager import LockManagerBase
from helix_store.locks.rules import LockInfo, Term
from helix_store.locks.sql import LockStatements, lock_statements

__all__ = ["DatabaseLockManager", "DatabaseLocks"]


class DatabaseLockManager(LockManagerBase):
    """Locks in a Django database, seen by every process that uses it.

    ``using`` and ``tenant`` are those of the stores that the locks protect: a guarded write compares its
    token with the lock of that database and tenant. The truth is a row per name that is never deleted,
    because its token only grows. Works through PgBouncer in transaction mode.
    """

    def __init__(
        self, using: str | None = None, *, tenant: str = "", default_ttl_ms: int | None = None
    ) -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), None)
        super().__init__(DatabaseLocks(db), tenant=db.tenant, default_ttl_ms=default_ttl_ms)


class DatabaseLocks(DatabaseOperations):
    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        if not self.db.connection.features.has_select_for_update and self.is_locked(name):
            # SQLite: a write would queue behind every other one, only to be told that the name is held.
            return None
        statements = self._statements
        parameters = {**self._row(name), "owner": owner, "ttl_ms": ttl_ms, "key": self._advisory_key(name)}
        for statement in (statements.renew, statements.create):
            for token, expires_at in self.db.write(statement, parameters):
                return Term(token, as_utc(expires_at))
        return None

    def refresh(self, name: str, *, owner: str, fencing_token: int, ttl_ms: int) -> datetime | None:
        parameters = {**self._row(name), "owner": owner, "token": fencing_token, "ttl_ms": ttl_ms}
        rows = self.db.write(self._statements.refresh, parameters)
        return as_utc(rows[0][0]) if rows else None

    def release(self, name: str, *, owner: str, fencing_token: int) -> bool:
        parameters = {**self._row(name), "owner": owner, "token": fencing_token}
        return bool(self.db.write(self._statements.release, parameters))

    def force_release(self, name: str) -> bool:
        return bool(self.db.write(self._statements.force_release, self._row(name)))

    def is_locked(self, name: str) -> bool:
        return bool(self.db.read(self._statements.is_locked, self._row(name)))

    @reads
    def active(self) -> list[LockInfo]:
        rows = self.db.execute(self._statements.active, {"tenant": self.db.tenant})
        return [
            LockInfo(name=name, owner=owner, fencing_token=token, expires_at=as_utc(expires_at))
            for name, owner, token, expires_at in rows
        ]

    @property
    def _statements(self) -> LockStatements:
        return lock_statements(self.db.connection)

    def _row(self, name: str) -> dict[str, Any]:
        return {"tenant": self.db.tenant, "name": name}

    def _advisory_key(self, name: str) -> int:
        """64 bits of a digest; two names that collide refuse each other while one is being acquired."""
        text = f"helix_store lock {len(self.db.tenant)} {self.db.tenant} {name}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
