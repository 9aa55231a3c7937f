"""The SQL of snapshots: puts, reads and claims.

A thread is a session. The parameters ``tenant`` and ``thread_id`` identify it, or ``key`` if its row is
already locked.
"""

from __future__ import annotations

from typing import Final

from helix_store.engine.clocks import with_clock
from helix_store.engine.statement import Statement, table
from helix_store.models import Checkpoint, Session
from helix_store.sessions.sql import session_by_id

_CHECKPOINT: Final = table(Checkpoint)
_SESSION: Final = table(Session)
_IS_THREAD: Final = session_by_id(session_id="thread_id")


def _is_snapshot_of(key: str) -> str:
    return f"session_id = {key} AND kind = 'snapshot' AND namespace = ''"


_OF_THREAD: Final = _is_snapshot_of(f"(SELECT id FROM {_SESSION} WHERE {_IS_THREAD})")
_OF_LOCKED_THREAD: Final = _is_snapshot_of("%(key)s")

# Puts

_COLUMNS: Final = {
    "kind": "'snapshot'",
    "namespace": "''",
    "checkpoint_id": "%(checkpoint_id)s",
    "source": "'interrupt'",
    "step_count": "0",
    "status": "''",
    "stream_sequence": "0",
    "payload": "%(payload)s",
    "envelope": "'{}'",
    "size_bytes": "%(size_bytes)s",
    "created_at": "%(at)s",
    "call_id": "%(call_id)s",
    "snapshot_version": "%(snapshot_version)s",
}


def _newest_versions(key: str, *, offset: str = "0") -> str:
    return f"""
        SELECT version FROM {_CHECKPOINT} WHERE {_is_snapshot_of(key)}
        ORDER BY version DESC LIMIT 1 OFFSET {offset}"""


def _trim(key: str) -> str:
    """Delete all but the ``kept`` newest snapshots."""
    return f"""
        DELETE FROM {_CHECKPOINT}
        WHERE {_is_snapshot_of(key)} AND version <= ({_newest_versions(key, offset="%(kept)s")})"""


def _add(key: str, sessions: str) -> str:
    """Insert the snapshot with the next number of its thread."""
    return f"""
        INSERT INTO {_CHECKPOINT} (session_id, version, message_count, {", ".join(_COLUMNS)})
        SELECT id, coalesce(({_newest_versions(key)}), 0) + 1, message_count, {", ".join(_COLUMNS.values())}
        FROM {sessions}
        RETURNING id"""


def _put(*, trims: bool) -> str:
    """Return a put whose single statement locks the thread, without a transaction around it. ``head`` makes
    the decision, and the other parts take the thread's key from it. A statement that waited for the session's
    row sees that row as it is after the wait, but all other rows as of its start. Conditions:

    - The thread exists: this is checked again on the locked row.
    - The thread still has the snapshots from which the number and the trimming were computed: every write
      that adds or deletes a snapshot updates the session's row and changes its ``xmin``. PostgreSQL compares
      it again on the locked row, while the subselect keeps its original value.
    - ``message_count`` comes from the locked row.
    - The id is new in the thread: the unique constraint checks this.

    Claims change neither numbers nor the cap.
    """
    key = "(SELECT id FROM head)"
    trimmed = f", trimmed AS ({_trim(key)})" if trims else ""
    return f"""
        WITH head AS (
            UPDATE {_SESSION} SET updated_at = %(at)s
            WHERE {_IS_THREAD} AND xmin = (SELECT xmin FROM {_SESSION} WHERE {_IS_THREAD})
            RETURNING id, message_count
        ){trimmed} {_add(key, "head")}"""


TRIM: Final = Statement(_trim("%(key)s"))
ADD: Final = Statement(_add("%(key)s", f"{_SESSION} WHERE id = %(key)s"))
PUT: Final = Statement(_put(trims=False))
PUT_AND_TRIM: Final = Statement(_put(trims=True))

# Reads

_LISTED: Final = "checkpoint_id, created_at, snapshot_version, size_bytes"
_WITH_ID: Final = "checkpoint_id = %(checkpoint_id)s"

NEWEST: Final = Statement(f"""
    SELECT payload FROM {_CHECKPOINT} WHERE {_OF_THREAD} ORDER BY version DESC LIMIT 1""")
ONE: Final = Statement(f"SELECT payload FROM {_CHECKPOINT} WHERE {_OF_THREAD} AND {_WITH_ID}")
VERSION: Final = Statement(f"SELECT version FROM {_CHECKPOINT} WHERE {_OF_THREAD} AND {_WITH_ID}")
LIST: Final = Statement(f"""
    SELECT {_LISTED} FROM {_CHECKPOINT} WHERE {_OF_THREAD}
    ORDER BY version DESC LIMIT %(limit)s""")
LIST_BEFORE: Final = Statement(f"""
    SELECT {_LISTED} FROM {_CHECKPOINT} WHERE {_OF_THREAD} AND version < %(version)s
    ORDER BY version DESC LIMIT %(limit)s""")

# Claims use the database's clock and the lock of the thread

_ONE_LOCKED: Final = f"{_OF_LOCKED_THREAD} AND {_WITH_ID}"
_NEWEST_LOCKED: Final = f"""id = (
    SELECT id FROM {_CHECKPOINT} WHERE {_OF_LOCKED_THREAD} ORDER BY version DESC LIMIT 1)"""
_IS_FREE: Final = "claim_done_at IS NULL AND (claim_expires_at IS NULL OR claim_expires_at <= {now})"
_IS_OWN: Final = f"{_ONE_LOCKED} AND claim_owner = %(owner)s AND claim_token = %(token)s"
_IS_HELD: Final = f"{_IS_OWN} AND claim_done_at IS NULL AND claim_expires_at > {{now}}"


def _update(assignments: str, condition: str, returning: str) -> Statement:
    """Return an update in which ``{now}`` is the database's time and ``{end}`` is the end of a new term."""
    text = f"UPDATE {_CHECKPOINT} SET {assignments} WHERE {condition} RETURNING {returning}"
    return with_clock(lambda clock: text.format(now=clock.now, end=clock.after("ttl_ms")))


def _claim(snapshot: str) -> Statement:
    return _update(
        "claim_owner = %(owner)s, claim_token = COALESCE(claim_token, 0) + 1, claim_expires_at = {end}",
        f"{snapshot} AND {_IS_FREE}",
        "checkpoint_id, claim_token, claim_expires_at, payload",
    )


CLAIM_ONE: Final = _claim(_ONE_LOCKED)
CLAIM_NEWEST: Final = _claim(_NEWEST_LOCKED)
REFRESH_CLAIM: Final = _update("claim_expires_at = {end}", _IS_HELD, "claim_expires_at")
RELEASE_CLAIM: Final = _update("claim_expires_at = NULL", _IS_HELD, "id")
# This also works after the term, unless someone else has claimed it since, because the work is done.
FINISH_CLAIM: Final = _update(
    "claim_done_at = COALESCE(claim_done_at, {now})", f"{_IS_OWN} AND claim_expires_at IS NOT NULL", "id"
)
