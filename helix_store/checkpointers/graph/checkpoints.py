"""Checkpoints of graphs in the database: one per wave of nodes, numbered within each namespace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.db import IntegrityError
from django.db.models import QuerySet
from django.utils import timezone

from helix_store.checkpointers.graph.payloads import CheckpointRequest, read_checkpoint
from helix_store.checkpointers.graph.types import GraphCheckpoint
from helix_store.core.ids import new_id
from helix_store.core.payloads import size_of
from helix_store.core.types import CheckpointSource
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    reads,
    writes,
)
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.expressions import after_keyset
from helix_store.exceptions import CheckpointNotFound, ConflictError
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Session,
)
from helix_store.sessions.database.locking import lock_session, session_key
from helix_store.sessions.database.rows import first_row, key_of

__all__ = ["GraphCheckpoints", "latest_checkpoint"]

_COLUMNS: Final = (
    "pk",
    "checkpoint_id",
    "namespace",
    "parent_checkpoint_id",
    "version",
    "step_count",
    "step_id",
    "source",
    "payload",
    "created_at",
)


class GraphCheckpoints(DatabaseOperations):
    @writes
    def save(self, request: CheckpointRequest) -> GraphCheckpoint:
        head = lock_session(self.db, request.session_id, request.guard)
        existing = Checkpoint.objects.using(self.db.alias).filter(
            session_id=head.pk, kind=CheckpointKind.GRAPH
        )
        if request.parent_id is not None and not existing.filter(checkpoint_id=request.parent_id).exists():
            raise CheckpointNotFound(request.parent_id)
        version = request.version
        if version is None:
            versions = existing.filter(namespace=request.namespace).order_by("-version")
            version = (first_row(versions.values_list("version", flat=True)) or 0) + 1
        row = self._insert(head, request, version)
        Session.objects.using(self.db.alias).filter(pk=head.pk).update(updated_at=row.created_at)
        return read_checkpoint(
            row.payload,
            checkpoint_id=row.checkpoint_id,
            session_id=request.session_id,
            namespace=row.namespace,
            parent_id=row.parent_checkpoint_id,
            version=row.version,
            step=row.step_count,
            node_id=row.step_id,
            source=request.source,
            created_at=row.created_at,
        )

    @reads
    def get(self, checkpoint_id: str) -> GraphCheckpoint | None:
        found = Checkpoint.objects.using(self.db.alias).filter(
            kind=CheckpointKind.GRAPH, session__tenant=self.db.tenant, checkpoint_id=checkpoint_id
        )
        row = first_row(found.values("session__session_id", *_COLUMNS))
        return None if row is None else _checkpoint_from(row, row["session__session_id"]).readable()

    @reads
    def latest(self, session_id: str, namespace: str | None) -> GraphCheckpoint | None:
        return latest_checkpoint(self.db, session_id, namespace)

    @reads
    def select(
        self, session_id: str, *, namespace: str | None, limit: int, after: tuple[int, int] | None
    ) -> tuple[list[GraphCheckpoint], tuple[int, int] | None]:
        """A page, and the position to go on from when more follows."""
        rows = _newest_first(self.db, session_id, namespace)
        if after is not None:
            version, key = after
            rows = rows.filter(after_keyset(Checkpoint, {"version": version, "id": key}, descending=True))
        page = list(rows.values(*_COLUMNS)[: limit + 1])
        if not page:
            session_key(self.db, session_id)
        following = (page[limit - 1]["version"], page[limit - 1]["pk"]) if len(page) > limit else None
        return [_checkpoint_from(row, session_id) for row in page[:limit]], following

    def _insert(self, head: Session, request: CheckpointRequest, version: int) -> Checkpoint:
        try:
            return Checkpoint.objects.using(self.db.alias).create(
                session_id=head.pk,
                kind=CheckpointKind.GRAPH,
                namespace=request.namespace,
                version=version,
                checkpoint_id=new_id(),
                parent_checkpoint_id=request.parent_id,
                source=request.source.value,
                step_id=request.node_id,
                step_count=request.step,
                message_count=head.message_count,
                payload=request.payload,
                size_bytes=size_of(request.payload),
                created_at=timezone.now(),
            )
        except IntegrityError as exc:
            if is_unique_violation(exc):
                raise ConflictError(
                    "The namespace has a checkpoint of this version already; save without a version to take "
                    "the next free one.",
                    namespace=request.namespace,
                    version=version,
                ) from exc
            raise


def latest_checkpoint(db: Database, session_id: str, namespace: str | None = None) -> GraphCheckpoint | None:
    """The checkpoint of the highest version, of one namespace or of all. One query."""
    row = first_row(_newest_first(db, session_id, namespace).values(*_COLUMNS))
    return None if row is None else _checkpoint_from(row, session_id).readable()


def _newest_first(db: Database, session_id: str, namespace: str | None) -> QuerySet[Checkpoint]:
    rows: QuerySet[Checkpoint] = Checkpoint.objects.using(db.alias).filter(
        kind=CheckpointKind.GRAPH, session_id=key_of(db, session_id)
    )
    if namespace is None:
        return rows.order_by("-version", "-pk")
    return rows.filter(namespace=namespace).order_by("-version")


def _checkpoint_from(row: Mapping[str, Any], session_id: str) -> GraphCheckpoint:
    return read_checkpoint(
        row["payload"],
        checkpoint_id=row["checkpoint_id"],
        session_id=session_id,
        namespace=row["namespace"],
        parent_id=row["parent_checkpoint_id"],
        version=row["version"],
        step=row["step_count"],
        node_id=row["step_id"],
        source=CheckpointSource(row["source"]),
        created_at=row["created_at"],
    )
