"""The SQL of locks: one row per name for ever, and every verb one statement on it.

On PostgreSQL contenders meet on a transaction-scoped advisory try-lock, and a row that a guarded write or an
operator holds is passed over, so that no acquisition waits. The row is locked ``FOR UPDATE`` and not by the
update alone, because that conflicts with the share of it that guarded writes take, while a holder's refresh
and release do not (`newest_token`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.engine.clocks import CLOCKS
from helix_store.models import Lock

__all__ = ["LockStatements", "lock_statements"]


@dataclass(frozen=True, slots=True)
class LockStatements:
    """Parameters are named; those of `renew` and `create` return the token and the end of the new term."""

    renew: str
    """Take the row of a free name: update first, because a held name is refused without a write."""
    create: str
    """Insert the row of a new name."""
    refresh: str
    release: str
    force_release: str
    newest_token: str
    """Read the token and keep the row from being taken over until the transaction ends."""
    is_locked: str
    active: str


def lock_statements(connection: BaseDatabaseWrapper) -> LockStatements:
    return _statements(connection.vendor, connection.ops.quote_name(Lock._meta.db_table))


@cache
def _statements(vendor: str, table: str) -> LockStatements:
    clock = CLOCKS[vendor]
    row = "tenant = %(tenant)s AND name = %(name)s"
    until = clock.in_milliseconds.replace("%s", "%(ttl_ms)s")
    is_free = f"(expires_at IS NULL OR expires_at <= {clock.now})"
    lasts = f"expires_at > {clock.now}"
    own_term = f"{row} AND owner = %(owner)s AND token = %(token)s AND {lasts}"
    is_new = f"NOT EXISTS (SELECT 1 FROM {table} WHERE {row})"
    skip_busy = keep = ""
    if vendor == "postgresql":
        # CASE fixes the order: a name that is held must not cost its contenders the advisory lock, which
        # lasts as long as the caller's transaction.
        try_lock = f"pg_catalog.pg_try_advisory_xact_lock(%(key)s # '{table}'::regclass::oid::bigint)"
        is_free = f"CASE WHEN {is_free} THEN {try_lock} ELSE false END"
        is_new = f"CASE WHEN {is_new} THEN {try_lock} ELSE false END"
        skip_busy = "FOR UPDATE SKIP LOCKED"
        keep = "FOR KEY SHARE"
    return LockStatements(
        renew=f"""
            UPDATE {table}
            SET owner = %(owner)s, token = token + 1, acquired_at = {clock.now}, expires_at = {until}
            WHERE id = (SELECT id FROM {table} WHERE {row} AND {is_free} {skip_busy})
            RETURNING token, expires_at""",
        create=f"""
            INSERT INTO {table} (tenant, name, owner, token, acquired_at, expires_at)
            SELECT CAST(%(tenant)s AS text), CAST(%(name)s AS text), %(owner)s, 1, {clock.now}, {until}
            WHERE {is_new}
            ON CONFLICT (tenant, name) DO NOTHING
            RETURNING token, expires_at""",
        refresh=f"UPDATE {table} SET expires_at = {until} WHERE {own_term} RETURNING expires_at",
        release=f"UPDATE {table} SET expires_at = NULL WHERE {own_term} RETURNING token",
        force_release=f"""
            UPDATE {table} SET expires_at = NULL, token = token + 1 WHERE {row} AND {lasts}
            RETURNING token""",
        newest_token=f"SELECT token FROM {table} WHERE {row} {keep}",
        is_locked=f"SELECT 1 FROM {table} WHERE {row} AND {lasts}",
        active=f"""
            SELECT name, owner, token, expires_at FROM {table} WHERE tenant = %(tenant)s AND {lasts}
            ORDER BY name""",
    )
