"""Snapshots in the database: a thread is a session, and its row's lock gives the snapshots their order."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Count, QuerySet, Subquery
from django.utils import timezone

from helix_store.checkpointers.snapshots.database_claims import DatabaseSnapshotClaims
from helix_store.checkpointers.snapshots.rules import (
    SNAPSHOT_AGENT_TYPE,
    CheckpointMeta,
    EncodedSnapshot,
    read_snapshot,
)
from helix_store.core.guards import Guard
from helix_store.core.limits import AS_STORED
from helix_store.core.types import CheckpointSource, SessionState
from helix_store.engine.database import reads, writes
from helix_store.engine.errors import is_unique_violation
from helix_store.exceptions import (
    CheckpointNotFound,
    ConflictError,
    SessionExists,
    SessionNotFound,
)
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Session,
)
from helix_store.sessions.database.keys import all_named, key_of
from helix_store.sessions.database.locking import lock_session, lock_sessions
from helix_store.sessions.database.rows import first_row
from helix_store.sessions.database.sessions import insert_session
from helix_store.sessions.database.trees import delete_tree
from helix_store.sessions.layout import encode_state
from helix_store.sessions.requests import (
    NewSession,
)

__all__ = ["DatabaseSnapshots"]


class DatabaseSnapshots(DatabaseSnapshotClaims):
    @writes
    def put(
        self, thread_id: str, checkpoint_id: str, snapshot: EncodedSnapshot, *, cap: int | None, guard: Guard
    ) -> None:
        head = self._locked_thread(thread_id, guard)
        snapshots = self._of_key(head.pk)
        newest = snapshots.order_by("-version").values("version")
        last = first_row(newest.values_list("version", flat=True))
        at = timezone.now()
        try:
            snapshots.create(
                session_id=head.pk,
                kind=CheckpointKind.SNAPSHOT,
                version=(last or 0) + 1,
                checkpoint_id=checkpoint_id,
                source=CheckpointSource.INTERRUPT.value,
                message_count=head.message_count,
                snapshot_version=snapshot.version,
                payload=snapshot.text,
                size_bytes=snapshot.size_bytes,
                created_at=at,
            )
        except IntegrityError as exc:
            if is_unique_violation(exc):
                raise ConflictError("The thread has a checkpoint with this id already.") from exc
            raise
        if cap is not None:
            snapshots.filter(version__lte=Subquery(newest[cap : cap + 1])).delete()
        self._mark_written([head.pk], at)

    @reads
    def get(self, thread_id: str, checkpoint_id: str | None) -> dict[str, Any] | None:
        snapshots = self._of_thread(thread_id).order_by("-version")
        if checkpoint_id is not None:
            snapshots = snapshots.filter(checkpoint_id=checkpoint_id)
        text = first_row(snapshots.values_list("payload", flat=True))
        return None if text is None else read_snapshot(text)

    @reads
    def select(self, thread_id: str, *, limit: int | None, before: str | None) -> list[CheckpointMeta]:
        snapshots = self._of_thread(thread_id)
        if before is not None:
            version = first_row(snapshots.filter(checkpoint_id=before).values_list("version", flat=True))
            if version is None:
                raise CheckpointNotFound(before)
            snapshots = snapshots.filter(version__lt=version)
        rows = snapshots.order_by("-version").values_list(
            "checkpoint_id", "created_at", "snapshot_version", "size_bytes"
        )
        return [
            CheckpointMeta(
                id=checkpoint_id or "",
                thread_id=thread_id,
                created_at=created_at,
                agent_snapshot_version=version or 0,
                size_bytes=size_bytes,
            )
            for checkpoint_id, created_at, version, size_bytes in (rows if limit is None else rows[:limit])
        ]

    @writes
    def delete(self, thread_id: str, checkpoint_id: str | None) -> int:
        try:
            head = lock_session(self.db, thread_id)
        except SessionNotFound:
            return 0
        snapshots = self._of_key(head.pk)
        if checkpoint_id is not None:
            snapshots = snapshots.filter(checkpoint_id=checkpoint_id)
        deleted, _ = snapshots.delete()
        if deleted:
            self._mark_written([head.pk], timezone.now())
        return deleted

    @writes
    def delete_threads(self, thread_ids: Collection[str]) -> dict[str, int]:
        found = all_named(self.db, thread_ids)
        heads = lock_sessions(self.db, found.values_list("pk", flat=True))
        snapshots = Checkpoint.objects.using(self.db.alias).filter(
            session_id__in=[head.pk for head in heads], kind=CheckpointKind.SNAPSHOT
        )
        counts = dict(snapshots.order_by().values_list("session_id").annotate(Count("pk")))
        snapshots.delete()
        made_by_put = dict(found.filter(agent_type=SNAPSHOT_AGENT_TYPE).values_list("pk", "session_id"))
        for thread_id in made_by_put.values():
            delete_tree(self.db, thread_id, keep_usage=False)
        if kept := counts.keys() - made_by_put.keys():
            self._mark_written(kept, timezone.now())
        deleted = {head.session_id: counts.get(head.pk, 0) for head in heads}
        return {thread_id: deleted.get(thread_id, 0) for thread_id in thread_ids}

    def _locked_thread(self, thread_id: str, guard: Guard) -> Session:
        """The session of a thread, locked; the first snapshot creates it."""
        with suppress(SessionNotFound):
            return lock_session(self.db, thread_id, guard)
        state = SessionState(
            session_id=thread_id,
            agent_type=SNAPSHOT_AGENT_TYPE,
            root_session_id=thread_id,
            stream_id=thread_id,
        )
        new = NewSession(thread_id, encode_state(state, AS_STORED))
        # Another first snapshot may come in between: then its session is this one's too.
        with suppress(SessionExists), transaction.atomic(using=self.db.alias):
            insert_session(self.db, new, root_session_id=thread_id, at=timezone.now())
        return lock_session(self.db, thread_id, guard)

    def _mark_written(self, keys: Collection[int], at: datetime) -> None:
        """Update the rows of locked sessions: a put in one statement has to see that its thread changed."""
        Session.objects.using(self.db.alias).filter(pk__in=keys).update(updated_at=at)

    def _of_key(self, key: int) -> QuerySet[Checkpoint]:
        return Checkpoint.objects.using(self.db.alias).filter(
            session_id=key, kind=CheckpointKind.SNAPSHOT, namespace=""
        )

    def _of_thread(self, thread_id: str) -> QuerySet[Checkpoint]:
        return Checkpoint.objects.using(self.db.alias).filter(
            session_id=key_of(self.db, thread_id), kind=CheckpointKind.SNAPSHOT, namespace=""
        )
