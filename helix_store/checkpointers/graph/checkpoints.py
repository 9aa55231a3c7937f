"""Graph checkpoints, one per wave of nodes and numbered within each namespace, and forks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError
from django.db.models import F, QuerySet

from helix_store import conf
from helix_store.checkpointers.graph import sql
from helix_store.checkpointers.graph.payloads import (
    CHECKPOINT_COLUMNS,
    created_session,
    encode_checkpoint,
    read_checkpoint,
)
from helix_store.checkpointers.graph.types import GraphCheckpoint, GraphPage, GraphSession
from helix_store.core import moments, validation
from helix_store.core.guards import Guard, guard
from helix_store.core.ids import new_id
from helix_store.core.payloads import size_of
from helix_store.core.types import BRANCHED_FROM, CheckpointSource
from helix_store.engine.async_twins import async_twin
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.engine.database import Database, DatabaseOperations, writes
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.expressions import after_keyset, tenant_parameter
from helix_store.engine.statement import Statement
from helix_store.exceptions import CheckpointNotFound, ConflictError
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.sessions.database.locking import lock_session, session_key
from helix_store.sessions.database.rows import first_row, pk_of
from helix_store.sessions.database.sessions import insert_session
from helix_store.sessions.requests import root_session
from helix_store.sessions.sql import COPY_MESSAGES


class GraphCheckpoints(DatabaseOperations):
    """The calls for checkpoints."""

    def save_checkpoint(
        self,
        session_id: str,
        *,
        namespace: str = "",
        version: int | None = None,
        step: int,
        node_id: str | None = None,
        node_results: dict[Any, Any] | None = None,
        pending_nodes: Any = (),
        cycle_state: Any = None,
        source: CheckpointSource | str = CheckpointSource.LOOP,
        parent_id: str | None = None,
        fencing_token: int | None = None,
    ) -> GraphCheckpoint:
        """Store the progress of a graph and return the stored checkpoint.

        One transaction under the session's lock. Without a ``version``, the checkpoint takes the next free
        one of its namespace, so a graph may run and resume any number of times. ``node_results`` has a dict
        with a ``status`` for each node id; typed values are kept. The call updates the session's
        ``updated_at`` and does not change its version. Raises `SessionNotFound`, `ConflictError` for a
        version in use, `CheckpointNotFound` for a parent that is not in the session, `InvalidPayload`,
        `LimitExceeded` and `FencedOutError`. A repeat without a version stores a second checkpoint.
        """
        validation.identifier(session_id, "session_id")
        if version is not None:
            validation.whole_number(version, "version", minimum=1)
        chosen = validation.tenant(namespace, "namespace")
        columns = {
            "step_count": validation.whole_number(step, "step"),
            "step_id": validation.optional_identifier(node_id, "node_id"),
            "payload": encode_checkpoint(
                node_results=node_results,
                pending_nodes=pending_nodes,
                cycle_state=cycle_state,
                limits=conf.limits(),
            ),
            "source": validation.enum(CheckpointSource, source, "source").value,
            "parent_checkpoint_id": validation.optional_identifier(parent_id, "parent_id"),
        }
        return self._save(session_id, chosen, version, columns, guard(fencing_token=fencing_token))

    @writes
    def _save(
        self, session_id: str, namespace: str, version: int | None, columns: Mapping[str, Any], guard: Guard
    ) -> GraphCheckpoint:
        head = lock_session(self.db, session_id, guard)
        existing = Checkpoint.objects.using(self.db.alias).filter(
            session_id=head.pk, kind=CheckpointKind.GRAPH
        )
        parent_id = columns["parent_checkpoint_id"]
        if parent_id is not None and not existing.filter(checkpoint_id=parent_id).exists():
            raise CheckpointNotFound(parent_id)
        if version is None:
            versions = existing.filter(namespace=namespace).order_by("-version")
            version = (first_row(versions.values_list("version", flat=True)) or 0) + 1
        try:
            row = Checkpoint.objects.using(self.db.alias).create(
                session_id=head.pk,
                kind=CheckpointKind.GRAPH,
                namespace=namespace,
                version=version,
                checkpoint_id=new_id(),
                message_count=head.message_count,
                size_bytes=size_of(columns["payload"]),
                created_at=moments.now(),
                **columns,
            )
        except IntegrityError as exc:
            if is_unique_violation(exc):
                raise ConflictError(
                    "The namespace already has a checkpoint with this version; save without a version to "
                    "take the next free one.",
                    namespace=namespace,
                    version=version,
                ) from exc
            raise
        Session.objects.using(self.db.alias).filter(pk=head.pk).update(updated_at=row.created_at)
        return read_checkpoint({name: getattr(row, name) for name in CHECKPOINT_COLUMNS}, session_id)

    def get_checkpoint(self, checkpoint_id: str) -> GraphCheckpoint | None:
        """Return a checkpoint by its id alone, or ``None``. One query.

        Raises `IntegrityFault` if it cannot be read.
        """
        found = Checkpoint.objects.using(self.db.alias).filter(
            kind=CheckpointKind.GRAPH,
            session__tenant=self.db.tenant,
            checkpoint_id=validation.identifier(checkpoint_id, "checkpoint_id"),
        )
        row = self.db.query(lambda: first_row(found.values("session__session_id", *CHECKPOINT_COLUMNS)))
        return None if row is None else read_checkpoint(row, row["session__session_id"]).readable()

    def get_latest_checkpoint(self, session_id: str, namespace: str | None = None) -> GraphCheckpoint | None:
        """Return the checkpoint with the highest version, in one namespace or in all, or ``None``. One query.

        Its step may be lower than another checkpoint's step. If versions in several namespaces are equal, it
        is the one that was saved last.
        """
        validation.identifier(session_id, "session_id")
        chosen = validation.optional_identifier(namespace, "namespace", empty=True)
        return self.db.query(lambda: latest_checkpoint(self.db, session_id, chosen))

    def list_checkpoints(
        self,
        session_id: str,
        *,
        namespace: str | None = None,
        limit: int = 20,
        cursor: str | None = None,
    ) -> GraphPage[GraphCheckpoint]:
        """List checkpoints, the highest version first: the first one is the latest. One query.

        ``namespace=None`` means all namespaces; the empty one belongs to the outermost graph. ``limit`` is 1
        to 200 (above means 200). A checkpoint that cannot be read is in the list, and raises `IntegrityFault`
        when one of its typed values is read. Raises `SessionNotFound`, `InvalidQuery` and `InvalidCursor`.
        """
        validation.identifier(session_id, "session_id")
        chosen = validation.optional_identifier(namespace, "namespace", empty=True)
        rows = _newest_first(self.db, session_id, chosen)
        binding = ["graph checkpoints", self.db.tenant, session_id, chosen]
        if cursor is not None:
            version, key = read_cursor(cursor, query=binding)
            rows = rows.filter(after_keyset(Checkpoint, {"version": version, "id": key}, descending=True))
        limit = validation.page_limit(limit)

        def read() -> list[dict[str, Any]]:
            found = list(rows.values(*CHECKPOINT_COLUMNS)[: limit + 1])
            if not found:
                session_key(self.db, session_id)
            return found

        page = self.db.query(read)
        next_cursor = None
        if len(page) > limit:
            last = page[limit - 1]
            next_cursor = write_cursor([last["version"], last["pk"]], query=binding)
        return GraphPage(
            items=[read_checkpoint(row, session_id) for row in page[:limit]], next_cursor=next_cursor
        )

    def fork(
        self, checkpoint_id: str, *, title: str | None = None, with_history: bool = False
    ) -> GraphSession:
        """Start a new session from a checkpoint and return it.

        The fork contains the messages up to the checkpoint, with their times, and a copy of the checkpoint
        whose parent is the original and whose source is ``fork``. ``with_history=True`` also copies the
        checkpoints that were saved before it, in all namespaces, except later versions of its own namespace.
        One transaction under the session's lock; six statements, however long the history is. A fork stays
        complete if the original is deleted. Raises `CheckpointNotFound`. A repeat creates a second fork.
        """
        validation.identifier(checkpoint_id, "checkpoint_id")
        statement = sql.COPY_HISTORY if with_history else sql.COPY_CHECKPOINT
        return self._fork(checkpoint_id, new_id(), validation.title(title), statement)

    @writes
    def _fork(
        self, checkpoint_id: str, new_session_id: str, title: str | None, copy: Statement
    ) -> GraphSession:
        source: Any = self._locked_source(checkpoint_id)
        at = moments.now()
        message_count = min(source.checkpoint_message_count, source.message_count)
        new = root_session(
            new_session_id,
            source.agent_type,
            user_id=source.user_id,
            tags=source.tags,
            metadata={**source.metadata, BRANCHED_FROM: source.session_id},
            title=f"Fork of {source.title or checkpoint_id}" if title is None else title,
            workspace_id=source.workspace_id,
            directory=source.directory,
        )
        new.encoded.columns.update(message_count=message_count, typed_metadata=source.typed_metadata)
        target, _ = insert_session(self.db, new, root_session_id=new_session_id, at=at)
        parameters = {
            "source": source.pk,
            "target": target,
            "message_count": message_count,
            "forked": source.forked_key,
            "namespace": source.forked_namespace,
            "version": source.forked_version,
            "id_prefix": _id_prefix(),
            "at": at,
        }
        if message_count:
            self.db.execute(COPY_MESSAGES, parameters)
        self.db.execute(copy, parameters)
        return created_session(new, at)

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

    asave_checkpoint = async_twin(save_checkpoint)
    aget_checkpoint = async_twin(get_checkpoint)
    aget_latest_checkpoint = async_twin(get_latest_checkpoint)
    alist_checkpoints = async_twin(list_checkpoints)
    afork = async_twin(fork)


def latest_checkpoint(db: Database, session_id: str, namespace: str | None = None) -> GraphCheckpoint | None:
    """Return the checkpoint with the highest version, in one namespace or in all of them. One query."""
    row = first_row(_newest_first(db, session_id, namespace).values(*CHECKPOINT_COLUMNS))
    return None if row is None else read_checkpoint(row, session_id).readable()


def _newest_first(db: Database, session_id: str, namespace: str | None) -> QuerySet[Checkpoint]:
    rows: QuerySet[Checkpoint] = Checkpoint.objects.using(db.alias).filter(
        kind=CheckpointKind.GRAPH, session_id=pk_of(db, session_id)
    )
    if namespace is None:
        return rows.order_by("-version", "-pk")
    return rows.filter(namespace=namespace).order_by("-version")


def _id_prefix() -> str:
    """Return a UUIDv7 without its last 12 digits."""
    # New ids of one millisecond may differ only in the last digits, because the other random bits are drawn
    # here.
    random = int.from_bytes(os.urandom(4), "big")
    return f"{new_id()[:15]}{random >> 20:03x}-{0x8000 | random & 0x3FFF:04x}-"
