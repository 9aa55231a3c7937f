"""The SQL of the doctor. A statement on sessions returns the tenant, session id, key and row of each fault.

Each one examines a page of sessions in one statement, which sees all tables at the same moment.
"""

from __future__ import annotations

from typing import Final

from helix_store.core.types import SessionStatus
from helix_store.engine.expressions import for_keys
from helix_store.engine.statement import Statement, table
from helix_store.models import (
    Checkpoint,
    Message,
    Operation,
    Post,
    Session,
    Stream,
    StreamChunk,
    UsageEntry,
)
from helix_store.sessions.layout import JSON_COLUMNS

_SESSION: Final = table(Session)
_CHECKPOINT: Final = table(Checkpoint)

_STATES: Final = "('state', 'step', 'base')"
"""The kinds that have the session's version. Graphs and snapshots number their checkpoints on their own."""


def _checkpoints(condition: str, *, join: str = "") -> Statement:
    """Return a statement on checkpoints ``c`` of sessions ``s`` that meet a condition."""
    return for_keys(
        f"""
        SELECT s.tenant, s.session_id, s.id, c.version FROM {_SESSION} AS s
        JOIN {_CHECKPOINT} AS c ON c.session_id = s.id {join}
        WHERE s.id IN %(keys)s AND {condition} ORDER BY s.id, c.id"""
    )


def _sessions(condition: str, *, join: str = "") -> Statement:
    """Return a statement on sessions ``s`` that meet a condition."""
    return for_keys(
        f"""
        SELECT s.tenant, s.session_id, s.id, NULL FROM {_SESSION} AS s {join}
        WHERE s.id IN %(keys)s AND {condition} ORDER BY s.id"""
    )


# --- Histories ---------------------------------------------------------------------------------------


def _of_messages(value: str) -> str:
    """Return a value of a session's messages. With a join, SQLite would build an index for each page."""
    return f"(SELECT {value} FROM {table(Message)} WHERE session_id = s.id)"


HISTORIES: Final = for_keys(
    f"""
    SELECT tenant, session_id, id, message_count, number, first, last FROM (
        SELECT s.tenant, s.session_id, s.id, s.message_count, {_of_messages("count(*)")} AS number,
            COALESCE({_of_messages("min(sequence)")}, 1) AS first,
            COALESCE({_of_messages("max(sequence)")}, 0) AS last
        FROM {_SESSION} AS s WHERE s.id IN %(keys)s
    ) AS h
    WHERE message_count <> last OR number <> last OR first <> 1 ORDER BY id"""
)
"""Sessions whose messages are not numbered from 1 to their count, with count, number, first and last."""

CHECKPOINT_BEYOND_HISTORY: Final = _checkpoints(
    f"c.kind = 'step' AND c.message_count > COALESCE({_of_messages('max(sequence)')}, 0)"
)

# --- States ------------------------------------------------------------------------------------------

VERSION_ZERO: Final = for_keys(
    f"""
    SELECT tenant, session_id, id, NULL FROM {_SESSION} WHERE id IN %(keys)s AND version < 1
    UNION ALL
    SELECT s.tenant, s.session_id, s.id, c.version FROM {_SESSION} AS s
    JOIN {_CHECKPOINT} AS c ON c.session_id = s.id AND c.kind IN {_STATES}
    WHERE s.id IN %(keys)s AND c.version < 1"""
)
CHECKPOINT_FROM_THE_FUTURE: Final = _checkpoints(
    f"c.kind IN {_STATES} AND c.version > s.version AND s.version >= 1"
)
_CURRENT: Final = f"LEFT JOIN {_CHECKPOINT} AS k ON k.id = s.current_id AND k.session_id = s.id"
CURRENT_MISSING: Final = _sessions("k.id IS NULL", join=_CURRENT)
CURRENT_MISTAKEN: Final = _sessions(
    """k.id IS NOT NULL AND (
        (k.kind = 'step') <> s.current_is_checkpoint OR k.kind NOT IN ('step', 'state')
        OR (k.kind <> 'step' AND s.base_key IS NOT NULL))""",
    join=_CURRENT,
)
STATE_UNNEEDED: Final = _checkpoints("c.kind = 'state' AND k.id IS NOT NULL AND c.id <> k.id", join=_CURRENT)

# --- Deltas ------------------------------------------------------------------------------------------

_BASE: Final = f"LEFT JOIN {_CHECKPOINT} AS b ON b.id = c.base_id"
BASE_MISSING: Final = _checkpoints("c.base_id IS NOT NULL AND b.id IS NULL", join=_BASE)
BASE_UNSOUND: Final = _checkpoints(
    """b.id IS NOT NULL AND (
        b.session_id <> c.session_id OR b.base_id IS NOT NULL OR b.kind NOT IN ('step', 'base')
        OR b.version >= c.version OR c.kind NOT IN ('state', 'step'))""",
    join=_BASE,
)
BASE_NAMED: Final = _checkpoints("c.kind = 'base' AND c.checkpoint_id IS NOT NULL")
BASE_UNNEEDED: Final = _checkpoints(
    f"""c.kind = 'base' AND NOT EXISTS (
        SELECT 1 FROM {_CHECKPOINT} AS d WHERE d.session_id = c.session_id AND d.base_id = c.id)"""
)

_OTHER_ID: Final = "c.version = o.version AND c.checkpoint_id <> o.checkpoint_id"
_OTHER_VERSION: Final = "c.checkpoint_id = o.checkpoint_id AND c.version <> o.version"


def _has_checkpoint(condition: str) -> str:
    return f"""EXISTS (
        SELECT 1 FROM {_CHECKPOINT} AS c
        WHERE c.session_id = o.session_id AND c.kind = 'step' AND c.namespace = '' AND {condition})"""


OPERATION_MISFIT: Final = for_keys(
    f"""
    SELECT s.tenant, s.session_id, s.id, o.operation_id FROM {_SESSION} AS s
    JOIN {table(Operation)} AS o ON o.session_id = s.id
    WHERE s.id IN %(keys)s AND o.session_id IN %(keys)s AND (
        (o.version > s.version AND s.version >= 1)
        OR {_has_checkpoint(_OTHER_ID)} OR {_has_checkpoint(_OTHER_VERSION)})"""
)
"""Operations whose version never existed, or of another checkpoint. The checkpoint may have been pruned."""

NEXT_POST_OFF: Final = for_keys(
    f"""
    SELECT tenant, session_id, id, NULL FROM (
        SELECT s.tenant, s.session_id, s.id, s.next_post_at AS stored,
            (SELECT min(p.due_at) FROM {table(Post)} AS p
             WHERE p.session_id = s.id AND p.state = 'waiting') AS due
        FROM {_SESSION} AS s WHERE s.id IN %(keys)s
    ) AS h
    WHERE stored <> due OR (stored IS NULL) <> (due IS NULL) ORDER BY id"""
)

# --- Trees -------------------------------------------------------------------------------------------

_PARENT: Final = f"LEFT JOIN {_SESSION} AS p ON p.tenant = s.tenant AND p.session_id = s.parent_session_id"
PARENT_MISSING: Final = _sessions("s.parent_session_id IS NOT NULL AND p.id IS NULL", join=_PARENT)
ROOT_OF_ANOTHER_TREE: Final = _sessions(
    """(s.parent_session_id IS NULL OR p.id IS NOT NULL)
        AND COALESCE(s.root_session_id, s.session_id)
            <> COALESCE(p.root_session_id, p.session_id, s.session_id)""",
    join=_PARENT,
)

# --- Words and texts ---------------------------------------------------------------------------------

_STATUSES: Final = ", ".join(f"'{status.value}'" for status in SessionStatus)
# Only steps have a status, and no constraint restricts it.
UNKNOWN_CHECKPOINT_STATUS: Final = _checkpoints(f"c.kind = 'step' AND c.status NOT IN ({_STATUSES})")


def _head_texts(cast: str) -> str:
    return f"""
        SELECT tenant, session_id, id, tags{cast}, metadata{cast}, typed_metadata,
            {", ".join(JSON_COLUMNS)}
        FROM {_SESSION} WHERE id IN %(keys)s ORDER BY id"""


HEAD_TEXTS: Final = for_keys(Statement(_head_texts("::text"), _head_texts("")))

# --- Rows without an owner, streams ------------------------------------------------------------------

USAGE_OF_UNKNOWN_SESSION: Final = for_keys(
    f"""
    SELECT u.tenant, u.recorded_for, u.id, u.entry_id FROM {table(UsageEntry)} AS u
    LEFT JOIN {_SESSION} AS s ON s.id = u.session_id
    WHERE u.id IN %(keys)s AND u.session_id IS NOT NULL
        AND (s.id IS NULL OR s.tenant <> u.tenant OR s.session_id <> u.recorded_for)
    ORDER BY u.id"""
)


def _of_chunks(value: str) -> str:
    return f"(SELECT {value} FROM {table(StreamChunk)} WHERE stream_id = t.id)"


STREAMS: Final = for_keys(
    f"""
    SELECT tenant, stream_id, id, floor, last_sequence, number, first, last FROM (
        SELECT t.tenant, t.stream_id, t.id, t.floor, t.last_sequence, {_of_chunks("count(*)")} AS number,
            {_of_chunks("min(sequence)")} AS first, {_of_chunks("max(sequence)")} AS last
        FROM {table(Stream)} AS t WHERE t.id IN %(keys)s
    ) AS h
    WHERE floor < 0 OR floor > last_sequence OR last_sequence <> COALESCE(last, floor)
        OR first <> floor + 1 OR number <> last - floor
    ORDER BY id"""
)
"""Streams whose chunks do not run from the floor to the last sequence, with number, first and last."""
