"""The SQL of posts. Writes run under the lock of the session, whose key is a parameter."""

from __future__ import annotations

from typing import Final

from helix_store.engine.clocks import CITUS, POSTGRESQL, SQLITE, Clock, with_clock
from helix_store.engine.statement import Statement, table
from helix_store.models import Lock, Post, Session
from helix_store.models.sessions import NON_TERMINAL

_SESSION: Final = table(Session)
_POST: Final = table(Post)
_WAITING: Final = "session_id = %(key)s AND state = 'waiting'"
# In a prepared statement a parameter has a single type, but this one would have two.
_KEY: Final = "CAST(%(post_key)s AS varchar)"


def _add(now: str, source: str = "") -> str:
    return f"""
        INSERT INTO {_POST} (session_id, post_id, sequence, payload, author, key, digest, not_before, due_at,
            posted_at, state)
        SELECT %(key)s, %(post_id)s,
            (SELECT coalesce(max(sequence), 0) + 1 FROM {_POST} WHERE session_id = %(key)s),
            %(payload)s, %(author)s, {_KEY}, %(digest)s, %(not_before)s,
            coalesce(%(not_before)s, {now}), {now}, 'waiting'
        {source}
        WHERE NOT EXISTS (SELECT 1 FROM {_POST} AS p WHERE p.session_id = %(key)s AND p.key = {_KEY})
            AND (SELECT count(*) FROM {_POST} WHERE {_WAITING}) < %(most)s
        RETURNING sequence, posted_at, due_at, due_at <= posted_at, false"""


def _add_at(clock: Clock) -> str:
    # PostgreSQL's clock advances within a statement.
    return _add("given.at", f"FROM (SELECT {clock.now} AS at) AS given")


ADD_POST: Final = Statement(
    postgresql=f"""
        WITH added AS ({_add_at(POSTGRESQL)}), next AS (
            UPDATE {_SESSION} AS s SET next_post_at = added.due_at FROM added
            WHERE s.id = %(key)s AND (s.next_post_at IS NULL OR s.next_post_at > added.due_at))
        SELECT sequence, posted_at, due_at, due_at <= posted_at, true FROM added""",
    sqlite=_add(SQLITE.now),
    citus=(_add_at(CITUS),),
)
"""Adds no row for a key that exists, and none beyond the maximum. The last column is true if the session's
``next_post_at`` is up to date; otherwise the caller sets it.
"""

DUE_POSTS: Final = with_clock(
    lambda clock: (
        f"""
        SELECT id, payload FROM {_POST} WHERE {_WAITING} AND due_at <= {clock.now}
        ORDER BY due_at, sequence LIMIT %(limit)s"""
    )
)


def _mark_received(place: str, is_listed: str) -> str:
    return f"""
        UPDATE {_POST} SET state = 'received', payload = NULL, received_at = %(at)s,
            received_version = %(version)s, position = %(first)s + {place}
        WHERE {is_listed}"""


# SQLite would read all posts of the session.
MARK_RECEIVED: Final = Statement(
    postgresql=_mark_received(
        "array_position(%(keys)s::bigint[], id) - 1",
        "session_id = %(key)s AND id = ANY(%(keys)s::bigint[])",
    ),
    sqlite=_mark_received(
        f"(SELECT key FROM json_each(%(keys)s) WHERE value = {_POST}.id)",
        "+session_id = %(key)s AND id IN (SELECT value FROM json_each(%(keys)s))",
    ),
)

WITHDRAW_POST: Final = Statement(
    f"""UPDATE {_POST} SET state = 'withdrawn', payload = NULL
        WHERE {_WAITING} AND post_id = %(post_id)s RETURNING id"""
)

SET_NEXT_POST: Final = Statement(
    f"""UPDATE {_SESSION} SET next_post_at = (SELECT min(due_at) FROM {_POST} WHERE {_WAITING})
        WHERE id = %(key)s"""
)


def _contains(vendor_form: str, word: str) -> str:
    return vendor_form.format("s.pending_client_tool_calls", f"""'"{word}":'""") + " > 0"


def _find_due(clock: Clock, of_tenant: str, position: str) -> str:
    first = f"""(SELECT p.{{}} FROM {_POST} AS p WHERE p.session_id = s.id AND p.state = 'waiting'
                ORDER BY p.due_at, p.sequence LIMIT 1)"""
    # A suspended session waits if none of its calls is answered. If only some of the calls are answered, the
    # caller must read them.
    return f"""
        SELECT s.id, s.next_post_at, s.tenant, s.session_id, s.status, s.suspension_kind,
            s.pending_client_tool_calls, {first.format("post_id")}, {first.format("author")},
            (SELECT count(*) FROM {_POST} AS p
             WHERE p.session_id = s.id AND p.state = 'waiting' AND p.due_at <= {clock.now})
        FROM {_SESSION} AS s
        WHERE {of_tenant} s.next_post_at <= {clock.now}
            AND s.status IN ({", ".join(f"'{status}'" for status in NON_TERMINAL)})
            AND (s.status <> 'paused' OR s.suspension_kind IS NOT NULL)
            AND (s.suspension_kind IS NULL OR s.status NOT IN ('paused', 'interrupted')
                OR s.pending_client_tool_calls IS NULL OR {_contains(position, "submitted_at")}
                OR NOT {_contains(position, "tool_name")})
            AND (s.next_post_at, s.id) > (%(due_at)s, %(key)s)
            AND NOT EXISTS (SELECT 1 FROM {table(Lock)} AS l
                WHERE l.tenant = s.tenant AND l.name = s.session_id AND l.expires_at > {clock.now})
        ORDER BY s.next_post_at, s.id LIMIT %(limit)s"""


def _find_due_statement(postgresql: str = "", sqlite: str = "") -> Statement:
    strpos = "pg_catalog.strpos({}, {})"
    return Statement(
        _find_due(POSTGRESQL, postgresql, strpos),
        _find_due(SQLITE, sqlite, "instr({}, {})"),
        citus=(_find_due(CITUS, postgresql, strpos),),
    )


# SQLite would prefer an index that begins with the tenant, and sort the rows afterwards.
FIND_DUE_POSTS: Final = _find_due_statement(
    "s.tenant = (SELECT %(tenant)s) AND", "+s.tenant = %(tenant)s AND"
)
FIND_DUE_POSTS_OF_ALL: Final = _find_due_statement()
