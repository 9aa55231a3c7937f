"""Locks in the database."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from typing import Any

from helix_store.core.guards import Guard
from helix_store.core.locks import LockInfo
from helix_store.core.moments import as_utc
from helix_store.engine.database import Call, Database, DatabaseOperations
from helix_store.engine.statement import Statement
from helix_store.locks import sql
from helix_store.locks.rules import Term


class DatabaseLocks(DatabaseOperations):
    """The database back end. Arguments have already been checked, and no operation waits for a lock.

    A term is over once it has been released, its TTL has passed, or a newer term has begun.
    """

    @cached_property
    def _looks_first(self) -> bool:
        # On SQLite a write waits for every other write, even if it only finds that the name is held.
        return not self.db.has_row_locks

    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        """Begin a term, or return ``None`` while another term lasts, even one of the same owner."""
        if self._looks_first and self.is_locked(name):
            return None
        return self._begin_term(sql.ACQUIRE_AFTER_SESSION, sql.ACQUIRE, name, owner, ttl_ms)

    def take_over(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        """Begin a term that replaces any other, or return ``None`` while a guarded write is running."""
        return self._begin_term(sql.TAKE_OVER_AFTER_SESSION, sql.TAKE_OVER, name, owner, ttl_ms)

    def _begin_term(
        self, joining: Iterable[Statement], alone: Iterable[Statement], name: str, owner: str, ttl_ms: int
    ) -> Term | None:
        """Run ``joining`` in the caller's transaction, else ``alone``, until a statement begins a term."""
        parameters = {
            **self._row(name),
            "owner": owner,
            "ttl_ms": ttl_ms,
            "key": self._advisory_key(name),
        }

        def begin(statements: Iterable[Statement], call: Call) -> Term | None:
            recorded = {**parameters, "call_id": call.id}
            for statement in statements:
                for token, expires_at in call.write(statement, recorded):
                    return Term(token, expires_at)
            return None

        def begin_again(call: Call) -> Term | None:
            if self.db.is_postgresql:
                self.db.execute(sql.WAIT_FOR_CONTENDERS, {"key": parameters["key"]})
            for token, expires_at in self.db.execute(sql.BEGUN, {**parameters, "call_id": call.id}):
                return Term(token, expires_at)
            return begin(alone, call)

        return self.db.committed_once(
            lambda call: begin(joining if call.in_transaction else alone, call),
            begin_again,
            operation_id=lambda: name,
        )

    def refresh(self, name: str, *, owner: str, fencing_token: int, ttl_ms: int) -> datetime | None:
        """Restart the TTL and return the new end of the term, or ``None`` if the term is over."""
        parameters = {**self._row(name), "owner": owner, "token": fencing_token, "ttl_ms": ttl_ms}

        def refresh(call: Call) -> datetime | None:
            rows = call.write(sql.REFRESH, parameters)
            return as_utc(rows[0][0]) if rows else None

        return self.db.committed_once(refresh, refresh, operation_id=lambda: name)

    def release(self, name: str, *, owner: str, fencing_token: int) -> bool:
        """End this term; return ``False`` if it is already over."""
        parameters = {**self._row(name), "owner": owner, "token": fencing_token}

        def release(call: Call) -> bool:
            return bool(call.write(sql.RELEASE, {**parameters, "call_id": call.id}))

        def look_too(call: Call) -> bool:
            return release(call) or bool(
                self.db.execute(sql.WAS_RELEASED, {**parameters, "call_id": call.id})
            )

        return self.db.committed_once(release, look_too, operation_id=lambda: name)

    def force_release(self, name: str) -> bool:
        """End the current term and fence out its holder; return ``False`` if the name is not held."""
        # This needs a transaction, because no stored value shows who ended a term.
        return bool(self.db.transaction(lambda: self.db.execute(sql.FORCE_RELEASE, self._row(name))))

    def is_locked(self, name: str) -> bool:
        return bool(self.db.read(sql.IS_LOCKED, self._row(name)))

    def active(self) -> list[LockInfo]:
        rows = self.db.read(sql.ACTIVE, {"tenant": self.db.tenant})
        return [
            LockInfo(name=name, owner=owner, fencing_token=token, expires_at=as_utc(expires_at))
            for name, owner, token, expires_at in rows
        ]

    def _row(self, name: str) -> dict[str, Any]:
        return {"tenant": self.db.tenant, "name": name}

    def _advisory_key(self, name: str) -> int:
        """Return 64 bits of a digest; colliding names only block each other while one is being acquired."""
        text = f"helix_store lock {len(self.db.tenant)} {self.db.tenant} {name}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def hold_fence(db: Database, name: str, guard: Guard) -> None:
    """Refuse writes of former holders, and prevent a takeover until the transaction ends.

    Takes a share lock on the lock's row. Call this in a transaction, after the session row is locked. Raises
    `FencedOutError`.
    """
    if guard.fencing_token is not None:
        rows = db.execute(sql.NEWEST_TOKEN, {"tenant": db.tenant, "name": name})
        guard.check_fence(rows[0][0] if rows else None)
