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
from functools import cache
from typing import Any, Final

from django.utils import timezone

from helix_store.connections import kept_together
from helix_store.core.ids import checkpoint_id
from helix_store.core.limits import Limits
from helix_store.core.merging import with_staged
from helix_store.core.payloads import decode, size_of
from helix_store.core.requests import Guard, StepRequest
from helix_store.core.session_state import (
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
from helix_store.stores.database.bases import bases, new_base_key
from helix_store.stores.database.checkpoints import DatabaseCheckpoints
from helix_store.stores.database.messages import DatabaseMessages
from helix_store.stores.database.prepared import (
    is_fast,
    is_fast_write,
    read_prepared,
    try_prepared,
)
from helix_store.stores.database.records import CHECKPOINT_COLUMNS, CURRENT_COLUMNS, checkpoint_from
from helix_store.stores.database.scope import Scope
from helix_store.stores.database.sessions import DatabaseSessions
from helix_store.stores.database.staged_here import StagedRow, staged_here
from helix_store.stores.database.staging import DatabaseStaging
from helix_store.stores.database.steps import DatabaseSteps

__all__ = ["FastCheckpoints", "FastMessages", "FastSessions", "FastStaging", "FastSteps"]

# A row that is written again gets another xmin.
_STAGED_VERSION: Final = "g.id || ':' || g.xmin"
_CURRENT_SQL: Final = {
    "current__payload": "c.payload",
    "current__envelope": "c.envelope",
    "current__base_id": "c.base_id",
    "current__base__payload": "b.payload",
}
_CHECKPOINT_SQL: Final = {"session__created_at": "s.created_at", "base__payload": "b.payload"}
_JSONB_COLUMNS: Final = ("tags", "metadata")
_ASSIGNED_OTHERWISE: Final = frozenset({"tags", "metadata", "mode"})


class FastSessions(DatabaseSessions):
    def load(self, session_id: str) -> SessionState | None:
        if not is_fast(self.scope):
            return super().load(session_id)
        rows = read_prepared(self.scope, _load_sql(), {"tenant": self.scope.tenant, "session_id": session_id})
        if not rows:
            return None
        row = dict(zip(CURRENT_COLUMNS, rows[0], strict=True))
        for name in _JSONB_COLUMNS:
            row[name] = json.loads(row[name])
        return self._loaded(row)

    def compare_and_set_status(
        self,
        session_id: str,
        expected: frozenset[SessionStatus],
        status: SessionStatus,
        failure_reason: str | None,
        guard: Guard,
    ) -> StatusChange | StatusConflict:
        if guard == Guard() and is_fast_write(self.scope):
            parameters = {
                "tenant": self.scope.tenant,
                "session_id": session_id,
                "expected": [member.value for member in expected],
                "status": status.value,
                "failure_reason": failure_reason,
                "at": timezone.now(),
            }
            rows = try_prepared(self.scope, _compare_and_set_sql(), parameters)
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


class FastStaging(DatabaseStaging):
    def stage(self, session_id: str, step_id: str, tool_call_id: str, text: str) -> None:
        if is_fast_write(self.scope):
            parameters = {
                "tenant": self.scope.tenant,
                "session_id": session_id,
                "step_id": step_id,
                "tool_call_id": tool_call_id,
                "payload": text,
                "at": timezone.now(),
            }
            for (version,) in try_prepared(self.scope, _stage_sql(), parameters):
                row = StagedRow(version, text)
                staged_here.add(self.scope, session_id, step_id, tool_call_id, row)
                return
        super().stage(session_id, step_id, tool_call_id, text)


class FastSteps(DatabaseSteps):
    _usually_staged = False
    """Whether the last step had changes staged elsewhere: where tools run, they do for most steps."""

    def commit(self, request: StepRequest) -> StepCommit:
        with kept_together(self.scope.connection):
            if request.operation_id is None and is_fast_write(self.scope):
                commit = self._in_one_statement(request)
                if commit is not None:
                    return commit
            return super().commit(request)

    def _in_one_statement(self, request: StepRequest) -> StepCommit | None:
        """Commit a step; ``None`` when it takes more deciding than one statement does.

        What is staged and was not staged here is read before, when it is to be expected, or else after a try
        that it stopped. It is committed only if the staging is still the same.
        """
        parameters = _step_parameters(self.scope, request)
        known = staged_here.take(self.scope, request.session_id, request.step.step_id)
        is_tried = bool(known) or not self._usually_staged
        if is_tried:
            commit = self._try(request, parameters, known)
            if commit is not None:
                return commit
        rows = read_prepared(self.scope, _staged_sql(), parameters)
        staged = [StagedRow(version, text) for version, text in rows]
        if is_tried and staged == known:
            return None
        self._usually_staged = bool(staged)
        return self._try(request, parameters, staged)

    def _promoted(self, request: StepRequest, rows: Sequence[StagedRow]) -> str:
        if not rows:
            return request.encoded.payload
        limits = self.scope.limits
        staged = [StagedChanges.from_dict(decode(row.text)) for row in rows]
        promoted = with_staged(request.custom_state, staged, limits=limits)
        return encode_custom_state(promoted, request.encoded.envelope, limits)

    def _try(
        self, request: StepRequest, parameters: dict[str, Any], staged: Sequence[StagedRow]
    ) -> StepCommit | None:
        """Store a payload as a delta if there is something to build on, else in full, to be built on."""
        payload = self._promoted(request, staged)
        base = bases.get(self.scope, request.session_id)
        delta = None if base is None else base.delta_to(payload)
        base_key = new_base_key() if delta is None else delta.base_key
        stored: dict[str, Any] = {"payload": payload, "base_id": None}
        if delta is not None:
            stored = {"payload": delta.text, "base_id": delta.base_id}
        sql = _step_sql(
            merges=bool(staged),
            is_delta=delta is not None,
            is_fenced=request.guard.fencing_token is not None,
            is_of_run=request.run_id is not None,
        )
        size_bytes = size_of(payload) + size_of(request.encoded.envelope)
        parameters = {
            **parameters,
            **stored,
            "base_key": base_key,
            "size_bytes": size_bytes,
            "staged": [row.version for row in staged],
        }
        for version, row_id in try_prepared(self.scope, sql, parameters):
            if delta is None:
                bases.keep(self.scope, request.session_id, base_key, row_id, payload)
            return StepCommit(parameters["checkpoint_id"], new_version=version)
        return None


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
        "envelope": request.encoded.envelope,
    }


# --- Statements --------------------------------------------------------------------------------------


@cache
def _load_sql() -> str:
    columns = ", ".join(_CURRENT_SQL.get(name, f"s.{name}") for name in CURRENT_COLUMNS)
    return f"""
        SELECT {columns} FROM {_table(Session)} AS s
        LEFT JOIN {_table(CheckpointRow)} AS c ON c.id = s.current_id
        LEFT JOIN {_table(CheckpointRow)} AS b ON b.id = c.base_id
        WHERE s.tenant = %(tenant)s AND s.session_id = %(session_id)s"""


@cache
def _compare_and_set_sql() -> str:
    return f"""
        UPDATE {_table(Session)}
        SET status = %(status)s, failure_reason = %(failure_reason)s, version = version + 1,
            updated_at = %(at)s
        WHERE tenant = %(tenant)s AND session_id = %(session_id)s AND status = ANY(%(expected)s)
        RETURNING version"""


@cache
def _page_sql() -> str:
    # A plan for a range that is known looks so much better than one for any range that the server would make
    # it anew for each call, which costs more than reading a page.
    return f"""
        WITH page AS MATERIALIZED (
            SELECT id, message_count, %(offset)s::bigint AS first,
                coalesce(%(last)s::bigint, message_count) AS last
            FROM {_table(Session)} WHERE tenant = %(tenant)s AND session_id = %(session_id)s
        )
        SELECT m.payload, page.message_count FROM page, LATERAL (
            SELECT payload FROM {_table(Message)}
            WHERE session_id = page.id AND sequence > page.first AND sequence <= page.last ORDER BY sequence
        ) AS m"""


@cache
def _latest_checkpoint_sql() -> str:
    columns = ", ".join(_CHECKPOINT_SQL.get(name, f"c.{name}") for name in CHECKPOINT_COLUMNS)
    # As a join it would sort all checkpoints of the session.
    return f"""
        SELECT {columns} FROM {_table(Session)} AS s, LATERAL (
            SELECT * FROM {_table(CheckpointRow)}
            WHERE session_id = s.id AND kind = 'step' AND namespace = '' ORDER BY version DESC LIMIT 1
        ) AS c LEFT JOIN {_table(CheckpointRow)} AS b ON b.id = c.base_id
        WHERE s.tenant = %(tenant)s AND s.session_id = %(session_id)s"""


@cache
def _stage_sql() -> str:
    # A conflict updates the row where it stands, so a repeated tool call keeps its place in the order.
    return f"""
        WITH head AS (
            SELECT id FROM {_table(Session)} WHERE tenant = %(tenant)s AND session_id = %(session_id)s
            FOR NO KEY UPDATE
        )
        INSERT INTO {_table(StagedChange)} AS g (session_id, step_id, tool_call_id, payload, created_at)
        SELECT id, %(step_id)s, %(tool_call_id)s, %(payload)s, %(at)s FROM head
        ON CONFLICT (session_id, step_id, tool_call_id)
        DO UPDATE SET payload = excluded.payload, created_at = excluded.created_at
        RETURNING {_STAGED_VERSION}"""


@cache
def _staged_sql() -> str:
    return f"""
        SELECT {_STAGED_VERSION}, g.payload FROM {_table(StagedChange)} AS g
        WHERE g.session_id = (
            SELECT id FROM {_table(Session)} WHERE tenant = %(tenant)s AND session_id = %(session_id)s
        ) AND g.step_id = %(step_id)s
        ORDER BY g.id"""


@cache
def _step_sql(*, merges: bool, is_delta: bool, is_fenced: bool, is_of_run: bool) -> str:
    """One step, in one statement.

    ``head`` decides, and every other part takes its rows from there: the session is locked before anything
    of it is, and nothing is written when a condition does not hold. A statement that had to wait for the lock
    checks the conditions again on the session as it is then, but everything else is as it was at its start.
    Hence the version must be the one of the start, and a state between checkpoints, which the step replaces,
    must have been there. What is staged meanwhile is left alone: the next promote takes it.

    A part that a step does not need costs as much as one that it does, so there is a form for each need.
    """
    session, checkpoint, lock = _table(Session), _table(CheckpointRow), _table(Lock)
    message, staged, run = _table(Message), _table(StagedChange), _table(Run)
    own = [name for name in _step_columns() if name not in _ASSIGNED_OTHERWISE]
    assignments = ", ".join(f"{name} = %({name})s" for name in own)
    of_step = "g.session_id = {}.id AND g.step_id = %(step_id)s"
    the_session = "tenant = %(tenant)s AND session_id = %(session_id)s"
    fence = taken = ""
    if merges:
        merged = "%(staged)s::text[]"
        conditions = [
            f"""(SELECT array_agg({_STAGED_VERSION} ORDER BY g.id) FROM {staged} AS g
                 WHERE {of_step.format("s")}) = {merged}"""
        ]
        taken = f"""taken AS (
            DELETE FROM {staged} AS g USING head
            WHERE {of_step.format("head")} AND {_STAGED_VERSION} = ANY({merged})
        ), """
    else:
        conditions = [f"NOT EXISTS (SELECT 1 FROM {staged} AS g WHERE {of_step.format('s')})"]
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
        conditions.append("s.base_key = %(base_key)s")
    return f"""
        WITH {fence}head AS (
            UPDATE {session} AS s
            SET {assignments}, tags = %(tags)s::jsonb, metadata = %(metadata)s::jsonb,
                mode = coalesce(s.mode, %(mode)s), version = s.version + 1, updated_at = %(at)s,
                message_count = s.message_count + %(added)s, current_is_checkpoint = true,
                base_key = %(base_key)s,
                current_id = nextval(pg_get_serial_sequence('{checkpoint}', 'id'))
            WHERE {the_session}
              AND s.version = coalesce(
                  %(expected_version)s::bigint, (SELECT version FROM {session} WHERE {the_session}))
              AND (s.mode IS NULL OR %(mode)s::text IS NULL OR s.mode = %(mode)s)
              AND (s.current_is_checkpoint OR EXISTS (
                  SELECT 1 FROM {checkpoint} AS c WHERE c.session_id = s.id AND c.kind = 'state'))
              AND {" AND ".join(conditions)}
            RETURNING s.id, s.version, s.message_count, s.current_id
        ), replaced AS (
            DELETE FROM {checkpoint} AS c USING head WHERE c.session_id = head.id AND c.kind = 'state'
        ), {taken}said AS (
            INSERT INTO {message} (session_id, sequence, role, payload, created_at)
            SELECT head.id, head.message_count - %(added)s + m.number, m.role, m.payload, %(at)s
            FROM head,
                unnest(%(roles)s::text[], %(texts)s::text[]) WITH ORDINALITY AS m(role, payload, number)
        ), kept AS (
            INSERT INTO {checkpoint} (
                id, session_id, kind, namespace, version, checkpoint_id, source, run_id, step_id, step_count,
                status, message_count, stream_sequence, payload, base_id, envelope, size_bytes, created_at)
            SELECT head.current_id, head.id, 'step', '', head.version, %(checkpoint_id)s, 'step', %(run_id)s,
                %(step_id)s, %(step_number)s, %(status)s, head.message_count, %(stream_sequence)s,
                %(payload)s, %(base_id)s::bigint, %(envelope)s, %(size_bytes)s, %(at)s
            FROM head
        )
        SELECT version, current_id FROM head"""


@cache
def _step_columns() -> tuple[str, ...]:
    """The head columns that a state brings along, by name; the same for every state."""
    return tuple(encode_state(SessionState(session_id="any", agent_type="any"), Limits()).columns)


def _table(model: Any) -> str:
    # PostgreSQL alone comes here, and table prefixes are plain names.
    return f'"{model._meta.db_table}"'
