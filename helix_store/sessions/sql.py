"""Every SQL statement of the state store.

A statement for PostgreSQL alone holds its whole decision in its conditions. When one of them does not hold,
it changes nothing, and the portable form decides: it locks first.

After a wait for a lock, PostgreSQL checks the conditions of an ``UPDATE`` again on the row as it is then.
Everything else in the statement, also a subselect, is as it was at the start. So a condition decides either
on a column of the locked row, or through ``_UNCHANGED``: the row is the version that was there at the start.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from helix_store.engine.expressions import is_in_list
from helix_store.engine.statement import Statement, table
from helix_store.models import Checkpoint, Item, Lock, Message, Run, Session, StagedChange, SubSessionRef
from helix_store.sessions.layout import STATE_COLUMNS, WRITTEN_COLUMNS
from helix_store.sessions.rules import SUPERSEDED

__all__ = [
    "CHECKPOINT_COLUMNS",
    "COMPARE_AND_SET_STATUS",
    "COPY_ITEMS",
    "COPY_MESSAGES",
    "CURRENT_COLUMNS",
    "ENDED_RUN_COLUMNS",
    "END_LOCKED_RUN",
    "FOREST_KEYS",
    "LATEST_CHECKPOINT",
    "LOAD_STATE",
    "MAX_SINGLE_MESSAGES",
    "MESSAGE_PAGE",
    "SESSION_BY_ID",
    "STAGED_ROWS",
    "STAGE_CHANGE",
    "TAKE_STAGED",
    "TOUCH_SESSION",
    "TREE_KEYS",
    "end_run",
    "session_by_id",
    "step_statement",
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

# True for the version of the row that the statement saw at its start. Every committed update changes xmin.
_UNCHANGED: Final = f"s.xmin = (SELECT xmin FROM {_SESSION} WHERE {SESSION_BY_ID})"


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
_FENCE: Final = f"""fence AS MATERIALIZED (
            SELECT token FROM {table(Lock)} WHERE tenant = %(tenant)s AND name = %(session_id)s FOR KEY SHARE
        ), """
_FENCE_HOLDS: Final = "NOT EXISTS (SELECT 1 FROM fence WHERE token > %(fencing_token)s::bigint)"


@cache
def end_run(*, is_fenced: bool) -> Statement:
    """The end of a run, with the session locked as in the portable form.

    Decided with the fence held: its token. On the run's row: that no other run has replaced it.
    """
    return Statement(
        postgresql=f"""
        WITH {_FENCE if is_fenced else ""}head AS (
            SELECT id AS key FROM {_SESSION}
            WHERE {SESSION_BY_ID} {f"AND {_FENCE_HOLDS}" if is_fenced else ""}
            FOR NO KEY UPDATE
        ){_end_run("FROM head", "head.key", is_fenced=is_fenced)}"""
    )


MAX_SINGLE_MESSAGES: Final = 4
"""Messages that a step may have to be sent each as parameters: an array has to be taken apart."""

# A row that is written again gets another xmin.
_STAGED_VERSION: Final = "g.id || ':' || g.xmin"
# By an expression: the index of the keys has this order too, and all rows of all steps.
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
"""Columns of a step's checkpoint whose value is not the parameter of the same name."""
# By the name that PostgreSQL gives it: to ask with ``pg_get_serial_sequence`` takes as long as an insert.
_NEXT_CHECKPOINT_KEY: Final = f"nextval('\"{Checkpoint._meta.db_table}_id_seq\"')"


# What `drop_checkpoints` does to all but the newest; the one that the step adds is not among those it sees.
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
) -> Statement:
    """One step. A part that a step does not need costs as much as one that it does: there is a form for each.

    Returns one row with the new version, the checkpoint's key and, if the step ``ends`` the session, the
    status that it had. Without ``merges`` it may return what is staged instead, in order, as rows of nulls,
    the row's version and its payload: then nothing was written.

    ``head`` decides, and every other part takes its rows from there. Decided on the locked row: the mode, the
    version (the expected one, or else the row is `_UNCHANGED`), and for a delta the key of its base. With the
    fence held, its token. Through `_UNCHANGED`: the status before the end. Through `_UNCHANGED` or the
    version: that the run exists, that no state waits between checkpoints, and what is staged: a promote, a
    restore or a save changes the version, and discarding touches the row. What is staged meanwhile stays for
    the next promote. If the step prunes, also which checkpoints there are: deleting one touches the row, as
    long as steps prune.
    """
    fence = replaced = taken = inserted_messages = ""
    conditions = ["s.version = %(expected_version)s"] if is_expected else [_UNCHANGED]
    of_step = "g.session_id = {}.id AND g.step_id = %(step_id)s"
    if is_expected and (merges or prunes or ends):
        conditions.append(_UNCHANGED)
    if merges:
        conditions.append(
            f"""(SELECT array_agg({_STAGED_VERSION} {_STAGED_ORDER}) FROM {_STAGED} AS g
                 WHERE {of_step.format("s")}) = %(staged)s::text[]"""
        )
        taken = f"""deleted_staging AS (
            DELETE FROM {_STAGED} AS g USING head
            WHERE {of_step.format("head")} AND {_STAGED_VERSION} = ANY(%(staged)s::text[])
        ), """
        result = "SELECT version, current_id, earlier_status, NULL, NULL FROM head"
    else:
        conditions.append(f"NOT EXISTS (SELECT 1 FROM {_STAGED} AS g WHERE {of_step.format('s')})")
        result = f"""SELECT version, current_id, earlier_status, NULL, NULL FROM head
        UNION ALL (
            SELECT NULL, NULL, NULL, {_STAGED_VERSION}, g.payload FROM {_STAGED_OF_STEP}
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
        fence = _FENCE
        conditions.append(_FENCE_HOLDS)
    if is_of_run:
        conditions.append(
            f"EXISTS (SELECT 1 FROM {_RUN} AS r WHERE r.session_id = s.id AND r.run_id = %(run_id)s)"
        )
    if is_delta:
        # A known base implies that no state waits between checkpoints, so none has to be replaced.
        conditions.append("s.base_key = %(base_key)s")
    else:
        replaced = f"""deleted_state AS (
            DELETE FROM {_CHECKPOINT} AS c USING head WHERE c.session_id = head.id AND c.kind = 'state'
        ), """
        conditions.append(
            f"""(s.current_is_checkpoint OR EXISTS (
                SELECT 1 FROM {_CHECKPOINT} AS c WHERE c.session_id = s.id AND c.kind = 'state'))"""
        )
    # As at the start of the statement, which the row has not changed since.
    earlier_status = f"(SELECT status FROM {_SESSION} WHERE {SESSION_BY_ID})" if ends else "NULL"
    assignments = ", ".join(f"{name} = %({name})s" for name in WRITTEN_COLUMNS if name not in _ASSIGNED_BELOW)
    values = ", ".join(_CHECKPOINT_VALUES.get(name, f"%({name})s") for name in checkpoint_columns)
    return Statement(
        postgresql=f"""
        WITH {fence}head AS (
            UPDATE {_SESSION} AS s
            SET {assignments}, tags = %(tags)s::jsonb, metadata = %(metadata)s::jsonb,
                mode = coalesce(s.mode, %(mode)s), version = s.version + 1, updated_at = %(at)s,
                message_count = s.message_count + %(added)s, current_is_checkpoint = true,
                base_key = %(base_key)s, current_id = {_NEXT_CHECKPOINT_KEY}
            WHERE {session_by_id("s")} AND (s.mode IS NULL OR %(mode)s::text IS NULL OR s.mode = %(mode)s)
              AND {" AND ".join(conditions)}
            RETURNING s.id, s.version, s.message_count, s.current_id, {earlier_status} AS earlier_status
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
