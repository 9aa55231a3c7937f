"""Graph checkpoints in the database: one per wave of nodes, numbered within each namespace; and forks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from django.db import IntegrityError
from django.db.models import F, QuerySet

from helix_store.checkpointers.graph import sql
from helix_store.checkpointers.graph.payloads import CheckpointRequest, read_checkpoint, read_session
from helix_store.checkpointers.graph.types import GraphCheckpoint, GraphSession
from helix_store.core import moments
from helix_store.core.ids import new_id
from helix_store.core.limits import AS_STORED
from helix_store.core.payloads import size_of
from helix_store.core.types import BRANCHED_FROM, CheckpointSource, SessionState
from helix_store.engine.database import Database, DatabaseOperations, reads, writes
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.expressions import after_keyset, tenant_parameter
from helix_store.exceptions import CheckpointNotFound, ConflictError
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.sessions.database.locking import lock_session, session_key
from helix_store.sessions.database.rows import first_row, pk_of
from helix_store.sessions.database.sessions import insert_session
from helix_store.sessions.layout import encode_state
from helix_store.sessions.requests import NewSession

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
        """Return a page, and its last position if more checkpoints follow."""
        rows = _newest_first(self.db, session_id, namespace)
        if after is not None:
            version, key = after
            rows = rows.filter(after_keyset(Checkpoint, {"version": version, "id": key}, descending=True))
        page = list(rows.values(*_COLUMNS)[: limit + 1])
        if not page:
            session_key(self.db, session_id)
        following = (page[limit - 1]["version"], page[limit - 1]["pk"]) if len(page) > limit else None
        return [_checkpoint_from(row, session_id) for row in page[:limit]], following

    @writes
    def fork(
        self, checkpoint_id: str, *, new_session_id: str, title: str | None, with_history: bool
    ) -> GraphSession:
        source: Any = self._locked_source(checkpoint_id)
        at = moments.now()
        message_count = min(source.checkpoint_message_count, source.message_count)
        state = SessionState(
            session_id=new_session_id,
            agent_type=source.agent_type,
            user_id=source.user_id,
            tags=source.tags,
            metadata={**source.metadata, BRANCHED_FROM: source.session_id},
            title=f"Fork of {source.title or checkpoint_id}" if title is None else title,
            workspace_id=source.workspace_id,
            directory=source.directory,
            root_session_id=new_session_id,
            stream_id=new_session_id,
        )
        new = NewSession(new_session_id, encode_state(state, AS_STORED))
        new.encoded.columns.update(message_count=message_count, typed_metadata=source.typed_metadata)
        insert_session(self.db, new, root_session_id=new_session_id, at=at)
        parameters = {
            "tenant": self.db.tenant,
            "source": source.pk,
            "target": new_session_id,
            "message_count": message_count,
            "forked": source.forked_key,
            "namespace": source.forked_namespace,
            "version": source.forked_version,
            "id_prefix": _id_prefix(),
            "at": at,
        }
        if message_count:
            self.db.execute(sql.COPY_MESSAGES, parameters)
        self.db.execute(sql.COPY_HISTORY if with_history else sql.COPY_CHECKPOINT, parameters)
        columns = {**new.encoded.columns, "session_id": new_session_id, "created_at": at, "updated_at": at}
        return read_session(columns)

    def _locked_source(self, checkpoint_id: str) -> Session:
        """Return the checkpoint's session, locked so that its history does not change. The joined row may be
        older than the lock, but a graph checkpoint never changes, and is deleted only with its session.
        """
        sessions: QuerySet[Any] = Session.objects.using(self.db.alias)
        source = first_row(
            sessions.select_for_update(of=("self",), no_key=True)
            .filter(
                tenant=tenant_parameter(self.db.tenant),
                checkpoints__kind=CheckpointKind.GRAPH,
                checkpoints__checkpoint_id=checkpoint_id,
            )
            .annotate(
                forked_key=F("checkpoints__pk"),
                forked_namespace=F("checkpoints__namespace"),
                forked_version=F("checkpoints__version"),
                checkpoint_message_count=F("checkpoints__message_count"),
            )
        )
        if source is None:
            raise CheckpointNotFound(checkpoint_id)
        return source  # type: ignore[no-any-return]

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
                created_at=moments.now(),
            )
        except IntegrityError as exc:
            if is_unique_violation(exc):
                raise ConflictError(
                    "The namespace already has a checkpoint with this version; save without a version to "
                    "take the next free one.",
                    namespace=request.namespace,
                    version=version,
                ) from exc
            raise


def latest_checkpoint(db: Database, session_id: str, namespace: str | None = None) -> GraphCheckpoint | None:
    """Return the checkpoint with the highest version, of one namespace or of all. One query."""
    row = first_row(_newest_first(db, session_id, namespace).values(*_COLUMNS))
    return None if row is None else _checkpoint_from(row, session_id).readable()


def _newest_first(db: Database, session_id: str, namespace: str | None) -> QuerySet[Checkpoint]:
    rows: QuerySet[Checkpoint] = Checkpoint.objects.using(db.alias).filter(
        kind=CheckpointKind.GRAPH, session_id=pk_of(db, session_id)
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


def _id_prefix() -> str:
    """Return a UUIDv7 without its last 12 digits."""
    # New ids of one millisecond may differ only in the last digits, because the other random bits are drawn
    # here.
    random = int.from_bytes(os.urandom(4), "big")
    return f"{new_id()[:15]}{random >> 20:03x}-{0x8000 | random & 0x3FFF:04x}-"
