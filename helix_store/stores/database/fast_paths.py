"""Hot paths on PostgreSQL in one prepared statement each, with the guarantees of the portable form.

A data-modifying statement is a transaction by itself: it saves the trips for ``BEGIN`` and ``COMMIT``, and
prepared it saves the planning, which costs more than the work. Each write holds its whole decision in its
conditions. When they do not all hold it changes nothing and returns nothing, and the portable form, which
locks first and then decides, has the last word: it finds the error to raise or succeeds.

``HELIX_STORE["FAST_PATHS"] = False`` switches all of this off.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any, Final

from django.utils import timezone

from helix_store.core.ids import checkpoint_id
from helix_store.core.limits import Limits
from helix_store.core.merging import promote_staged
from helix_store.core.payloads import decode, size_of
from helix_store.core.requests import Guard, StepRequest
from helix_store.core.session_state import (
    STATE_COLUMNS,
    EncodedState,
    current_state,
    encode_custom_state,
    encode_state,
)
from helix_store.core.types import (
    Checkpoint,
    SessionState,
    SessionStatus,
    StagedChanges,
    StatusChange,
    StatusConflict,
    StepCommit,
)
from helix_store.models import Checkpoint as CheckpointRow
from helix_store.models import Lock, Message, Run, Session, StagedChange
from helix_store.stores.database.checkpoints import DatabaseCheckpoints
from helix_store.stores.database.messages import DatabaseMessages
from helix_store.stores.database.prepared import (
    Rows,
    is_fast,
    read_prepared,
    write_prepared,
    writes_alone,
)
from helix_store.stores.database.records import CHECKPOINT_COLUMNS, checkpoint_from
from helix_store.stores.database.scope import Scope
from helix_store.stores.database.sessions import DatabaseSessions
from helix_store.stores.database.steps import DatabaseSteps

__all__ = ["FastCheckpoints", "FastMessages", "FastSessions", "FastSteps"]

_JSONB_COLUMNS: Final = ("tags", "metadata")
_ASSIGNED_OTHERWISE: Final = frozenset({"tags", "metadata", "mode"})


class FastSessions(DatabaseSessions):
    def load(self, session_id: str) -> SessionState | None:
        if not is_fast(self.scope):
            return super().load(session_id)
        rows = read_prepared(self.scope, _load_sql(), {"tenant": self.scope.tenant, "session_id": session_id})
        if not rows:
            return None
        *head, payload, envelope = rows[0]
        columns = dict(zip(STATE_COLUMNS, head, strict=True))
        for name in _JSONB_COLUMNS:
            columns[name] = json.loads(columns[name])
        return current_state(columns, payload, envelope)

    def compare_and_set_status(
        self,
        session_id: str,
        expected: frozenset[SessionStatus],
        status: SessionStatus,
        failure_reason: str | None,
        guard: Guard,
    ) -> StatusChange | StatusConflict:
        if guard == Guard() and writes_alone(self.scope):
            parameters = {
                "tenant": self.scope.tenant,
                "session_id": session_id,
                "expected": [member.value for member in expected],
                "status": status.value,
                "failure_reason": failure_reason,
                "at": timezone.now(),
            }
            rows = write_prepared(self.scope, _compare_and_set_sql(), parameters)
            if rows:
                return StatusChange(new_version=rows[0][0])
        return super().compare_and_set_status(session_id, expected, status, failure_reason, guard)


class FastMessages(DatabaseMessages):
    def page(
        self, session_id: str, *, offset: int, limit: int | None, descending: bool
    ) -> tuple[list[str], int]:
        if not is_fast(self.scope) or descending:
            return super().page(session_id, offset=offset, limit=limit, descending=descending)
        parameters = {
            "tenant": self.scope.tenant,
            "session_id": session_id,
            "offset": offset,
            "last": None if limit is None else offset + limit,
        }
        rows = read_prepared(self.scope, _page_sql(), parameters)
        if not rows:
            return super().page(session_id, offset=offset, limit=limit, descending=descending)
        return [payload for payload, _ in rows], rows[0][1]


class FastCheckpoints(DatabaseCheckpoints):
    def latest(self, session_id: str) -> Checkpoint | None:
        if not is_fast(self.scope):
            return super().latest(session_id)
        rows = read_prepared(
            self.scope, _latest_checkpoint_sql(), {"tenant": self.scope.tenant, "session_id": session_id}
        )
        if not rows:
            return None
        return checkpoint_from(dict(zip(CHECKPOINT_COLUMNS, rows[0], strict=True)), session_id)


class FastSteps(DatabaseSteps):
    def commit(self, request: StepRequest) -> StepCommit:
        if request.operation_id is None and writes_alone(self.scope):
            commit = self._in_one_statement(request)
            if commit is not None:
                return commit
        return super().commit(request)

    def _in_one_statement(self, request: StepRequest) -> StepCommit | None:
        """Commit a step; ``None`` when it takes more deciding than one statement does.

        The first try returns what is staged when there is any. Its merge is committed by the second, which
        goes through only if the staging is still the same.
        """
        parameters = _step_parameters(self.scope, request)
        rows = write_prepared(self.scope, _step_sql(), {**parameters, **_staged_parameters([])})
        if rows and rows[0][0] is None:
            encoded = self._promoted(request, rows)
            parameters |= {"payload": encoded.payload, "size_bytes": _size(encoded)}
            rows = write_prepared(self.scope, _step_sql(), {**parameters, **_staged_parameters(rows)})
        if not rows or rows[0][0] is None:
            return None
        return StepCommit(parameters["checkpoint_id"], new_version=rows[0][0])

    def _promoted(self, request: StepRequest, rows: Rows) -> EncodedState:
        limits = self.scope.limits
        staged = [StagedChanges.from_dict(decode(payload)) for _, _, _, payload in rows]
        promoted = promote_staged(request.custom_state, staged, limits=limits)
        envelope = request.encoded.envelope
        return EncodedState(
            encode_custom_state(promoted, envelope, limits), envelope, request.encoded.columns
        )


def _size(encoded: EncodedState) -> int:
    return size_of(encoded.payload) + size_of(encoded.envelope)


def _step_parameters(scope: Scope, request: StepRequest) -> dict[str, Any]:
    columns = request.encoded.columns
    return {
        **columns,
        "tags": json.dumps(columns["tags"]),
        "metadata": json.dumps(columns["metadata"]),
        "tenant": scope.tenant,
        "session_id": request.session_id,
        "expected_version": request.guard.expected_version,
        "fencing_token": request.guard.fencing_token,
        "at": timezone.now(),
        "roles": [message.role for message in request.messages],
        "texts": [message.text for message in request.messages],
        "added": len(request.messages),
        "checkpoint_id": checkpoint_id(request.session_id, request.step.step_count),
        "run_id": request.run_id,
        "step_id": request.step.step_id,
        "step_number": request.step.step_count,
        "stream_sequence": request.step.stream_sequence,
        "payload": request.encoded.payload,
        "envelope": request.encoded.envelope,
        "size_bytes": _size(request.encoded),
    }


def _staged_parameters(rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Which staged rows have been merged, and from which version of each."""
    staged: list[tuple[int, datetime]] = [(row[1], row[2]) for row in rows]
    return {
        "staged_ids": [key for key, _ in staged] or None,
        "staged_times": [created_at for _, created_at in staged] or None,
    }


# --- Statements --------------------------------------------------------------------------------------


@cache
def _load_sql() -> str:
    columns = ", ".join(f"s.{name}" for name in STATE_COLUMNS)
    return f"""
        SELECT {columns}, c.payload, c.envelope FROM {_table(Session)} AS s
        LEFT JOIN {_table(CheckpointRow)} AS c ON c.id = s.current_id
        WHERE s.tenant = %(tenant)s AND s.session_id = %(session_id)s"""  # noqa: S608  own names


@cache
def _compare_and_set_sql() -> str:
    return f"""
        UPDATE {_table(Session)}
        SET status = %(status)s, failure_reason = %(failure_reason)s, version = version + 1,
            updated_at = %(at)s
        WHERE tenant = %(tenant)s AND session_id = %(session_id)s AND status = ANY(%(expected)s)
        RETURNING version"""  # noqa: S608


@cache
def _page_sql() -> str:
    return f"""
        SELECT m.payload, s.message_count FROM {_table(Session)} AS s
        JOIN {_table(Message)} AS m ON m.session_id = s.id
        WHERE s.tenant = %(tenant)s AND s.session_id = %(session_id)s AND m.sequence > %(offset)s
          AND m.sequence <= coalesce(%(last)s::bigint, s.message_count)
        ORDER BY m.sequence"""  # noqa: S608


@cache
def _latest_checkpoint_sql() -> str:
    columns = ", ".join(
        "s.created_at" if name == "session__created_at" else f"c.{name}" for name in CHECKPOINT_COLUMNS
    )
    return f"""
        SELECT {columns} FROM {_table(Session)} AS s JOIN {_table(CheckpointRow)} AS c ON c.session_id = s.id
        WHERE s.tenant = %(tenant)s AND s.session_id = %(session_id)s AND c.kind = 'step' AND c.namespace = ''
        ORDER BY c.version DESC LIMIT 1"""  # noqa: S608


@cache
def _step_sql() -> str:
    """One step, in one statement.

    ``head`` decides, and every other part that writes takes its rows from there: the session is locked before
    anything of it is, and nothing is written when it is not. A statement that had to wait for the lock goes
    on with what it saw before, so ``head`` also asks that the session is still the one that was seen. What is
    staged meanwhile is neither merged nor deleted: it waits for a later promote.
    """
    session, checkpoint, lock = _table(Session), _table(CheckpointRow), _table(Lock)
    message, staged, run = _table(Message), _table(StagedChange), _table(Run)
    own = [name for name in _step_columns() if name not in _ASSIGNED_OTHERWISE]
    assignments = ", ".join(f"{name} = %({name})s" for name in own)
    return f"""
        WITH seen AS MATERIALIZED (
            SELECT id, version, current_id, current_is_checkpoint FROM {session}
            WHERE tenant = %(tenant)s AND session_id = %(session_id)s
        ), new AS MATERIALIZED (
            SELECT nextval(pg_get_serial_sequence('{checkpoint}', 'id')) AS id
        ), waiting AS MATERIALIZED (
            SELECT g.id, g.created_at, g.payload FROM {staged} AS g JOIN seen ON g.session_id = seen.id
            WHERE g.step_id = %(step_id)s
        ), fence AS MATERIALIZED (
            SELECT token FROM {lock}
            WHERE tenant = %(tenant)s AND name = %(session_id)s AND %(fencing_token)s::bigint IS NOT NULL
            FOR KEY SHARE
        ), head AS (
            UPDATE {session} AS s
            SET {assignments}, tags = %(tags)s::jsonb, metadata = %(metadata)s::jsonb,
                mode = coalesce(s.mode, %(mode)s), version = s.version + 1, updated_at = %(at)s,
                message_count = s.message_count + %(added)s, current_id = new.id, current_is_checkpoint = true
            FROM new, seen
            WHERE s.id = seen.id AND s.version = seen.version
              AND s.version = coalesce(%(expected_version)s::bigint, s.version)
              AND (s.mode IS NULL OR %(mode)s::text IS NULL OR s.mode = %(mode)s)
              AND (%(run_id)s::text IS NULL
                   OR EXISTS (SELECT 1 FROM {run} AS r WHERE r.session_id = s.id AND r.run_id = %(run_id)s))
              AND NOT EXISTS (SELECT 1 FROM fence WHERE token > %(fencing_token)s::bigint)
              AND (SELECT array_agg(w.id ORDER BY w.id) FROM waiting AS w)
                  IS NOT DISTINCT FROM %(staged_ids)s::bigint[]
              AND (SELECT array_agg(w.created_at ORDER BY w.id) FROM waiting AS w)
                  IS NOT DISTINCT FROM %(staged_times)s::timestamptz[]
            RETURNING s.id, s.version, s.message_count, s.current_id
        ), replaced AS (
            DELETE FROM {checkpoint} AS c USING seen, head
            WHERE c.id = seen.current_id AND NOT seen.current_is_checkpoint
        ), taken AS (
            DELETE FROM {staged} AS g USING head
            WHERE g.session_id = head.id AND g.step_id = %(step_id)s
              AND (g.id, g.created_at) IN (
                  SELECT * FROM unnest(%(staged_ids)s::bigint[], %(staged_times)s::timestamptz[]))
        ), said AS (
            INSERT INTO {message} (session_id, sequence, role, payload, created_at)
            SELECT head.id, head.message_count - %(added)s + m.number, m.role, m.payload, %(at)s
            FROM head,
                unnest(%(roles)s::text[], %(texts)s::text[]) WITH ORDINALITY AS m(role, payload, number)
        ), kept AS (
            INSERT INTO {checkpoint} (
                id, session_id, kind, namespace, version, checkpoint_id, source, run_id, step_id, step_count,
                status, message_count, stream_sequence, payload, envelope, size_bytes, created_at)
            SELECT head.current_id, head.id, 'step', '', head.version, %(checkpoint_id)s, 'step', %(run_id)s,
                %(step_id)s, %(step_number)s, %(status)s, head.message_count, %(stream_sequence)s,
                %(payload)s, %(envelope)s, %(size_bytes)s, %(at)s
            FROM head
        )
        SELECT version, NULL::bigint, NULL::timestamptz, NULL::text FROM head
        UNION ALL
        (SELECT NULL, id, created_at, payload FROM waiting WHERE NOT EXISTS (SELECT 1 FROM head) ORDER BY id)
        """  # noqa: S608


@cache
def _step_columns() -> tuple[str, ...]:
    """The head columns that a state brings along, by name; the same for every state."""
    return tuple(encode_state(SessionState(session_id="any", agent_type="any"), Limits()).columns)


def _table(model: Any) -> str:
    # PostgreSQL alone comes here, and table prefixes are plain names.
    return f'"{model._meta.db_table}"'
