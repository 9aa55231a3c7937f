"""The SQL statements of the state store, but for the step in one statement: that is in `step_sql`.

A statement for PostgreSQL alone holds its whole decision in its conditions. When one of them does not hold,
it changes nothing, and the portable form decides: it locks first.

After a wait for a lock, PostgreSQL checks the conditions of an ``UPDATE`` again on the row as it is then.
Everything else in the statement, also a subselect, is as it was at the start. So a condition decides on a
column of the locked row.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from helix_store.engine.expressions import is_in_list
from helix_store.engine.statement import Statement, table
from helix_store.models import Checkpoint, Item, Lock, Message, Run, Session, StagedChange, SubSessionRef
from helix_store.sessions.layout import STATE_COLUMNS
from helix_store.sessions.rules import SUPERSEDED

__all__ = [
    "CHECKPOINT_COLUMNS",
    "COMPARE_AND_SET_STATUS",
    "COPY_ITEMS",
    "COPY_MESSAGES",
    "CURRENT_COLUMNS",
    "ENDED_RUN_COLUMNS",
    "END_LOCKED_RUN",
    "FENCE",
    "FENCE_HOLDS",
    "FOREST_KEYS",
    "LATEST_CHECKPOINT",
    "LOAD_STATE",
    "MESSAGE_PAGE",
    "SESSION_BY_ID",
    "STAGE_CHANGE",
    "TAKE_STAGED",
    "TOUCH_SESSION",
    "TREE_KEYS",
    "end_run",
    "session_by_id",
]

_SESSION: Final = table(Session)
_CHECKPOINT: Final = table(Checkpoint)
_ITEM: Final = table(Item)
_MESSAGE: Final = table(Message)
_STAGED: Final = table(StagedChange)
_REF: Final = table(SubSessionRef)
_RUN: Final = table(Run)


def session_by_id(alias: str = "", *, session_id: str = "session_id") -> str:
    """The condition for one session; ``session_id`` is the name of a parameter.

    PostgreSQL takes a tenant that came after its statistics for one without sessions. Any index that begins
    with the tenant looks as good as that of the key then, and a look-up could read all that the tenant has.
    So the planner does not see the tenant as a value: ``tenant = (SELECT …)`` is planned for any tenant.
    """
    prefix = f"{alias}." if alias else ""
    return f"{prefix}tenant = (SELECT %(tenant)s) AND {prefix}session_id = %({session_id})s"


SESSION_BY_ID: Final = session_by_id()


# --- Reads -----------------------------------------------------------------------------------------

CURRENT_COLUMNS: Final = (
    *STATE_COLUMNS,
    "base_key",
    "current_id",
    "current__payload",
    "current__envelope",
    "current__version",
    "current__base_id",
    "current__base__payload",
    "current__base__version",
)
"""What the current state is read from, by the names of the ORM."""

_CURRENT_SQL: Final = {
    "current__payload": "c.payload",
    "current__envelope": "c.envelope",
    "current__version": "c.version",
    "current__base_id": "c.base_id",
    "current__base__payload": "b.payload",
    "current__base__version": "b.version",
}

# With its session, a checkpoint is looked for in one part of a table that is partitioned by session.
LOAD_STATE: Final = Statement(
    postgresql=f"""
        SELECT {", ".join(_CURRENT_SQL.get(name, f"s.{name}") for name in CURRENT_COLUMNS)}
        FROM {_SESSION} AS s
        LEFT JOIN {_CHECKPOINT} AS c ON c.session_id = s.id AND c.id = s.current_id
        LEFT JOIN {_CHECKPOINT} AS b ON b.session_id = c.session_id AND b.id = c.base_id
        WHERE {session_by_id("s")}"""
)

CHECKPOINT_COLUMNS: Final = (
    "checkpoint_id",
    "run_id",
    "step_id",
    "step_count",
    "status",
    "message_count",
    "stream_sequence",
    "created_at",
    "version",
    "payload",
    "envelope",
    "base_id",
    "base__payload",
    "session__created_at",
)
"""What a checkpoint is read from, by the names of the ORM."""

_CHECKPOINT_SQL: Final = {"session__created_at": "s.created_at", "base__payload": "b.payload"}

# As a join it would sort all checkpoints of the session.
LATEST_CHECKPOINT: Final = Statement(
    postgresql=f"""
        SELECT {", ".join(_CHECKPOINT_SQL.get(name, f"c.{name}") for name in CHECKPOINT_COLUMNS)}
        FROM {_SESSION} AS s, LATERAL (
            SELECT * FROM {_CHECKPOINT}
            WHERE session_id = s.id AND kind = 'step' AND namespace = '' ORDER BY version DESC LIMIT 1
        ) AS c LEFT JOIN {_CHECKPOINT} AS b ON b.session_id = c.session_id AND b.id = c.base_id
        WHERE {session_by_id("s")}"""
)

# A plan for a known range looks so much better than one for any range that the server would make it again for
# each call, which costs more than reading a page.
MESSAGE_PAGE: Final = Statement(
    postgresql=f"""
        WITH page AS MATERIALIZED (
            SELECT id, message_count, %(offset)s::bigint AS first,
                coalesce(%(last)s::bigint, message_count) AS last
            FROM {_SESSION} WHERE {SESSION_BY_ID}
        )
        SELECT m.payload, page.message_count FROM page, LATERAL (
            SELECT payload FROM {_MESSAGE}
            WHERE session_id = page.id AND sequence > page.first AND sequence <= page.last ORDER BY sequence
        ) AS m"""
)


def _trees(chosen: tuple[str, str], columns: str) -> Statement:
    """The chosen sessions (``top``) and their local descendants, reachable by parent or by local ref.

    UNION drops what was seen, so that a cycle ends. On SQLite, what is always true is marked as unlikely:
    SQLite expects a tree to be huge, and with statistics it would build a Bloom filter of all sessions for
    every walk.
    """
    return Statement(
        postgresql=f"""
        WITH RECURSIVE tree(top, id, session_id) AS (
            SELECT id, id, session_id FROM {_SESSION} WHERE {chosen[0]}
          UNION
            SELECT tree.top, child.id, child.session_id FROM tree CROSS JOIN LATERAL (
                SELECT id, session_id FROM {_SESSION}
                WHERE tenant = (SELECT %(tenant)s) AND parent_session_id = tree.session_id
              UNION ALL
                SELECT target.id, target.session_id FROM {_REF} AS ref
                JOIN {_SESSION} AS target ON target.session_id = ref.sub_session_id
                WHERE ref.session_id = tree.id AND ref.location = 'local'
                    AND target.tenant = (SELECT %(tenant)s)
            ) AS child
        )
        SELECT {columns} FROM tree""",
        sqlite=f"""
        WITH RECURSIVE tree(top, id, session_id) AS (
            SELECT id, id, session_id FROM {_SESSION} WHERE {chosen[1]}
          UNION
            SELECT tree.top, child.id, child.session_id FROM tree
            JOIN {_SESSION} AS child
                ON child.tenant = %(tenant)s AND child.parent_session_id = tree.session_id
                AND likelihood(tree.session_id <> '', 0.000001)
          UNION
            SELECT tree.top, target.id, target.session_id FROM tree
            JOIN {_REF} AS ref ON ref.session_id = tree.id AND ref.location = 'local'
            JOIN {_SESSION} AS target
                ON target.tenant = %(tenant)s AND target.session_id = ref.sub_session_id
                AND likelihood(tree.session_id <> '', 0.000001)
        )
        SELECT {columns} FROM tree""",
    )


TREE_KEYS: Final = _trees((SESSION_BY_ID, SESSION_BY_ID), "id")
"""The keys of one tree, by the id of its top."""

FOREST_KEYS: Final = _trees(is_in_list("id", "keys", "bigint"), "top, id")
"""The keys of many trees, each with the key of its top, by the keys of the tops."""


# --- Writes under the session's lock ----------------------------------------------------------------

TAKE_STAGED: Final = Statement(
    f"DELETE FROM {_STAGED} WHERE session_id = %(key)s AND step_id = %(step_id)s RETURNING id, payload"
)

COPY_MESSAGES: Final = Statement(
    f"""
        INSERT INTO {_MESSAGE} (session_id, sequence, role, payload, created_at)
        SELECT %(target)s, sequence, role, payload, created_at FROM {_MESSAGE}
        WHERE session_id = %(source)s AND sequence <= %(count)s ORDER BY sequence"""
)

COPY_ITEMS: Final = Statement(
    f"""
        INSERT INTO {_ITEM} (session_id, lane, key, payload, created_at)
        SELECT %(target)s, lane, key, payload, created_at FROM {_ITEM}
        WHERE session_id = %(source)s AND created_at <= %(until)s ORDER BY lane, id"""
)

ENDED_RUN_COLUMNS: Final = tuple(field.attname for field in Run._meta.concrete_fields)


def _end_run(source: str, key: str, *, is_fenced: bool) -> str:
    """The end of a run. The first end time counts. With a fence, a superseded run stays as it is."""
    return f"""
        UPDATE {_RUN}
        SET status = %(status)s, ended_at = coalesce(ended_at, %(at)s),
            step_count = coalesce(%(step_count)s, step_count),
            completion_reason = coalesce(%(completion_reason)s, completion_reason),
            error = coalesce(%(error)s, error)
        {source}
        WHERE session_id = {key} AND run_id = %(run_id)s
            {f"AND coalesce(completion_reason, '') <> '{SUPERSEDED}'" if is_fenced else ""}
        RETURNING {", ".join(ENDED_RUN_COLUMNS)}"""


END_LOCKED_RUN: Final = {
    is_fenced: Statement(_end_run("", "%(key)s", is_fenced=is_fenced)) for is_fenced in (False, True)
}
"""By whether the write has a fence."""

# A new version of the row with the same values: a single statement that waits for the row looks again.
TOUCH_SESSION: Final = Statement(f"UPDATE {_SESSION} SET version = version WHERE id = %(key)s")


# --- Writes in one statement -------------------------------------------------------------------------

# Decided on the locked row: the status.
COMPARE_AND_SET_STATUS: Final = Statement(
    postgresql=f"""
        UPDATE {_SESSION}
        SET status = %(status)s, failure_reason = %(failure_reason)s, version = version + 1,
            updated_at = %(at)s
        WHERE {SESSION_BY_ID} AND status = ANY(%(expected)s)
        RETURNING version"""
)

# Decided on the locked row: that it exists. A conflict updates the row where it stands, so that a repeated
# tool call keeps its place in the order.
STAGE_CHANGE: Final = Statement(
    postgresql=f"""
        WITH head AS (
            SELECT id FROM {_SESSION} WHERE {SESSION_BY_ID}
            FOR NO KEY UPDATE
        )
        INSERT INTO {_STAGED} (session_id, step_id, tool_call_id, payload, created_at)
        SELECT id, %(step_id)s, %(tool_call_id)s, %(payload)s, %(at)s FROM head
        ON CONFLICT (session_id, step_id, tool_call_id)
        DO UPDATE SET payload = excluded.payload, created_at = excluded.created_at
        RETURNING id"""
)

# The share lock prevents a takeover until the transaction ends, as `hold_fence` does.
FENCE: Final = f"""fence AS MATERIALIZED (
            SELECT token FROM {table(Lock)} WHERE tenant = %(tenant)s AND name = %(session_id)s FOR KEY SHARE
        ), """
FENCE_HOLDS: Final = "NOT EXISTS (SELECT 1 FROM fence WHERE token > %(fencing_token)s::bigint)"


@cache
def end_run(*, is_fenced: bool) -> Statement:
    """The end of a run, with the session locked as in the portable form.

    Decided with the fence held: its token. On the run's row: that no other run has replaced it.
    """
    return Statement(
        postgresql=f"""
        WITH {FENCE if is_fenced else ""}head AS (
            SELECT id AS key FROM {_SESSION}
            WHERE {SESSION_BY_ID} {f"AND {FENCE_HOLDS}" if is_fenced else ""}
            FOR NO KEY UPDATE
        ){_end_run("FROM head", "head.key", is_fenced=is_fenced)}"""
    )
