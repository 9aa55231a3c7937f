"""The SQL statements of the state store, except the step in one statement, which is in `step_sql`.

A PostgreSQL-only statement expresses its whole decision in its conditions. If one of them does not hold, the
statement changes nothing, and the portable form decides: it locks first.

After an ``UPDATE`` has waited for a lock, PostgreSQL rechecks its conditions on the row as it is then.
Everything else in the statement, including a subselect, reflects the start of the statement. A condition must
therefore depend on a column of the locked row.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Final

from helix_store.core.types import CheckpointHead
from helix_store.counters.sql import has_budgets, may_be_stopped
from helix_store.engine.commits import recorded
from helix_store.engine.expressions import for_keys
from helix_store.engine.statement import Statement, table
from helix_store.models import (
    Checkpoint,
    InterruptRequest,
    Lock,
    Message,
    Operation,
    Run,
    Session,
    StagedChange,
    SubSessionRef,
)
from helix_store.sessions.layout import STATE_COLUMNS
from helix_store.sessions.rules import DEFAULT_STEP, SUPERSEDED

_SESSION: Final = table(Session)
_CHECKPOINT: Final = table(Checkpoint)
_MESSAGE: Final = table(Message)
_STAGED: Final = table(StagedChange)
_REF: Final = table(SubSessionRef)
_RUN: Final = table(Run)
_INTERRUPT: Final = table(InterruptRequest)


def session_by_id(alias: str = "", *, session_id: str = "session_id") -> str:
    """Return the condition for one session; ``session_id`` is the name of a parameter.

    PostgreSQL assumes that a tenant added after its statistics has no sessions. Any index that begins with
    the tenant then looks as good as the key's index, and a lookup could read all rows of the tenant. To hide
    the value from the planner, the tenant is a subselect: ``tenant = (SELECT …)`` is planned for any tenant.
    """
    prefix = f"{alias}." if alias else ""
    return f"{prefix}tenant = (SELECT %(tenant)s) AND {prefix}session_id = %({session_id})s"


SESSION_BY_ID: Final = session_by_id()


# --- Reads -----------------------------------------------------------------------------------------

OWNERSHIP: Final = Statement(
    f"SELECT root_session_id, client_tool_call_ownership FROM {_SESSION} WHERE {SESSION_BY_ID}"
)

CURRENT_COLUMNS: Final = (
    *STATE_COLUMNS,
    "next_post_at",
    "base_key",
    "current_id",
    "current__payload",
    "current__envelope",
    "current__version",
    "current__base_id",
    "current__base__payload",
    "current__base__version",
)
"""The columns of the current state, by their names in the ORM."""

_CURRENT_SQL: Final = {
    "current__payload": "c.payload",
    "current__envelope": "c.envelope",
    "current__version": "c.version",
    "current__base_id": "c.base_id",
    "current__base__payload": "b.payload",
    "current__base__version": "b.version",
}

INTERRUPT_COLUMNS: Final = ("kind", "reason", "run_id", "requested_at")


def _load(more_columns: str, more_tables: str = "") -> str:
    # If its session is known, a checkpoint is found in one partition of a table partitioned by session.
    return f"""
        SELECT {", ".join(_CURRENT_SQL.get(name, f"s.{name}") for name in CURRENT_COLUMNS)}{more_columns}
        FROM {_SESSION} AS s
        LEFT JOIN {_CHECKPOINT} AS c ON c.session_id = s.id AND c.id = s.current_id
        LEFT JOIN {_CHECKPOINT} AS b ON b.session_id = c.session_id AND b.id = c.base_id{more_tables}
        WHERE {session_by_id("s")}"""


LOAD_STATE: Final = Statement(
    _load(f""",
            {has_budgets("s.tenant")}""")
)
"""The state, and whether its tenant has budgets."""


def _load_step(may_be_stopped: str) -> str:
    return _load(
        f""",
            EXISTS (
                SELECT 1 FROM {_STAGED} AS g WHERE g.session_id = s.id AND g.step_id
                    = coalesce(CAST(%(step_id)s AS text), '{DEFAULT_STEP}' || (s.step_count + 1))
            ), {", ".join(f"i.{name}" for name in INTERRUPT_COLUMNS)}, {may_be_stopped}""",
        f"""
        LEFT JOIN {_INTERRUPT} AS i ON i.session_id = s.id AND i.run_id = %(run_id)s AND EXISTS (
            SELECT 1 FROM {_RUN} AS r
            WHERE r.session_id = s.id AND r.run_id = i.run_id AND r.status = 'running'
        )""",
    )


LOAD_STEP: Final = Statement(_load_step("false"))
"""The state, whether changes are staged for the step, the interrupt request that is bound to its run, and
whether the budgets of the session must be checked."""
LOAD_CAPPED_STEP: Final = Statement(_load_step(may_be_stopped("s")), sqlite=_load_step("true"))
"""`LOAD_STEP` for a session that has budgets, which SQLite always checks."""

CHECKPOINT_HEAD_COLUMNS: Final = (
    *(field.name for field in fields(CheckpointHead) if field.name != "session_id"),
    "version",
)
"""The columns of a listed checkpoint."""
CHECKPOINT_COLUMNS: Final = (
    *CHECKPOINT_HEAD_COLUMNS,
    "payload",
    "envelope",
    "base_id",
    "base__payload",
    "session__created_at",
)
"""The columns of a checkpoint, by their names in the ORM."""

_CHECKPOINT_SQL: Final = {
    "session__created_at": f"(SELECT created_at FROM {_SESSION} WHERE id = c.session_id)",
    "base__payload": "b.payload",
}

# A join with the session would sort all of its checkpoints.
LATEST_CHECKPOINT: Final = Statement(
    f"""
        SELECT {", ".join(_CHECKPOINT_SQL.get(name, f"c.{name}") for name in CHECKPOINT_COLUMNS)}
        FROM {_CHECKPOINT} AS c
        LEFT JOIN {_CHECKPOINT} AS b ON b.session_id = c.session_id AND b.id = c.base_id
        WHERE c.session_id = (SELECT id FROM {_SESSION} WHERE {SESSION_BY_ID})
            AND c.kind = 'step' AND c.namespace = ''
        ORDER BY c.version DESC LIMIT 1"""
)

# This returns the session's row even without staged changes, so one statement also shows whether it exists.
STAGED_CHANGES: Final = Statement(
    f"""
        SELECT g.id, g.payload FROM {_SESSION} AS s
        LEFT JOIN {_STAGED} AS g ON g.session_id = s.id AND g.step_id = %(step_id)s
        WHERE {session_by_id("s")}"""
)


def _messages(after: str, last: str) -> Statement:
    """Return the messages in a range of sequences, oldest first, each with the number of all messages.

    The range is a subselect: a plan for a known range looks so much better than one for any range that
    PostgreSQL would replan each call, which costs more than reading a page.
    """
    return Statement(
        f"""
        WITH page AS (
            SELECT id, message_count, {after} AS after, {last} AS last FROM {_SESSION} WHERE {SESSION_BY_ID}
        )
        SELECT payload, (SELECT message_count FROM page) FROM {_MESSAGE}
        WHERE session_id = (SELECT id FROM page) AND sequence > (SELECT after FROM page)
            AND sequence <= (SELECT last FROM page)
        ORDER BY sequence"""
    )


_OFFSET: Final = "CAST(%(offset)s AS bigint)"
_LIMIT: Final = "CAST(%(limit)s AS bigint)"
MESSAGES: Final = _messages(_OFFSET, f"coalesce({_OFFSET} + {_LIMIT}, message_count)")
NEWEST_MESSAGES: Final = _messages(
    f"coalesce(message_count - {_OFFSET} - {_LIMIT}, 0)", f"message_count - {_OFFSET}"
)
"""`MESSAGES`, but the offset counts from the end."""


def _trees(chosen: str, columns: str) -> Statement:
    """Return the chosen sessions (``top``) and their local descendants, by parent or by local ref.

    UNION drops rows it has already seen, so that a cycle ends.

    If a few sessions have most of the refs, a planner expects many refs for each session, and would read all
    refs, or all sessions of a small tenant, for each session of the tree. PostgreSQL does not apply these
    statistics to a range, and ``OFFSET 0`` keeps its joins in order. On SQLite, a second condition makes the
    index look better, and ``CROSS JOIN`` keeps the order. A condition that is always true is marked there as
    unlikely, because SQLite expects a huge tree, and with statistics it would build a Bloom filter of all
    sessions for every walk.
    """
    return Statement(
        postgresql=f"""
        WITH RECURSIVE tree(top, id, session_id) AS (
            SELECT id, id, session_id FROM {_SESSION} WHERE {chosen}
          UNION
            SELECT tree.top, child.id, child.session_id FROM tree CROSS JOIN LATERAL (
                SELECT id, session_id FROM {_SESSION}
                WHERE tenant = (SELECT %(tenant)s) AND parent_session_id = tree.session_id
              UNION ALL
                SELECT target.id, ref.sub_session_id FROM {_REF} AS ref CROSS JOIN LATERAL (
                    SELECT id FROM {_SESSION}
                    WHERE tenant = (SELECT %(tenant)s) AND session_id = ref.sub_session_id OFFSET 0
                ) AS target
                WHERE ref.session_id BETWEEN tree.id AND tree.id AND ref.location = 'local'
            ) AS child
        )
        SELECT {columns} FROM tree""",
        sqlite=f"""
        WITH RECURSIVE tree(top, id, session_id) AS (
            SELECT id, id, session_id FROM {_SESSION} WHERE {chosen}
          UNION
            SELECT tree.top, child.id, child.session_id FROM tree
            JOIN {_SESSION} AS child
                ON child.tenant = %(tenant)s AND child.parent_session_id = tree.session_id
                AND likelihood(tree.session_id <> '', 0.000001)
          UNION
            SELECT tree.top, target.id, target.session_id FROM tree
            CROSS JOIN {_REF} AS ref
                ON ref.session_id = tree.id AND ref.sub_session_id >= '' AND ref.location = 'local'
            CROSS JOIN {_SESSION} AS target
                ON target.tenant = %(tenant)s AND target.session_id = ref.sub_session_id
                AND likelihood(tree.session_id <> '', 0.000001)
        )
        SELECT {columns} FROM tree""",
    )


TREE_KEYS: Final = _trees(SESSION_BY_ID, "id")
"""The keys of the sessions of one tree, by the id of its root."""

FOREST_KEYS: Final = for_keys(_trees("id IN %(keys)s", "top, id"))
"""The keys of the sessions of many trees, each with the key of its root, by the keys of the roots."""


# --- Writes under the session's lock ----------------------------------------------------------------


def staged_version(row: str) -> str:
    """Return the version of a staged change's row: a row that is written again gets a different ``xmin``."""
    return f"{row}.id || ':' || {row}.xmin"


def mark_taken(taken: str, *, session: str) -> str:
    """Mark each staged change that was ``taken``, under the id of the call that staged it.

    A call whose reply was lost finds this mark once the change no longer exists.
    """
    return f"""
        INSERT INTO {table(Operation)} (session_id, operation_id, digest, checkpoint_id, version, created_at)
        SELECT {session}, split_part(entry, ':', 1), '', 'staged', 0, %(at)s
        FROM {taken}, unnest(string_to_array(rtrim({taken}.call_ids), ' ')) AS entry
        ON CONFLICT (session_id, operation_id) DO NOTHING"""


_OF_SESSION: Final = f"DELETE FROM {_STAGED} WHERE session_id = %(key)s"
_OF_STEP: Final = f"{_OF_SESSION} AND step_id = %(step_id)s RETURNING id, payload"

# On SQLite and Citus, rows keep no call ids, because no change is staged in one statement there.
TAKE_STAGED: Final = Statement(
    postgresql=f"""
        WITH taken AS ({_OF_STEP}, call_ids), marked AS (
            {mark_taken("taken", session="%(key)s")}
        )
        SELECT id, payload FROM taken""",
    sqlite=_OF_STEP,
    citus=(_OF_STEP,),
)
DELETE_STAGED: Final = Statement(
    postgresql=f"""
        WITH taken AS ({_OF_SESSION} RETURNING call_ids)
        {mark_taken("taken", session="%(key)s")}""",
    sqlite=_OF_SESSION,
    citus=(_OF_SESSION,),
)

COPY_MESSAGES: Final = Statement(
    f"""
        INSERT INTO {_MESSAGE} (session_id, sequence, role, payload, created_at)
        SELECT %(target)s, sequence, role, payload, created_at FROM {_MESSAGE}
        WHERE session_id = %(source)s AND sequence <= %(message_count)s ORDER BY sequence"""
)

RUN_COLUMNS: Final = tuple(field.attname for field in Run._meta.concrete_fields)


def _end_run(source: str, key: str, *, is_fenced: bool, records_call: bool = False) -> str:
    """End a run. The first end time counts. With a fence, a superseded run is left unchanged."""
    call = f", call_ids = {recorded('call_ids')}" if records_call else ""
    return f"""
        UPDATE {_RUN}
        SET status = %(status)s, ended_at = coalesce(ended_at, %(at)s),
            step_count = coalesce(%(step_count)s, step_count),
            completion_reason = coalesce(%(completion_reason)s, completion_reason),
            error = coalesce(%(error)s, error){call}
        {source}
        WHERE session_id = {key} AND run_id = %(run_id)s
            {f"AND coalesce(completion_reason, '') <> '{SUPERSEDED}'" if is_fenced else ""}
        RETURNING {", ".join(RUN_COLUMNS)}"""


END_LOCKED_RUN: Final = {
    is_fenced: Statement(_end_run("", "%(key)s", is_fenced=is_fenced)) for is_fenced in (False, True)
}
"""The key is whether the write has a fence."""

# A new row version with the same values makes a waiting one-statement write check its conditions again.
TOUCH_SESSION: Final = Statement(f"UPDATE {_SESSION} SET version = version WHERE id = %(key)s")


# --- Writes in one statement -------------------------------------------------------------------------

# The status is decided on the locked row.
COMPARE_AND_SET_STATUS: Final = Statement(
    postgresql=f"""
        UPDATE {_SESSION}
        SET status = %(status)s, failure_reason = %(failure_reason)s, version = version + 1,
            updated_at = %(at)s, call_ids = {recorded("call_ids", "(version + 1)::text")}
        WHERE {SESSION_BY_ID} AND status = ANY(%(expected)s)
        RETURNING version"""
)

# The existence of the session is decided on the locked row. A conflict updates the row in place, so that a
# repeated tool call keeps its place in the order.
STAGE_CHANGE: Final = Statement(
    postgresql=f"""
        WITH head AS (
            SELECT id FROM {_SESSION} WHERE {SESSION_BY_ID}
            FOR NO KEY UPDATE
        )
        INSERT INTO {_STAGED} AS known (session_id, step_id, tool_call_id, payload, created_at, call_ids)
        SELECT id, %(step_id)s, %(tool_call_id)s, %(payload)s, %(at)s, {recorded("''")} FROM head
        ON CONFLICT (session_id, step_id, tool_call_id)
        DO UPDATE SET payload = excluded.payload, created_at = excluded.created_at,
            call_ids = {recorded("known.call_ids")}
        RETURNING {staged_version("known")}, payload"""
)

# The share lock prevents a takeover until the transaction ends, as `hold_fence` does.
FENCE: Final = f"""fence AS MATERIALIZED (
            SELECT token FROM {table(Lock)} WHERE tenant = %(tenant)s AND name = %(session_id)s FOR KEY SHARE
        ), """
# True for the row version that the statement saw at its start. Every committed update changes xmin.
UNCHANGED: Final = f"s.xmin = (SELECT xmin FROM {_SESSION} WHERE {SESSION_BY_ID})"
FENCE_HOLDS: Final = "NOT EXISTS (SELECT 1 FROM fence WHERE token > %(fencing_token)s::bigint)"


@cache
def end_run(*, is_fenced: bool) -> Statement:
    """Return the statement that ends a run, locking the session as the portable form does.

    It checks the token while it holds the fence, and that no other run has replaced the run on its row.
    """
    return Statement(
        postgresql=f"""
        WITH {FENCE if is_fenced else ""}head AS (
            SELECT id AS key FROM {_SESSION}
            WHERE {SESSION_BY_ID} {f"AND {FENCE_HOLDS}" if is_fenced else ""}
            FOR NO KEY UPDATE
        ){_end_run("FROM head", "head.key", is_fenced=is_fenced, records_call=True)}"""
    )


@cache
def start_run(*, is_expected: bool, is_fenced: bool) -> Statement:
    """Return the statement that starts the run of an active session, unless another run or request exists.

    ``UNCHANGED`` ensures that there is no request. Starting another run at the same time is a conflict.
    """
    conditions = [SESSION_BY_ID, "s.status = 'active'", UNCHANGED]
    conditions += ["s.version = %(expected_version)s"] if is_expected else []
    conditions += [FENCE_HOLDS] if is_fenced else []
    return Statement(
        postgresql=f"""
        WITH {FENCE if is_fenced else ""}head AS (
            SELECT id FROM {_SESSION} AS s WHERE {" AND ".join(conditions)}
            FOR NO KEY UPDATE
        )
        INSERT INTO {_RUN} (session_id, run_id, turn, status, step_count, start_sequence, fencing_token,
            started_at, call_ids)
        SELECT head.id, %(run_id)s, 1 + coalesce((
                SELECT turn FROM {_RUN} WHERE session_id = head.id ORDER BY turn DESC LIMIT 1
            ), 0), 'running', 0, %(start_sequence)s, %(fencing_token)s, %(at)s, {recorded("''")}
        FROM head WHERE NOT EXISTS (SELECT 1 FROM {_INTERRUPT} WHERE session_id = head.id)
        ON CONFLICT DO NOTHING
        RETURNING {", ".join(RUN_COLUMNS)}"""
    )
