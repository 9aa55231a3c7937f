"""Loading a session and setting its status."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

from django.utils import timezone

from helix_store.core.guards import Guard
from helix_store.core.types import (
    SessionState,
    SessionStatus,
    StatusChange,
    StatusConflict,
)
from helix_store.engine.statement import table
from helix_store.models import Checkpoint as CheckpointRow
from helix_store.models import Session
from helix_store.sessions.database.keys import is_named
from helix_store.sessions.database.rows import CURRENT_COLUMNS
from helix_store.sessions.database.sessions import DatabaseSessions

__all__ = ["FastSessions"]

_CURRENT_SQL: Final = {
    "current__payload": "c.payload",
    "current__envelope": "c.envelope",
    "current__base_id": "c.base_id",
    "current__base__payload": "b.payload",
}
_JSONB_COLUMNS: Final = ("tags", "metadata")


class FastSessions(DatabaseSessions):
    def load(self, session_id: str) -> SessionState | None:
        if not self.db.has_fast_reads:
            return super().load(session_id)
        rows = self.db.read(_load_sql(), {"tenant": self.db.tenant, "session_id": session_id})
        if not rows:
            return None
        row = dict(zip(CURRENT_COLUMNS, rows[0], strict=True))
        for name in _JSONB_COLUMNS:
            row[name] = _from_jsonb(row[name])
        return self._loaded(row)

    def compare_and_set_status(
        self,
        session_id: str,
        expected: frozenset[SessionStatus],
        status: SessionStatus,
        failure_reason: str | None,
        guard: Guard,
    ) -> StatusChange | StatusConflict:
        if guard == Guard() and self.db.has_fast_writes:
            parameters = {
                "tenant": self.db.tenant,
                "session_id": session_id,
                "expected": [member.value for member in expected],
                "status": status.value,
                "failure_reason": failure_reason,
                "at": timezone.now(),
            }
            rows = self.db.try_write(_compare_and_set_sql(), parameters)
            if rows:
                return StatusChange(new_version=rows[0][0])
        return super().compare_and_set_status(session_id, expected, status, failure_reason, guard)


def _from_jsonb(text: str) -> Any:
    # Most are empty, and the decoder takes longer to begin than to read.
    return [] if text == "[]" else {} if text == "{}" else json.loads(text)


@cache
def _load_sql() -> str:
    columns = ", ".join(_CURRENT_SQL.get(name, f"s.{name}") for name in CURRENT_COLUMNS)
    return f"""
        SELECT {columns} FROM {table(Session)} AS s
        LEFT JOIN {table(CheckpointRow)} AS c ON c.id = s.current_id
        LEFT JOIN {table(CheckpointRow)} AS b ON b.id = c.base_id
        WHERE {is_named("s")}"""


@cache
def _compare_and_set_sql() -> str:
    return f"""
        UPDATE {table(Session)}
        SET status = %(status)s, failure_reason = %(failure_reason)s, version = version + 1,
            updated_at = %(at)s
        WHERE {is_named()} AND status = ANY(%(expected)s)
        RETURNING version"""
