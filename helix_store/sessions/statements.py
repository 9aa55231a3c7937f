"""The step in one statement, and the statements that read its input.

Each of its conditions depends on a column of the locked row, like those of every statement in `sql`, or uses
``UNCHANGED``: the row is the version that existed at the start.

The SQL statements of the state store, except the step in one statement, which is in `step_sql`.

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

from helix_store.core.limits import MAX_BIGINT
from helix_store.core.types import CheckpointHead
from helix_store.counters import has_budgets, may_be_stopped
from helix_store.engine.expressions import for_keys
from helix_store.engine.statement import CITUS, POSTGRESQL, SQLITE, Statement, recorded, table
from helix_store.models import (
    Checkpoint,
    Decision,
    Effect,
    InterruptRequest,
    Lock,
    Message,
    Operation,
    Run,
    Session,
    StagedChange,
    SubSessionRef,
)
from helix_store.sessions.state import STATE_COLUMNS, SUPERSEDED, WRITTEN_COLUMNS, default_step_id

_SESSION: Final = table(Session)
_CHECKPOINT: Final = table(Checkpoint)
_MESSAGE: Final = table(Message)
_STAGED: Final = table(StagedChange)
_REF: Final = table(SubSessionRef)
_EFFECT: Final = table(Effect)
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

_OWNERSHIP: Final = "(',' || substr(client_tool_call_ownership, 2))"
ROOT_WITH_CALL: Final = f"""{SESSION_BY_ID} AND COALESCE(root_session_id, session_id) = session_id
    AND replace({_OWNERSHIP}, %(owned)s, '') <> {_OWNERSHIP}"""
"""The session is the root of its tree, and ``owned``, a comma and an entry, is in its record of owners.

JSON escapes quotes, so no key or value of the record can hold the text of an entry."""


# --- Reads -----------------------------------------------------------------------------------------

OWNERSHIP: Final = Statement(
    f"SELECT root_session_id, client_tool_call_ownership FROM {_SESSION} WHERE {SESSION_BY_ID}"
)

CURRENT_COLUMNS: Final = (
    *STATE_COLUMNS,
    "live_decisions",
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

RUN_COLUMNS: Final = tuple(field.attname for field in Run._meta.concrete_fields)
INTERRUPT_COLUMNS: Final = ("kind", "reason", "run_id", "requested_at")


def _load(more_columns: str, more_tables: str = "") -> str:
    # If its session is known, a checkpoint is found in one partition of a table partitioned by session.
    return f"""
        SELECT {", ".join(_CURRENT_SQL.get(name, f"s.{name}") for name in CURRENT_COLUMNS)}{more_columns}
        FROM {_SESSION} AS s
        LEFT JOIN {_CHECKPOINT} AS c ON c.session_id = s.id AND c.id = s.current_id
        LEFT JOIN {_CHECKPOINT} AS b ON b.session_id = c.session_id AND b.id = c.base_id{more_tables}
        WHERE {session_by_id("s")}"""


def _load_state(now: str) -> str:
    return _load(f""",
            {has_budgets("s.tenant")}, s.next_post_at <= {now}""")


# Citus refuses clock_timestamp() in a query on a table.
LOAD_STATE: Final = Statement(_load_state("pg_catalog.statement_timestamp()"), _load_state(SQLITE.now))
"""The state, whether its tenant has budgets, and whether a post is due; ``None`` if no post is waiting."""


EXCEPTION_BEGINS: Final = '{"type":'
"""The beginning of the stored exception with which an effect was left. `not_done` stores a reason instead."""

NO_EXCEPTION: Final = "null"
"""What is stored instead when somebody settles an effect that was left without an exception."""

# Somebody else has decided the effect `e`, because one of these two is still stored: a turn that attempts or
# reconciles it replaces them.
_IS_SETTLED: Final = (
    f"(e.error = '{NO_EXCEPTION}' OR substr(e.error, 1, {len(EXCEPTION_BEGINS)}) = '{EXCEPTION_BEGINS}')"
)


def _is_last_step(step: str) -> str:
    return f"""{step}.run_id = r.run_id AND {step}.step_count = r.step_count
                    AND {step}.message_count = s.message_count"""


# After a rewind or a step outside of a turn, the newest step belongs to no run or to another one. If its
# checkpoint was deleted, the current state stands for it (see `drop_checkpoints`).
_IS_AT_REST: Final = f"""(
                r.status = 'completed' AND r.completion_reason = 'end_turn'
                AND CASE WHEN c.kind = 'state' AND c.source = 'step' THEN {_is_last_step("c")}
                    ELSE (SELECT {_is_last_step("k")} FROM {_CHECKPOINT} AS k
                        WHERE k.session_id = s.id AND k.kind = 'step' AND k.namespace = ''
                        ORDER BY k.version DESC LIMIT 1) END
                AND NOT EXISTS (SELECT 1 FROM {_EFFECT} AS e
                    WHERE e.session_id = s.id AND e.state IN ('done', 'not_done')
                        AND (e.ended_at > r.ended_at OR e.ended_at > r.started_at AND {_IS_SETTLED})))"""


def _load_for_turn(now: str) -> str:
    return _load(
        f""",
            {has_budgets("s.tenant")}, s.next_post_at <= {now}, {_IS_AT_REST},
            {", ".join(f"r.{name}" for name in RUN_COLUMNS)}""",
        f"""
        LEFT JOIN {_RUN} AS r ON r.session_id = s.id AND r.turn = (
            SELECT turn FROM {_RUN} WHERE session_id = s.id ORDER BY turn DESC LIMIT 1
        )""",
    )


LOAD_FOR_TURN: Final = Statement(
    _load_for_turn("pg_catalog.statement_timestamp()"), _load_for_turn(SQLITE.now)
)
"""`LOAD_STATE`, the newest run, and before it whether `end_turn` ended that run and neither a message nor a
settled effect has arrived since. Posts and calls are in the state."""


_NEXT_STEP: Final = "s.step_count + CAST(1 AS numeric)"
"""The number of the next step, which is too large for a bigint after the largest number."""


def _load_step(may_be_stopped: str) -> str:
    return _load(
        f""",
            EXISTS (
                SELECT 1 FROM {_STAGED} AS g WHERE g.session_id = s.id AND g.step_id
                    = coalesce(CAST(%(step_id)s AS text), '{default_step_id("")}' || ({_NEXT_STEP}))
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
MAY_BE_STOPPED: Final = may_be_stopped(_SESSION)
"""The condition that the budgets of a session must be checked, for a query of sessions on PostgreSQL."""
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

    A range that reaches the end has no upper bound, so that it includes messages beyond a wrong number.

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
MESSAGES: Final = _messages(_OFFSET, f"coalesce({_OFFSET} + {_LIMIT}, {MAX_BIGINT})")
NEWEST_MESSAGES: Final = _messages(
    f"coalesce(message_count - {_OFFSET} - {_LIMIT}, 0)",
    f"CASE WHEN {_OFFSET} = 0 THEN {MAX_BIGINT} ELSE message_count - {_OFFSET} END",
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

# On SQLite and Citus, rows keep no call ids.
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


# Marks approvals as used, and says whether changes are staged for the step: it is one statement for both.
def _use_approvals(askings: str) -> str:
    decision = table(Decision)
    return f"""UPDATE {decision} SET used_at = %(at)s, used_by_step = %(step_id)s
        WHERE session_id = %(key)s AND asking {askings} AND is_final AND used_at IS NULL
        RETURNING EXISTS (SELECT 1 FROM {_STAGED} WHERE session_id = %(key)s AND step_id = %(step_id)s)"""


USE_APPROVALS: Final = Statement(
    postgresql=_use_approvals("= ANY(%(askings)s::bigint[])"),
    sqlite=_use_approvals("IN (SELECT value FROM json_each(%(askings)s))"),
)

COPY_MESSAGES: Final = Statement(
    f"""
        INSERT INTO {_MESSAGE} (session_id, sequence, role, payload, created_at)
        SELECT %(target)s, sequence, role, payload, created_at FROM {_MESSAGE}
        WHERE session_id = %(source)s AND sequence <= %(message_count)s ORDER BY sequence"""
)


# The end of a run is compared with the ends of effects, so both come from the database's clock. It is read
# when the statement begins: an effect that is decided while the statement waits for the session is newer.
_END: Final = "pg_catalog.statement_timestamp()"
# SQLite's clock has milliseconds, and a run does not end before it started.
_END_ON_SQLITE: Final = f"""CASE WHEN substr(started_at, 1, 23) = {SQLITE.now}
            THEN started_at ELSE {SQLITE.now} END"""


def _end_run(source: str, key: str, now: str, *, is_fenced: bool, records_call: bool = False) -> str:
    """End a run. The first end time counts. With a fence, a superseded run is left unchanged."""
    call = f", call_ids = {recorded('call_ids')}" if records_call else ""
    return f"""
        UPDATE {_RUN}
        SET status = %(status)s, ended_at = coalesce(ended_at, {now}),
            step_count = coalesce(%(step_count)s, step_count),
            completion_reason = coalesce(%(completion_reason)s, completion_reason),
            error = coalesce(%(error)s, error),
            refused_usd = coalesce(%(refused_usd)s, refused_usd),
            refused_tokens = coalesce(%(refused_tokens)s, refused_tokens){call}
        {source}
        WHERE session_id = {key} AND run_id = %(run_id)s
            {f"AND coalesce(completion_reason, '') <> '{SUPERSEDED}'" if is_fenced else ""}
        RETURNING {", ".join(RUN_COLUMNS)}"""


END_LOCKED_RUN: Final = {
    is_fenced: Statement(
        _end_run("", "%(key)s", _END, is_fenced=is_fenced, records_call=True),
        _end_run("", "%(key)s", _END_ON_SQLITE, is_fenced=is_fenced),
        citus=(_end_run("", "%(key)s", CITUS.now, is_fenced=is_fenced, records_call=True),),
    )
    for is_fenced in (False, True)
}
"""The key is whether the write has a fence."""

MARK_STOPPED: Final = Statement(
    f"""
        UPDATE {_SESSION} SET stopped_by = %(stopped_by)s, stopped_at = %(stopped_at)s
        WHERE id = %(key)s AND NOT EXISTS (
            SELECT 1 FROM {_RUN} WHERE session_id = %(key)s AND turn > %(turn)s)"""
)
"""Record on a locked session what a run stops, unless a newer run decides."""

# See `sessions.locking` for the reason.
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

# The existence of the session is decided on the locked row, which is written again. A conflict updates the
# staged row in place, so that a repeated tool call keeps its place in the order.
STAGE_CHANGE: Final = Statement(
    postgresql=f"""
        WITH head AS (
            UPDATE {_SESSION} SET version = version WHERE {SESSION_BY_ID} RETURNING id
        )
        INSERT INTO {_STAGED} AS known (session_id, step_id, tool_call_id, payload, created_at, call_ids)
        SELECT id, %(step_id)s, %(tool_call_id)s, %(payload)s, %(at)s, {recorded("''")} FROM head
        ON CONFLICT (session_id, step_id, tool_call_id)
        DO UPDATE SET payload = excluded.payload, created_at = excluded.created_at,
            call_ids = {recorded("known.call_ids")}
        RETURNING {staged_version("known")}, payload"""
)


def _stage_locked(call_ids: str = "", value: str = "", update: str = "") -> str:
    return f"""
        INSERT INTO {_STAGED} AS known (session_id, step_id, tool_call_id, payload, created_at{call_ids})
        VALUES (%(key)s, %(step_id)s, %(tool_call_id)s, %(payload)s, %(at)s{value})
        ON CONFLICT (session_id, step_id, tool_call_id)
        DO UPDATE SET payload = excluded.payload, created_at = excluded.created_at{update}"""


_NEW_IDS: Final = recorded("''")
_MORE_IDS: Final = recorded("known.call_ids")
STAGE_LOCKED: Final = Statement(
    postgresql=_stage_locked(", call_ids", f", {_NEW_IDS}", f", call_ids = {_MORE_IDS}"),
    sqlite=_stage_locked(),
)

# The share lock prevents a takeover until the transaction ends, as `hold_fence` does.
FENCE: Final = f"""fence AS MATERIALIZED (
            SELECT token FROM {table(Lock)} WHERE tenant = %(tenant)s AND name = %(session_id)s FOR KEY SHARE
        ), """
# True for the row version that the statement saw at its start. Every committed update changes xmin.
UNCHANGED: Final = f"s.xmin = (SELECT xmin FROM {_SESSION} WHERE {SESSION_BY_ID})"
FENCE_HOLDS: Final = "NOT EXISTS (SELECT 1 FROM fence WHERE token > %(fencing_token)s::bigint)"


# The first end of a run counts.
_MARK: Final = f""", stopped_by = %(stopped_by)s, stopped_at = coalesce(
                (SELECT ended_at FROM {_RUN} WHERE session_id = s.id AND run_id = %(run_id)s), {_END})"""
_IS_NEWEST: Final = f"""%(run_id)s = (
                SELECT run_id FROM {_RUN} WHERE session_id = s.id ORDER BY turn DESC LIMIT 1)"""


@cache
def end_run(*, is_fenced: bool, is_stop: bool = False) -> Statement:
    """Return the statement that ends a run, locking the session as the portable form does.

    It checks the token while it holds the fence, and that no other run has replaced the run on its row. If
    the run ``is_stop``, the session is marked as stopped. Only the newest run may mark it, and
    ``UNCHANGED`` ensures that it is still the newest one; otherwise, the portable form decides.
    """
    conditions = [session_by_id("s")]
    conditions += [UNCHANGED, _IS_NEWEST] if is_stop else []
    conditions += [FENCE_HOLDS] if is_fenced else []
    return Statement(
        postgresql=f"""
        WITH {FENCE if is_fenced else ""}head AS (
            UPDATE {_SESSION} AS s SET version = version{_MARK if is_stop else ""}
            WHERE {" AND ".join(conditions)} RETURNING id AS key
        ){_end_run("FROM head", "head.key", _END, is_fenced=is_fenced, records_call=True)}"""
    )


def _unless_refused(column: str) -> str:
    """Return NULL for a column about what has stopped a session, unless the statement starts no run: the id
    is taken, another run is running, or there is a request.
    """
    refused = (
        f"SELECT 1 FROM {_RUN} WHERE session_id = s.id AND run_id = %(run_id)s",
        f"SELECT 1 FROM {_RUN} WHERE session_id = s.id AND status = 'running'",
        f"SELECT 1 FROM {_INTERRUPT} WHERE session_id = s.id",
    )
    return f"""CASE WHEN s.stopped_by IS NOT NULL AND (
                    {" OR ".join(f"EXISTS ({each})" for each in refused)}
                ) THEN s.{column} END"""


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
            UPDATE {_SESSION} AS s SET version = version, stopped_by = {_unless_refused("stopped_by")},
                stopped_at = {_unless_refused("stopped_at")}
            WHERE {" AND ".join(conditions)} RETURNING id
        )
        INSERT INTO {_RUN} (session_id, run_id, turn, status, step_count, start_sequence, fencing_token,
            started_at, build, call_ids)
        SELECT head.id, %(run_id)s, 1 + coalesce((
                SELECT turn FROM {_RUN} WHERE session_id = head.id ORDER BY turn DESC LIMIT 1
            ), 0), 'running', 0, %(start_sequence)s, %(fencing_token)s, %(at)s, %(build)s,
            {recorded("''")}
        FROM head WHERE NOT EXISTS (SELECT 1 FROM {_INTERRUPT} WHERE session_id = head.id)
        ON CONFLICT DO NOTHING
        RETURNING {", ".join(RUN_COLUMNS)}"""
    )


# True if the step writes the recorded value, and at most appends to it: JSON keeps the order of keys. Other
# calls record owners without changing the version. The portable form merges the owners that they have
# recorded since the load.
_KEEPS_OWNERS: Final = """(s.client_tool_call_ownership IS NULL OR starts_with(
                %(client_tool_call_ownership)s::text, left(s.client_tool_call_ownership, -1)))"""

MAX_SINGLE_MESSAGES: Final = 4
"""The maximum number of messages that a step sends as single parameters: unpacking an array takes time."""

_STAGED_VERSION: Final = staged_version("g")
# Sort by an expression: the index on the keys has the same order, but contains the rows of all steps.
_STAGED_ORDER: Final = "ORDER BY g.id + 0"
_STAGED_OF_STEP: Final = f"""{_STAGED} AS g
            WHERE g.session_id = (SELECT id FROM {_SESSION} WHERE {SESSION_BY_ID})
                AND g.step_id = %(step_id)s"""
STAGED_ROWS: Final = Statement(
    postgresql=f"""
        SELECT {_STAGED_VERSION}, g.payload FROM {_STAGED_OF_STEP}
        {_STAGED_ORDER}"""
)
"""The version and the payload of each staged change of a step, in staging order."""

_MARK_TAKEN: Final = mark_taken("deleted_staging", session="deleted_staging.session_id")

# Like `LiveDecisions.keep`. It reads only the locked row, so it is correct after a wait.
_KEPT_DECISIONS: Final = """CASE WHEN s.live_decisions IS NULL THEN NULL ELSE (
                    SELECT jsonb_object_agg(live.key, live.value)
                    FROM jsonb_each(s.live_decisions) AS live(key, value)
                    WHERE live.value ->> 'mark' = %(marks)s::jsonb ->> live.key
                ) END"""

_ASSIGNED_BELOW: Final = frozenset({"tags", "metadata", "mode"})
_CHECKPOINT_VALUES: Final = {
    "session_id": "head.id",
    "version": "head.version",
    "message_count": "head.message_count",
    "step_count": "%(step_number)s",
    "base_id": "%(base_id)s::bigint",
    "created_at": "%(at)s",
    "kind": "'step'",
    "namespace": "''",
    "source": "'step'",
}
"""The columns of a step's checkpoint whose value is not the parameter of the same name."""
# This is the name that PostgreSQL assigns: calling ``pg_get_serial_sequence`` takes as long as an insert.
_NEXT_CHECKPOINT_KEY: Final = f"nextval('\"{Checkpoint._meta.db_table}_id_seq\"')"


# This prunes like `drop_checkpoints`, but does not see the checkpoint that the step adds.
_PRUNED: Final = f"""doomed AS (
            SELECT c.id FROM head, {_CHECKPOINT} AS c
            WHERE c.session_id = head.id AND c.kind = 'step' AND c.namespace = ''
            ORDER BY c.version DESC OFFSET %(keep)s::bigint - 1
        ), needed AS (
            SELECT %(base_id)s::bigint AS id
          UNION ALL
            SELECT c.base_id FROM head, {_CHECKPOINT} AS c
            WHERE c.session_id = head.id AND c.kind = 'step' AND c.namespace = ''
                AND c.id NOT IN (SELECT id FROM doomed)
        ), demoted_to_bases AS (
            UPDATE {_CHECKPOINT} AS c SET kind = 'base', checkpoint_id = NULL FROM head, doomed
            WHERE c.session_id = head.id AND c.id = doomed.id
                AND EXISTS (SELECT 1 FROM needed WHERE needed.id = c.id)
        ), deleted_checkpoints AS (
            DELETE FROM {_CHECKPOINT} AS c USING head
            WHERE c.session_id = head.id AND c.namespace = ''
                AND (c.kind = 'base' OR c.kind = 'step' AND c.id IN (SELECT id FROM doomed))
                AND NOT EXISTS (SELECT 1 FROM needed WHERE needed.id = c.id)
        ), """


@cache
def step_statement(
    checkpoint_columns: tuple[str, ...],
    *,
    messages: int,
    merges: bool,
    is_delta: bool,
    is_expected: bool,
    is_fenced: bool,
    is_of_run: bool,
    prunes: bool,
    ends: bool,
    receives: bool = False,
    is_capped: bool = False,
) -> Statement:
    """Return the statement for one step, in a form that contains only the parts that the step needs.

    An unneeded part would cost as much as a needed one. The statement returns one row with the new version,
    the checkpoint's key, if the step ``ends`` the session the earlier status, and if it ``is_capped`` whether
    a budget may stop the next step. Without ``merges``, it may instead return the staged changes in order,
    each as a row of nulls, the row's version and its payload; in that case nothing was written.

    ``head`` makes the decision, and every other part takes its rows from there. On the locked row it checks
    the mode, the owners of calls, whether posts are due, the version (the expected one, or else that the row
    is `UNCHANGED`), and for a delta the key of its base. While the fence is held, it checks the token.
    `UNCHANGED` ensures that the status before the end is correct. `UNCHANGED` or the version ensures that the
    run exists, that there is no state between checkpoints, and that the staged changes are the same: a
    promote, a restore or a save changes the version, and discarding touches the row. Changes that are staged
    in the meantime wait for the next promotion. If the step prunes, this also ensures that the same
    checkpoints exist: deleting one touches the row, as long as steps prune.
    """
    fence = replaced = taken = inserted_messages = ""
    conditions = ["s.version = %(expected_version)s"] if is_expected else [UNCHANGED]
    conditions.append(_KEEPS_OWNERS)
    spender, may_stop = "", "NULL::boolean"
    if is_capped:
        spender = ", s.tenant, s.session_id, s.root_session_id, s.user_id, s.agent_type"
        may_stop = may_be_stopped("head")
    written = f"SELECT version, current_id, earlier_status, {may_stop}, NULL, NULL FROM head"
    of_step = "g.session_id = {}.id AND g.step_id = %(step_id)s"
    if is_expected and (merges or prunes or ends):
        conditions.append(UNCHANGED)
    if merges:
        conditions.append(
            f"""(SELECT array_agg({_STAGED_VERSION} {_STAGED_ORDER}) FROM {_STAGED} AS g
                 WHERE {of_step.format("s")}) = %(staged)s::text[]"""
        )
        taken = f"""deleted_staging AS (
            DELETE FROM {_STAGED} AS g USING head
            WHERE {of_step.format("head")} AND {_STAGED_VERSION} = ANY(%(staged)s::text[])
            RETURNING head.id AS session_id, g.call_ids
        ), marked_staging AS ({_MARK_TAKEN}
        ), """
        result = written
    else:
        conditions.append(f"NOT EXISTS (SELECT 1 FROM {_STAGED} AS g WHERE {of_step.format('s')})")
        result = f"""{written}
        UNION ALL (
            SELECT NULL, NULL, NULL, NULL, {_STAGED_VERSION}, g.payload FROM {_STAGED_OF_STEP}
                AND NOT EXISTS (SELECT 1 FROM head)
            {_STAGED_ORDER}
        )"""
    if messages:
        inserted_messages = f"""inserted_messages AS (
            INSERT INTO {_MESSAGE} (session_id, sequence, role, payload, created_at)
            SELECT head.id, head.message_count - %(added)s + m.number, m.role, m.payload, %(at)s
            FROM head, {_message_rows(messages)} AS m(role, payload, number)
        ), """
    if is_fenced:
        fence = FENCE
        conditions.append(FENCE_HOLDS)
    if receives:
        conditions.append(f"(s.next_post_at IS NULL OR s.next_post_at > {POSTGRESQL.now})")
    if is_of_run:
        conditions.append(
            f"EXISTS (SELECT 1 FROM {_RUN} AS r WHERE r.session_id = s.id AND r.run_id = %(run_id)s)"
        )
    if is_delta:
        # If the base is known, there is no state between checkpoints that would have to be replaced.
        conditions.append("s.base_key = %(base_key)s")
    else:
        replaced = f"""deleted_state AS (
            DELETE FROM {_CHECKPOINT} AS c USING head WHERE c.session_id = head.id AND c.kind = 'state'
        ), """
        conditions.append(
            f"""(s.current_is_checkpoint OR EXISTS (
                SELECT 1 FROM {_CHECKPOINT} AS c WHERE c.session_id = s.id AND c.kind = 'state'))"""
        )
    # This is the status at the start of the statement; the row has not changed since then.
    earlier_status = f"(SELECT status FROM {_SESSION} WHERE {SESSION_BY_ID})" if ends else "NULL"
    assignments = ", ".join(f"{name} = %({name})s" for name in WRITTEN_COLUMNS if name not in _ASSIGNED_BELOW)
    values = ", ".join(_CHECKPOINT_VALUES.get(name, f"%({name})s") for name in checkpoint_columns)
    return Statement(
        postgresql=f"""
        WITH {fence}head AS (
            UPDATE {_SESSION} AS s
            SET {assignments}, tags = %(tags)s::jsonb, metadata = %(metadata)s::jsonb,
                live_decisions = {_KEPT_DECISIONS},
                mode = coalesce(s.mode, %(mode)s), version = s.version + 1, updated_at = %(at)s,
                message_count = s.message_count + %(added)s, current_is_checkpoint = true,
                base_key = %(base_key)s, current_id = {_NEXT_CHECKPOINT_KEY}
            WHERE {session_by_id("s")} AND (s.mode IS NULL OR %(mode)s::text IS NULL OR s.mode = %(mode)s)
              AND {" AND ".join(conditions)}
            RETURNING s.id, s.version, s.message_count, s.current_id,
                {earlier_status} AS earlier_status{spender}
        ), {replaced}{taken}{inserted_messages}{_PRUNED if prunes else ""}checkpoint AS (
            INSERT INTO {_CHECKPOINT} (id, {", ".join(checkpoint_columns)})
            SELECT head.current_id, {values} FROM head
        )
        {result}"""
    )


def _message_rows(messages: int) -> str:
    if messages > MAX_SINGLE_MESSAGES:
        return "unnest(%(roles)s::text[], %(texts)s::text[]) WITH ORDINALITY"
    rows = (f"(%(role_{each})s, %(text_{each})s, {each})" for each in range(1, messages + 1))
    return f"(VALUES {', '.join(rows)})"
