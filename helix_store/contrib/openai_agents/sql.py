"""The SQL of run states. Writes run under the lock of the session, on the database's clock."""

from __future__ import annotations

from typing import Final

from helix_store.contrib.openai_agents.models import OpenAIRunState
from helix_store.engine.clocks import with_clock
from helix_store.engine.statement import Statement, table
from helix_store.models import Session
from helix_store.sessions.sql import SESSION_BY_ID

_STATE: Final = table(OpenAIRunState)
_OF_SESSION: Final = f"session_id = (SELECT id FROM {table(Session)} WHERE {SESSION_BY_ID})"
_ONE: Final = "session_id = %(session)s AND state_id = %(state_id)s"
_OWN: Final = f"{_ONE} AND claim_token = %(token)s"
_HELD: Final = f"{_OWN} AND resumed_at IS NULL AND claim_expires_at > {{now}}"
_IS_WAITING: Final = "resumed_at IS NULL AND (deadline IS NULL OR deadline > {now})"

HEAD_COLUMNS: Final = (
    *("state_id", "size_bytes", "owner", "deadline"),
    *("claim_owner", "claim_expires_at", "resumed_at", "created_at"),
)
_HEAD: Final = ", ".join(HEAD_COLUMNS)


def _with_clock(text: str) -> Statement:
    """Return a statement in which ``{now}`` is the database's time and ``{end}`` the end of a new term."""
    return with_clock(lambda clock: text.format(now=clock.now, end=clock.after("ttl_ms")))


SAVE: Final = Statement(
    f"""INSERT INTO {_STATE}
            (session_id, state_id, payload, size_bytes, owner, deadline, claim_token, created_at)
        VALUES (%(session)s, %(state_id)s, %(payload)s, %(size_bytes)s, %(owner)s, %(deadline)s, 0, %(at)s)
        ON CONFLICT (session_id, state_id) DO NOTHING RETURNING id"""
)
LOAD: Final = Statement(
    f"SELECT {_HEAD}, payload FROM {_STATE} WHERE {_OF_SESSION} AND state_id = %(state_id)s"
)
WAITING: Final = _with_clock(
    f"SELECT {_HEAD} FROM {_STATE} WHERE {_OF_SESSION} AND {_IS_WAITING} ORDER BY id LIMIT %(limit)s"
)
CLAIM: Final = _with_clock(
    f"""UPDATE {_STATE}
        SET claim_owner = %(resumer)s, claim_token = claim_token + 1, claim_expires_at = {{end}}
        WHERE {_ONE} AND {_IS_WAITING} AND (claim_expires_at IS NULL OR claim_expires_at <= {{now}})
            AND (owner IS NULL OR owner = %(owner)s)
        RETURNING claim_token, claim_expires_at, payload"""
)
REFRESH: Final = _with_clock(
    f"UPDATE {_STATE} SET claim_expires_at = {{end}} WHERE {_HELD} RETURNING claim_expires_at"
)
RELEASE: Final = _with_clock(f"UPDATE {_STATE} SET claim_expires_at = NULL WHERE {_HELD} RETURNING id")
# This also works after the term has expired, unless someone else has claimed it since: the run was resumed.
FINISH: Final = _with_clock(
    f"""UPDATE {_STATE} SET resumed_at = COALESCE(resumed_at, {{now}})
        WHERE {_OWN} AND claim_expires_at IS NOT NULL RETURNING id"""
)
DELETE: Final = Statement(f"DELETE FROM {_STATE} WHERE {_ONE} RETURNING id")
