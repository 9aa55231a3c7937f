"""Putting, getting and listing snapshots."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.db import IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from helix_store.checkpointers.snapshots.database import DatabaseSnapshots
from helix_store.checkpointers.snapshots.rules import (
    CheckpointMeta,
    EncodedSnapshot,
    read_snapshot,
)
from helix_store.core.guards import Guard
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.statement import table
from helix_store.models import Checkpoint, Session
from helix_store.sessions.database.keys import is_named

__all__ = ["FastSnapshots"]


class FastSnapshots(DatabaseSnapshots):
    def put(
        self, thread_id: str, checkpoint_id: str, snapshot: EncodedSnapshot, *, cap: int | None, guard: Guard
    ) -> None:
        connection = self.db.connection
        is_stored = False
        if guard == Guard() and self.db.has_fast_writes:
            is_stored = self._put_in_one_statement(connection, thread_id, checkpoint_id, snapshot, cap)
        if not is_stored:
            super().put(thread_id, checkpoint_id, snapshot, cap=cap, guard=guard)

    def _put_in_one_statement(
        self,
        connection: BaseDatabaseWrapper,
        thread_id: str,
        checkpoint_id: str,
        snapshot: EncodedSnapshot,
        cap: int | None,
    ) -> bool:
        """Whether it was stored: not when the thread is new, or when somebody was quicker."""
        parameters = {
            **self._thread(thread_id),
            "checkpoint_id": checkpoint_id,
            "snapshot_version": snapshot.version,
            "payload": snapshot.text,
            "size_bytes": snapshot.size_bytes,
            "at": timezone.now(),
            "kept_before": None if cap is None else cap - 1,
        }
        try:
            return bool(self.db.try_write(_put_sql(), parameters))
        except IntegrityError as exc:
            if is_unique_violation(exc):
                return False
            raise

    def get(self, thread_id: str, checkpoint_id: str | None) -> dict[str, Any] | None:
        if not self.db.has_fast_reads:
            return super().get(thread_id, checkpoint_id)
        parameters = {**self._thread(thread_id), "checkpoint_id": checkpoint_id}
        sql = _newest_sql() if checkpoint_id is None else _one_sql()
        for (payload,) in self.db.read(sql, parameters):
            return read_snapshot(payload)
        return None

    def select(self, thread_id: str, *, limit: int | None, before: str | None) -> list[CheckpointMeta]:
        if before is not None or not self.db.has_fast_reads:
            return super().select(thread_id, limit=limit, before=before)
        rows = self.db.read(_list_sql(), {**self._thread(thread_id), "limit": limit})
        return [
            CheckpointMeta(
                id=checkpoint_id,
                thread_id=thread_id,
                created_at=created_at,
                agent_snapshot_version=version or 0,
                size_bytes=size_bytes,
            )
            for checkpoint_id, created_at, version, size_bytes in rows
        ]

    def _thread(self, thread_id: str) -> dict[str, Any]:
        return {"tenant": self.db.tenant, "thread_id": thread_id}


@cache
def _put_sql() -> str:
    """One put, for a thread that no other write has changed since the statement began.

    Number and cap come from the snapshots as they were at the start of the statement, also after it waited
    for the session's row. PostgreSQL checks the condition of the UPDATE again on the row that it waited for,
    while the subselect keeps its value: every write that adds or deletes a snapshot updates the session's row
    and so changes its ``xmin``. Then nothing is written, and the portable form, which locks first, decides.
    """
    session, checkpoint = _tables()
    this_thread = is_named(session_id="thread_id")
    return f"""
        WITH head AS (
            UPDATE {session} SET updated_at = %(at)s
            WHERE {this_thread} AND xmin = (SELECT xmin FROM {session} WHERE {this_thread})
            RETURNING id, message_count
        ), dropped AS (
            DELETE FROM {checkpoint} AS c USING head
            WHERE c.session_id = head.id AND {_SNAPSHOTS} AND %(kept_before)s::bigint IS NOT NULL
              AND c.version <= (
                  SELECT k.version FROM {checkpoint} AS k
                  WHERE k.session_id = head.id AND {_SNAPSHOTS.replace("c.", "k.")}
                  ORDER BY k.version DESC LIMIT 1 OFFSET %(kept_before)s::bigint)
        )
        INSERT INTO {checkpoint} (
            session_id, kind, namespace, version, checkpoint_id, source, step_count, status, message_count,
            stream_sequence, payload, envelope, size_bytes, created_at, snapshot_version)
        SELECT head.id, 'snapshot', '', coalesce((
                SELECT c.version FROM {checkpoint} AS c WHERE c.session_id = head.id AND {_SNAPSHOTS}
                ORDER BY c.version DESC LIMIT 1), 0) + 1,
            %(checkpoint_id)s, 'interrupt', 0, '', head.message_count, 0, %(payload)s, '{{}}', %(size_bytes)s,
            %(at)s, %(snapshot_version)s
        FROM head
        RETURNING id"""


@cache
def _newest_sql() -> str:
    session, checkpoint = _tables()
    return f"""
        SELECT found.payload FROM {session} AS s, LATERAL (
            SELECT c.payload FROM {checkpoint} AS c WHERE c.session_id = s.id AND {_SNAPSHOTS}
            ORDER BY c.version DESC LIMIT 1
        ) AS found
        WHERE {is_named("s", session_id="thread_id")}"""


@cache
def _one_sql() -> str:
    session, checkpoint = _tables()
    return f"""
        SELECT c.payload FROM {session} AS s JOIN {checkpoint} AS c ON c.session_id = s.id
        WHERE {is_named("s", session_id="thread_id")}
          AND {_SNAPSHOTS} AND c.checkpoint_id = %(checkpoint_id)s"""


@cache
def _list_sql() -> str:
    session, checkpoint = _tables()
    return f"""
        SELECT found.* FROM {session} AS s, LATERAL (
            SELECT c.checkpoint_id, c.created_at, c.snapshot_version, c.size_bytes FROM {checkpoint} AS c
            WHERE c.session_id = s.id AND {_SNAPSHOTS} ORDER BY c.version DESC LIMIT %(limit)s::bigint
        ) AS found
        WHERE {is_named("s", session_id="thread_id")}"""


_SNAPSHOTS = "c.kind = 'snapshot' AND c.namespace = ''"


def _tables() -> tuple[str, str]:
    return table(Session), table(Checkpoint)
