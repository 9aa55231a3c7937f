"""The SQL of steps and of what is staged for them."""

from __future__ import annotations

from functools import cache
from typing import Final

from django.db.models import Model

from helix_store.engine.statement import table
from helix_store.models import Checkpoint as CheckpointRow
from helix_store.models import (
    Lock,
    Message,
    Run,
    Session,
    StagedChange,
)
from helix_store.sessions.database.keys import is_named
from helix_store.sessions.layout import WRITTEN_COLUMNS

__all__ = ["MOST_LISTED", "stage_sql", "staged_sql", "step_sql"]

MOST_LISTED: Final = 4
"""Messages that a step may have to be sent each as parameters of its own."""

# A row that is written again gets another xmin.
_STAGED_VERSION: Final = "g.id || ':' || g.xmin"
# By an expression: the index of the keys has this order too, and all rows of all steps.
_STAGED_ORDER: Final = "ORDER BY g.id + 0"
_ASSIGNED_OTHERWISE: Final = frozenset({"tags", "metadata", "mode"})


@cache
def stage_sql() -> str:
    # A conflict updates the row where it stands, so a repeated tool call keeps its place in the order.
    return f"""
        WITH head AS (
            SELECT id FROM {table(Session)} WHERE {is_named()}
            FOR NO KEY UPDATE
        )
        INSERT INTO {table(StagedChange)} AS g (session_id, step_id, tool_call_id, payload, created_at)
        SELECT id, %(step_id)s, %(tool_call_id)s, %(payload)s, %(at)s FROM head
        ON CONFLICT (session_id, step_id, tool_call_id)
        DO UPDATE SET payload = excluded.payload, created_at = excluded.created_at
        RETURNING {_STAGED_VERSION}"""


@cache
def staged_sql() -> str:
    return f"""
        SELECT {_STAGED_VERSION}, g.payload FROM {table(StagedChange)} AS g
        WHERE g.session_id = (
            SELECT id FROM {table(Session)} WHERE {is_named()}
        ) AND g.step_id = %(step_id)s
        {_STAGED_ORDER}"""


@cache
def step_sql(
    *, messages: int, merges: bool, is_delta: bool, is_expected: bool, is_fenced: bool, is_of_run: bool
) -> str:
    """One step, in one statement.

    ``head`` decides, and every other part takes its rows from there: the session is locked before anything
    of it is, and nothing is written when a condition does not hold. A statement that had to wait for the lock
    checks the conditions again on the session as it is then, but everything else is as it was at its start.
    Hence the version must be the expected one, or else the one of the start, and a state between checkpoints,
    which the step replaces, must have been there. What is staged meanwhile is left alone: the next promote
    takes it.

    A part that a step does not need costs as much as one that it does, so there is a form for each need.
    """
    session, checkpoint, lock = table(Session), table(CheckpointRow), table(Lock)
    message, staged, run = table(Message), table(StagedChange), table(Run)
    own = [name for name in WRITTEN_COLUMNS if name not in _ASSIGNED_OTHERWISE]
    assignments = ", ".join(f"{name} = %({name})s" for name in own)
    of_step = "g.session_id = {}.id AND g.step_id = %(step_id)s"
    version = "%(expected_version)s" if is_expected else f"(SELECT version FROM {session} WHERE {is_named()})"
    fence = replaced = taken = said = ""
    if merges:
        merged = "%(staged)s::text[]"
        conditions = [
            f"""(SELECT array_agg({_STAGED_VERSION} {_STAGED_ORDER}) FROM {staged} AS g
                 WHERE {of_step.format("s")}) = {merged}"""
        ]
        taken = f"""taken AS (
            DELETE FROM {staged} AS g USING head
            WHERE {of_step.format("head")} AND {_STAGED_VERSION} = ANY({merged})
        ), """
    else:
        conditions = [f"NOT EXISTS (SELECT 1 FROM {staged} AS g WHERE {of_step.format('s')})"]
    if messages:
        said = f"""said AS (
            INSERT INTO {message} (session_id, sequence, role, payload, created_at)
            SELECT head.id, head.message_count - %(added)s + m.number, m.role, m.payload, %(at)s
            FROM head, {_listed(messages)} AS m(role, payload, number)
        ), """
    if is_fenced:
        fence = f"""fence AS MATERIALIZED (
            SELECT token FROM {lock} WHERE tenant = %(tenant)s AND name = %(session_id)s FOR KEY SHARE
        ), """
        conditions.append("NOT EXISTS (SELECT 1 FROM fence WHERE token > %(fencing_token)s::bigint)")
    if is_of_run:
        conditions.append(
            f"EXISTS (SELECT 1 FROM {run} AS r WHERE r.session_id = s.id AND r.run_id = %(run_id)s)"
        )
    if is_delta:
        # A state between checkpoints is the base of nothing: there is none to replace where a base is known.
        conditions.append("s.base_key = %(base_key)s")
    else:
        replaced = f"""replaced AS (
            DELETE FROM {checkpoint} AS c USING head WHERE c.session_id = head.id AND c.kind = 'state'
        ), """
        conditions.append(
            f"""(s.current_is_checkpoint OR EXISTS (
                SELECT 1 FROM {checkpoint} AS c WHERE c.session_id = s.id AND c.kind = 'state'))"""
        )
    return f"""
        WITH {fence}head AS (
            UPDATE {session} AS s
            SET {assignments}, tags = %(tags)s::jsonb, metadata = %(metadata)s::jsonb,
                mode = coalesce(s.mode, %(mode)s), version = s.version + 1, updated_at = %(at)s,
                message_count = s.message_count + %(added)s, current_is_checkpoint = true,
                base_key = %(base_key)s,
                current_id = nextval('{_keys_of(CheckpointRow)}')
            WHERE {is_named("s")} AND s.version = {version}
              AND (s.mode IS NULL OR %(mode)s::text IS NULL OR s.mode = %(mode)s)
              AND {" AND ".join(conditions)}
            RETURNING s.id, s.version, s.message_count, s.current_id
        ), {replaced}{taken}{said}kept AS (
            INSERT INTO {checkpoint} (
                id, session_id, kind, namespace, version, checkpoint_id, source, run_id, step_id, step_count,
                status, message_count, stream_sequence, payload, base_id, envelope, size_bytes, created_at)
            SELECT head.current_id, head.id, 'step', '', head.version, %(checkpoint_id)s, 'step', %(run_id)s,
                %(step_id)s, %(step_number)s, %(status)s, head.message_count, %(stream_sequence)s,
                %(payload)s, %(base_id)s::bigint, %(envelope)s, %(size_bytes)s, %(at)s
            FROM head
        )
        SELECT version, current_id FROM head"""


def _listed(messages: int) -> str:
    """Rows of the messages of a step. A few are values of their own: an array has to be taken apart."""
    if messages > MOST_LISTED:
        return "unnest(%(roles)s::text[], %(texts)s::text[]) WITH ORDINALITY"
    rows = (f"(%(role_{each})s, %(text_{each})s, {each})" for each in range(1, messages + 1))
    return f"(VALUES {', '.join(rows)})"


def _keys_of(model: type[Model]) -> str:
    """The sequence of a table's keys, by the name that PostgreSQL gives it: table prefixes leave room for it.

    To ask for the name, with ``pg_get_serial_sequence``, takes as long as an insertion.
    """
    return f'"{model._meta.db_table}_id_seq"'
