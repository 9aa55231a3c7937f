"""The SQL of locks: one row per name that is never deleted, and one statement for each call.

An acquisition never waits. On PostgreSQL, contenders try a transaction-scoped advisory lock without waiting,
and skip a lock row that another transaction has locked. The row is locked ``FOR UPDATE``, which conflicts
with the share lock of guarded writes (`NEWEST_TOKEN`). A holder's refresh and release do not conflict with
it. Every condition of a write is on the lock's own row: PostgreSQL checks the condition again after a wait.

Parameters are named: ``tenant``, ``name``, and some of ``owner``, ``token``, ``ttl_ms`` and ``key``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from helix_store.engine.clocks import CITUS, POSTGRESQL, SQLITE, Clock
from helix_store.engine.statement import Statement, table
from helix_store.models import Lock, Session

_TABLE: Final = table(Lock)
_ROW: Final = "tenant = %(tenant)s AND name = %(name)s"
_IS_FREE: Final = "(expires_at IS NULL OR expires_at <= {now})"
_IS_HELD: Final = "expires_at > {now}"
_IS_NEW: Final = f"NOT EXISTS (SELECT 1 FROM {_TABLE} WHERE {_ROW})"
_OWN_TERM: Final = f"{_ROW} AND owner = %(owner)s AND token = %(token)s AND {_IS_HELD}"

_SESSION: Final = f"""
    SELECT 1 FROM {table(Session)} WHERE tenant = (SELECT %(tenant)s) AND session_id = %(name)s"""
_TRY_SESSION: Final = f"""
    CASE WHEN EXISTS ({_SESSION}) THEN EXISTS ({_SESSION} FOR NO KEY UPDATE SKIP LOCKED) ELSE true END"""
_TRY_ADVISORY: Final = f"pg_catalog.pg_try_advisory_xact_lock(%(key)s # '{_TABLE}'::regclass::oid::bigint)"


_LOCK_ROW: Final = f"SELECT id FROM {_TABLE} WHERE {_ROW} FOR NO KEY UPDATE"


def _by_clock(postgresql: str, sqlite: str | None = None, citus: Sequence[str] = ()) -> Statement:
    """Return a statement with ``{now}`` for each database, and with ``{until}``, the end of a new term."""

    def on(clock: Clock, text: str) -> str:
        return text.format(now=clock.now, until=clock.after("ttl_ms"))

    return Statement(
        postgresql=on(POSTGRESQL, postgresql),
        sqlite=on(SQLITE, sqlite or postgresql),
        citus=[on(CITUS, text) for text in citus or [postgresql]],
    )


def _of_held_row(text: str) -> Statement:
    """Return a write that may wait for the row."""
    return _by_clock(text, citus=(_LOCK_ROW, text))


def _in_order(first: str, *others: str) -> str:
    """Return all conditions combined; PostgreSQL evaluates each one only if those before it are true."""
    return f"CASE WHEN {first} THEN {_in_order(*others)} ELSE false END" if others else first


def _acquire_known(condition: str, row_lock: str = "") -> str:
    return f"""
        UPDATE {_TABLE}
        SET owner = %(owner)s, token = token + 1, acquired_at = {{now}}, expires_at = {{until}},
            call_id = %(call_id)s
        WHERE id = (SELECT id FROM {_TABLE} WHERE {_ROW} AND {condition} {row_lock})
        RETURNING token, expires_at"""


def _acquire_new(condition: str) -> str:
    return f"""
        INSERT INTO {_TABLE} (tenant, name, owner, token, acquired_at, expires_at, call_id)
        SELECT CAST(%(tenant)s AS text), CAST(%(name)s AS text), %(owner)s, 1, {{now}}, {{until}}, %(call_id)s
        WHERE {condition}
        ON CONFLICT (tenant, name) DO NOTHING
        RETURNING token, expires_at"""


def _acquisition(*try_locks: str, condition: str = _IS_FREE) -> tuple[Statement, Statement]:
    """Return statements to try in this order: for a name with a row, and for a new name.

    Each returns the token and the end of the new term, or no row. The update comes first because it refuses a
    held name without writing. ``try_locks`` comes last, because contenders for a held name must not take
    these locks, which last as long as the caller's transaction. On Citus, separate queries try to take them.
    """
    tried = [f"SELECT 1 WHERE {each}" for each in try_locks]
    skip = "FOR UPDATE SKIP LOCKED"
    return (
        _by_clock(
            postgresql=_acquire_known(_in_order(condition, *try_locks), skip),
            sqlite=_acquire_known(condition),
            citus=(
                f"SELECT 1 FROM {_TABLE} WHERE {_ROW} AND {condition}",
                *tried,
                _acquire_known(condition, skip),
            ),
        ),
        _by_clock(
            postgresql=_acquire_new(_in_order(_IS_NEW, *try_locks)),
            sqlite=_acquire_new(_IS_NEW),
            citus=(f"SELECT 1 WHERE {_IS_NEW}", *tried, _acquire_new(_IS_NEW)),
        ),
    )


ACQUIRE: Final = _acquisition(_TRY_ADVISORY)
ACQUIRE_AFTER_SESSION: Final = _acquisition(_TRY_SESSION, _TRY_ADVISORY)
"""`ACQUIRE` as part of a larger transaction: the row of the session with that name is locked first.

Guarded writes lock the session row first and then the lock row. The reverse order could cause a deadlock with
them. No row is returned if the session exists and its row is busy.
"""

TAKE_OVER: Final = _acquisition(_TRY_ADVISORY, condition="true")
TAKE_OVER_AFTER_SESSION: Final = _acquisition(_TRY_SESSION, _TRY_ADVISORY, condition="true")
"""The same for a name that may be held; it returns no row during a guarded write or an acquisition."""

BEGUN: Final = _by_clock(
    f"SELECT token, expires_at FROM {_TABLE} WHERE {_ROW} AND call_id = %(call_id)s AND {_IS_HELD}"
)
"""The term that a call has begun, if it has not ended."""

WAIT_FOR_CONTENDERS: Final = Statement(
    f"SELECT pg_catalog.pg_advisory_xact_lock(%(key)s # '{_TABLE}'::regclass::oid::bigint)"
)
"""Wait for the end of a running acquisition, on PostgreSQL."""

REFRESH: Final = _of_held_row(
    f"UPDATE {_TABLE} SET expires_at = {{until}} WHERE {_OWN_TERM} RETURNING expires_at"
)
RELEASE: Final = _of_held_row(
    f"UPDATE {_TABLE} SET expires_at = NULL, call_id = %(call_id)s WHERE {_OWN_TERM} RETURNING token"
)
WAS_RELEASED: Final = Statement(
    f"SELECT 1 FROM {_TABLE} WHERE {_ROW} AND call_id = %(call_id)s AND expires_at IS NULL"
)
FORCE_RELEASE: Final = _of_held_row(
    f"""
        UPDATE {_TABLE} SET expires_at = NULL, token = token + 1 WHERE {_ROW} AND {_IS_HELD}
        RETURNING token"""
)
NEWEST_TOKEN: Final = Statement(
    postgresql=f"SELECT token FROM {_TABLE} WHERE {_ROW} FOR KEY SHARE",
    sqlite=f"SELECT token FROM {_TABLE} WHERE {_ROW}",
)
IS_LOCKED: Final = _by_clock(f"SELECT 1 FROM {_TABLE} WHERE {_ROW} AND {_IS_HELD}")
ACTIVE: Final = _by_clock(
    f"""
        SELECT name, owner, token, expires_at FROM {_TABLE} WHERE tenant = %(tenant)s AND {_IS_HELD}
        ORDER BY name"""
)
