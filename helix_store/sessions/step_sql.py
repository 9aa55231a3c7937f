"""The step in one statement, and the statements that read its input.

Each of its conditions depends on a column of the locked row, like those of every statement in `sql`, or uses
``UNCHANGED``: the row is the version that existed at the start.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from helix_store.engine.clocks import POSTGRESQL
from helix_store.engine.statement import Statement, table
from helix_store.models import Checkpoint, Message, Run, Session, StagedChange
from helix_store.sessions.layout import WRITTEN_COLUMNS
from helix_store.sessions.sql import (
    FENCE,
    FENCE_HOLDS,
    SESSION_BY_ID,
    UNCHANGED,
    mark_taken,
    session_by_id,
    staged_version,
)

_SESSION: Final = table(Session)
_CHECKPOINT: Final = table(Checkpoint)
_MESSAGE: Final = table(Message)
_STAGED: Final = table(StagedChange)
_RUN: Final = table(Run)

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
) -> Statement:
    """Return the statement for one step, in a form that contains only the parts that the step needs.

    An unneeded part would cost as much as a needed one. The statement returns one row with the new version,
    the checkpoint's key and, if the step ``ends`` the session, the earlier status. Without ``merges``, it may
    instead return the staged changes in order, each as a row of nulls, the row's version and its payload; in
    that case nothing was written.

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
