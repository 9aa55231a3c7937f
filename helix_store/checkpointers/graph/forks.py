"""Forking a graph session: a fixed number of statements, whatever the length of its history."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any, Final

from django.db.models import F, QuerySet
from django.utils import timezone

from helix_store.checkpointers.graph.payloads import read_session
from helix_store.checkpointers.graph.types import GraphSession
from helix_store.core.ids import new_id
from helix_store.core.limits import AS_STORED
from helix_store.core.types import SessionState
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    writes,
)
from helix_store.engine.expressions import tenant_parameter
from helix_store.exceptions import CheckpointNotFound
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Message,
    Session,
)
from helix_store.sessions.database.rows import first_row
from helix_store.sessions.database.sessions import insert_session
from helix_store.sessions.layout import encode_state
from helix_store.sessions.requests import NewSession
from helix_store.sessions.sql import session_by_id

__all__ = ["GraphForks"]

_COPY_MESSAGES: Final = """
INSERT INTO {message} (session_id, sequence, role, payload, created_at)
SELECT target.id, source.sequence, source.role, source.payload, source.created_at
FROM {message} AS source
JOIN {session} AS target ON {target_is_named}
WHERE source.session_id = %(source)s AND source.sequence <= %(message_count)s
ORDER BY source.sequence
"""

# An id is the beginning of a new one and the original's key: parents can be translated in the same statement.
# The forked checkpoint keeps its origin as its parent; so does whoever has a parent that is not copied.
_COPY_CHECKPOINTS: Final = """
INSERT INTO {checkpoint} (
    session_id, kind, namespace, version, checkpoint_id, parent_checkpoint_id, source, run_id, step_id,
    step_count, status, message_count, stream_sequence, payload, envelope, size_bytes, created_at
)
SELECT
    (SELECT id FROM {session} AS target WHERE {target_is_named}),
    original.kind, original.namespace, original.version, %(new_id)s || {key_of_original},
    CASE WHEN original.id = %(forked)s THEN original.checkpoint_id
         WHEN parent.id IS NULL THEN original.parent_checkpoint_id
         ELSE %(new_id)s || {key_of_parent} END,
    CASE WHEN original.id = %(forked)s THEN 'fork' ELSE original.source END,
    original.run_id, original.step_id, original.step_count, original.status,
    CASE WHEN original.message_count < %(message_count)s THEN original.message_count
         ELSE %(message_count)s END,
    original.stream_sequence, original.payload, original.envelope, original.size_bytes,
    CASE WHEN original.id = %(forked)s THEN %(at)s ELSE original.created_at END
FROM {checkpoint} AS original
LEFT JOIN {checkpoint} AS parent ON parent.session_id = %(source)s
    AND parent.checkpoint_id = original.parent_checkpoint_id AND {parent_is_copied}
WHERE original.session_id = %(source)s AND {original_is_copied}
ORDER BY original.id
"""
_KEYS: Final = {
    "postgresql": "lpad(to_hex({row}.id & 281474976710655), 12, '0')",
    "sqlite": "printf('%%012x', {row}.id & 281474976710655)",
}
"""The last 12 digits of a UUID, from a row's key."""

_THIS_ONE: Final = "{row}.kind = 'graph' AND {row}.id = %(forked)s"
# A later version of the same namespace would be the latest of the fork in place of the forked checkpoint.
_ALL_UP_TO_HERE: Final = """{row}.kind = 'graph' AND {row}.id <= %(forked)s
    AND ({row}.namespace <> %(namespace)s OR {row}.version <= %(version)s)"""


class GraphForks(DatabaseOperations):
    @writes
    def fork(
        self, checkpoint_id: str, *, new_session_id: str, title: str | None, with_history: bool
    ) -> GraphSession:
        source: Any = self._locked_source(checkpoint_id)
        at = timezone.now()
        message_count = min(source.checkpoint_message_count, source.message_count)
        state = SessionState(
            session_id=new_session_id,
            agent_type=source.agent_type,
            user_id=source.user_id,
            tags=source.tags,
            metadata={**source.metadata, "branched_from": source.session_id},
            title=f"Fork of {source.title or checkpoint_id}" if title is None else title,
            workspace_id=source.workspace_id,
            directory=source.directory,
            root_session_id=new_session_id,
            stream_id=new_session_id,
        )
        new = NewSession(new_session_id, encode_state(state, AS_STORED))
        new.encoded.columns.update(message_count=message_count, typed_metadata=source.typed_metadata)
        insert_session(self.db, new, root_session_id=new_session_id, at=at)
        self._copy(
            source, target=new_session_id, message_count=message_count, at=at, with_history=with_history
        )
        columns = {**new.encoded.columns, "session_id": new_session_id, "created_at": at, "updated_at": at}
        return read_session(columns)

    def _locked_source(self, checkpoint_id: str) -> Session:
        """The checkpoint's session, locked so that its history stands still.

        What is joined may be older than the lock, but a graph checkpoint never changes, and one that was
        deleted meanwhile has taken its session along.
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

    def _copy(
        self, source: Any, *, target: str, message_count: int, at: datetime, with_history: bool
    ) -> None:
        connection = self.db.connection
        parameters = {
            "tenant": self.db.tenant,
            "source": source.pk,
            "target": target,
            "message_count": message_count,
            "forked": source.forked_key,
            "namespace": source.forked_namespace,
            "version": source.forked_version,
            "new_id": _beginning_of_ids(),
            "at": connection.ops.adapt_datetimefield_value(at),
        }
        if message_count:
            self.db.execute(_with_tables(self.db, _COPY_MESSAGES), parameters)
        self.db.execute(_copying_checkpoints(self.db, with_history=with_history), parameters)


def _beginning_of_ids() -> str:
    """All of a UUIDv7 but its last 12 digits; random again, as ids of one millisecond differ in those."""
    random = int.from_bytes(os.urandom(4), "big")
    return f"{new_id()[:15]}{random >> 20:03x}-{0x8000 | random & 0x3FFF:04x}-"


def _copying_checkpoints(db: Database, *, with_history: bool) -> str:
    key = _KEYS[db.connection.vendor]
    is_copied = _ALL_UP_TO_HERE if with_history else _THIS_ONE
    return _with_tables(
        db,
        _COPY_CHECKPOINTS,
        key_of_original=key.format(row="original"),
        key_of_parent=key.format(row="parent"),
        original_is_copied=is_copied.format(row="original"),
        parent_is_copied=is_copied.format(row="parent"),
    )


def _with_tables(db: Database, sql: str, **parts: str) -> str:
    quote = db.connection.ops.quote_name
    return sql.format(
        message=quote(Message._meta.db_table),
        session=quote(Session._meta.db_table),
        checkpoint=quote(Checkpoint._meta.db_table),
        target_is_named=session_by_id("target", session_id="target"),
        **parts,
    )
