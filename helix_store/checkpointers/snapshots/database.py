"""Snapshots in the database. A thread is a session, whose row lock determines the order of snapshots."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from django.db import IntegrityError
from django.db.models import Count, QuerySet

from helix_store.checkpointers.snapshots import sql
from helix_store.checkpointers.snapshots.rules import (
    SNAPSHOT_AGENT_TYPE,
    CheckpointMeta,
    ClaimTerm,
    EncodedSnapshot,
    new_thread,
)
from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.moments import as_utc
from helix_store.core.payloads import decode_object
from helix_store.engine.database import Call, DatabaseOperations, Rows, reads, writes
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.statement import Statement
from helix_store.exceptions import CheckpointNotFound, ConflictError, SessionNotFound
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.sessions.database.locking import lock_session, lock_sessions
from helix_store.sessions.database.rows import sessions_with_ids
from helix_store.sessions.database.sessions import lock_or_insert_session
from helix_store.sessions.database.trees import delete_tree

_UNGUARDED: Final = Guard()


class DatabaseSnapshots(DatabaseOperations):
    """The database back end. Arguments have already been checked. All writes, even claims, lock the
    session's row first.
    """

    def put(
        self, thread_id: str, checkpoint_id: str, snapshot: EncodedSnapshot, *, cap: int | None, guard: Guard
    ) -> None:
        """Store a snapshot as the newest of its thread, and delete the oldest beyond ``cap``."""
        parameters = {
            "tenant": self.db.tenant,
            "thread_id": thread_id,
            "checkpoint_id": checkpoint_id,
            "payload": snapshot.text,
            "size_bytes": snapshot.size_bytes,
            "snapshot_version": snapshot.version,
            "at": moments.now(),
        }
        if cap is not None:
            parameters["kept"] = cap - 1
        if guard != _UNGUARDED or not self.db.has_fast_writes:
            self._put(thread_id, parameters, guard)
            return

        def put(call: Call) -> None:
            recorded = {**parameters, "call_id": call.id}
            try:
                if call.try_write(sql.PUT if cap is None else sql.PUT_AND_TRIM, recorded):
                    return
            except IntegrityError as exc:
                if not is_unique_violation(exc):
                    raise
            # The thread is new, another write has changed it, or it already has a snapshot with this id.
            self._put(thread_id, recorded, guard)

        def look_first(call: Call) -> None:
            with suppress(SessionNotFound):
                key = lock_session(self.db, thread_id).pk
                if self._snapshots([key]).filter(checkpoint_id=checkpoint_id, call_id=call.id).exists():
                    return
            self._put(thread_id, {**parameters, "call_id": call.id}, guard)

        self.db.committed_once(put, look_first, operation_id=lambda: checkpoint_id)

    @writes
    def _put(self, thread_id: str, parameters: dict[str, Any], guard: Guard) -> None:
        head, _ = lock_or_insert_session(self.db, thread_id, lambda: new_thread(thread_id), guard)
        # A put that waited for the lock comes after the puts that it waited for.
        of_thread = {"call_id": None, **parameters, "key": head.pk, "at": moments.now()}
        if "kept" in parameters:
            self.db.execute(sql.TRIM, of_thread)
        try:
            self.db.execute(sql.ADD, of_thread)
        except IntegrityError as exc:
            if is_unique_violation(exc):
                raise ConflictError("The thread already has a checkpoint with this id.") from exc
            raise
        self._mark_written([head.pk], of_thread["at"])

    def get(self, thread_id: str, checkpoint_id: str | None) -> dict[str, Any] | None:
        statement = sql.NEWEST if checkpoint_id is None else sql.ONE
        parameters = {"tenant": self.db.tenant, "thread_id": thread_id, "checkpoint_id": checkpoint_id}
        for (payload,) in self.db.read(statement, parameters):
            return decode_object(payload)
        return None

    def select(self, thread_id: str, *, limit: int | None, before: str | None) -> list[CheckpointMeta]:
        parameters = {
            "tenant": self.db.tenant,
            "thread_id": thread_id,
            "limit": MAX_BIGINT if limit is None else limit,
        }
        rows = self.db.read(sql.LIST, parameters) if before is None else self._rows_before(before, parameters)
        return [
            CheckpointMeta(
                id=checkpoint_id,
                thread_id=thread_id,
                created_at=as_utc(created_at),
                agent_snapshot_version=version or 0,
                size_bytes=size_bytes,
            )
            for checkpoint_id, created_at, version, size_bytes in rows
        ]

    @reads
    def _rows_before(self, checkpoint_id: str, parameters: dict[str, Any]) -> Rows:
        found = self.db.execute(sql.VERSION, {**parameters, "checkpoint_id": checkpoint_id})
        if not found:
            raise CheckpointNotFound(checkpoint_id)
        return self.db.execute(sql.LIST_BEFORE, {**parameters, "version": found[0][0]})

    @writes
    def delete(self, thread_id: str, checkpoint_id: str | None) -> int:
        try:
            head = lock_session(self.db, thread_id)
        except SessionNotFound:
            return 0
        snapshots = self._snapshots([head.pk])
        if checkpoint_id is not None:
            snapshots = snapshots.filter(checkpoint_id=checkpoint_id)
        deleted, _ = snapshots.delete()
        if deleted:
            self._mark_written([head.pk], moments.now())
        return deleted

    @writes
    def delete_threads(self, thread_ids: Collection[str]) -> dict[str, int]:
        found = sessions_with_ids(self.db, thread_ids)
        heads = lock_sessions(self.db, found.values_list("pk", flat=True))
        snapshots = self._snapshots([head.pk for head in heads])
        counts = dict(snapshots.order_by().values_list("session_id").annotate(Count("pk")))
        snapshots.delete()
        made_by_put = dict(found.filter(agent_type=SNAPSHOT_AGENT_TYPE).values_list("pk", "session_id"))
        for thread_id in made_by_put.values():
            delete_tree(self.db, thread_id, keep_usage=False)
        if kept := counts.keys() - made_by_put.keys():
            self._mark_written(kept, moments.now())
        deleted = {head.session_id: counts.get(head.pk, 0) for head in heads}
        return {thread_id: deleted.get(thread_id, 0) for thread_id in thread_ids}

    @writes
    def claim(
        self, thread_id: str, checkpoint_id: str | None, *, owner: str, ttl_ms: int
    ) -> ClaimTerm | None:
        """Return a term on a snapshot that is neither claimed nor resumed, or ``None``."""
        rows = self._in_locked_thread(
            thread_id,
            sql.CLAIM_NEWEST if checkpoint_id is None else sql.CLAIM_ONE,
            {"checkpoint_id": checkpoint_id, "owner": owner, "ttl_ms": ttl_ms},
        )
        for claimed_id, token, expires_at, payload in rows:
            return ClaimTerm(
                thread_id=thread_id,
                checkpoint_id=claimed_id,
                owner=owner,
                token=token,
                expires_at=as_utc(expires_at),
                snapshot=decode_object(payload),
            )
        return None

    @writes
    def refresh_claim(self, term: ClaimTerm, *, ttl_ms: int) -> datetime | None:
        """Return the new end of a term that has not expired, or ``None``."""
        rows = self._in_locked_thread(term.thread_id, sql.REFRESH_CLAIM, {**_own(term), "ttl_ms": ttl_ms})
        return as_utc(rows[0][0]) if rows else None

    @writes
    def release_claim(self, term: ClaimTerm) -> bool:
        return bool(self._in_locked_thread(term.thread_id, sql.RELEASE_CLAIM, _own(term)))

    @writes
    def finish_claim(self, term: ClaimTerm) -> bool:
        """Mark the snapshot as resumed; return ``False`` if it was released, deleted or claimed again."""
        return bool(self._in_locked_thread(term.thread_id, sql.FINISH_CLAIM, _own(term)))

    def _in_locked_thread(self, thread_id: str, statement: Statement, parameters: dict[str, Any]) -> Rows:
        try:
            head = lock_session(self.db, thread_id)
        except SessionNotFound:
            return []
        return self.db.execute(statement, {**parameters, "key": head.pk})

    def _snapshots(self, keys: Collection[int]) -> QuerySet[Checkpoint]:
        return Checkpoint.objects.using(self.db.alias).filter(
            session_id__in=keys, kind=CheckpointKind.SNAPSHOT
        )

    def _mark_written(self, keys: Collection[int], at: datetime) -> None:
        """Update the rows of locked sessions, so that `sql.PUT` notices that their snapshots have changed."""
        Session.objects.using(self.db.alias).filter(pk__in=keys).update(updated_at=at)


def _own(term: ClaimTerm) -> dict[str, Any]:
    return {"checkpoint_id": term.checkpoint_id, "owner": term.owner, "token": term.token}
