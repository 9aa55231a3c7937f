"""Claims of snapshots: one resumer at a time, for a term on the database's clock.

Every verb locks the session's row first, like all writes to a session: a claim that a longer transaction
takes can then not deadlock with a new snapshot that drops the claimed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.checkpointers.snapshots.rules import ClaimTerm, read_snapshot
from helix_store.engine.clocks import CLOCKS, as_utc
from helix_store.engine.database import DatabaseOperations, writes
from helix_store.exceptions import SessionNotFound
from helix_store.models import Checkpoint
from helix_store.sessions.database.locking import lock_session

__all__ = ["DatabaseSnapshotClaims"]


@dataclass(frozen=True, slots=True)
class _Statements:
    """Parameters are named; ``key`` is that of the locked session."""

    claim_one: str
    claim_newest: str
    refresh: str
    release: str
    finish: str


@cache
def _statements(vendor: str, table: str) -> _Statements:
    clock = CLOCKS[vendor]
    until = clock.in_milliseconds.replace("%s", "%(ttl_ms)s")
    snapshots = "session_id = %(key)s AND kind = 'snapshot' AND namespace = ''"
    one = f"{snapshots} AND checkpoint_id = %(checkpoint_id)s"
    newest = f"id = (SELECT id FROM {table} WHERE {snapshots} ORDER BY version DESC LIMIT 1)"
    own = f"{one} AND claim_owner = %(owner)s AND claim_token = %(token)s"
    lasts = f"claim_done_at IS NULL AND claim_expires_at > {clock.now}"
    is_free = f"claim_done_at IS NULL AND (claim_expires_at IS NULL OR claim_expires_at <= {clock.now})"
    claim = f"""
        UPDATE {table}
        SET claim_owner = %(owner)s, claim_token = COALESCE(claim_token, 0) + 1, claim_expires_at = {until}
        WHERE {{which}} AND {is_free}
        RETURNING checkpoint_id, claim_token, claim_expires_at, payload"""
    return _Statements(
        claim_one=claim.format(which=one),
        claim_newest=claim.format(which=newest),
        refresh=f"UPDATE {table} SET claim_expires_at = {until} WHERE {own} AND {lasts} "
        "RETURNING claim_expires_at",
        release=f"UPDATE {table} SET claim_expires_at = NULL WHERE {own} AND {lasts} RETURNING id",
        # Also after the term is over, unless somebody took over: the work was done.
        finish=f"UPDATE {table} SET claim_done_at = COALESCE(claim_done_at, {clock.now}) "
        f"WHERE {own} AND claim_expires_at IS NOT NULL RETURNING id",
    )


class DatabaseSnapshotClaims(DatabaseOperations):
    @writes
    def claim(
        self, thread_id: str, checkpoint_id: str | None, *, owner: str, ttl_ms: int
    ) -> ClaimTerm | None:
        statements = self._claim_statements
        rows = self._in_locked_thread(
            thread_id,
            statements.claim_newest if checkpoint_id is None else statements.claim_one,
            {"checkpoint_id": checkpoint_id, "owner": owner, "ttl_ms": ttl_ms},
        )
        for claimed_id, token, expires_at, payload in rows:
            return ClaimTerm(
                thread_id=thread_id,
                checkpoint_id=claimed_id,
                owner=owner,
                token=token,
                expires_at=as_utc(expires_at),
                snapshot=read_snapshot(payload),
            )
        return None

    @writes
    def refresh_claim(self, term: ClaimTerm, *, ttl_ms: int) -> datetime | None:
        rows = self._in_locked_thread(
            term.thread_id, self._claim_statements.refresh, {**_own(term), "ttl_ms": ttl_ms}
        )
        return as_utc(rows[0][0]) if rows else None

    @writes
    def release_claim(self, term: ClaimTerm) -> bool:
        return bool(self._in_locked_thread(term.thread_id, self._claim_statements.release, _own(term)))

    @writes
    def finish_claim(self, term: ClaimTerm) -> bool:
        return bool(self._in_locked_thread(term.thread_id, self._claim_statements.finish, _own(term)))

    @property
    def _claim_statements(self) -> _Statements:
        connection: BaseDatabaseWrapper = self.db.connection
        return _statements(connection.vendor, connection.ops.quote_name(Checkpoint._meta.db_table))

    def _in_locked_thread(
        self, thread_id: str, sql: str, parameters: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        try:
            head = lock_session(self.db, thread_id)
        except SessionNotFound:
            return []
        return self.db.execute(sql, {**parameters, "key": head.pk})


def _own(term: ClaimTerm) -> dict[str, Any]:
    return {"checkpoint_id": term.checkpoint_id, "owner": term.owner, "token": term.token}
