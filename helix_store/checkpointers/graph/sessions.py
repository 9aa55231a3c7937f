"""Graph sessions in the database: sessions with typed metadata, and lists that never read a history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db.models import Count, F, OuterRef, Q, QuerySet, Subquery

from helix_store.checkpointers.graph.checkpoints import latest_checkpoint
from helix_store.checkpointers.graph.messages import MESSAGE_COLUMNS, message_from, newest_messages
from helix_store.checkpointers.graph.payloads import read_session
from helix_store.checkpointers.graph.types import (
    GRAPH_AGENT_TYPE,
    GraphContinuation,
    GraphSession,
    GraphSessionSummary,
    StoredMessage,
)
from helix_store.core.types import UNSET, Unset
from helix_store.engine.database import DatabaseOperations, reads, writes
from helix_store.engine.expressions import NoIndexHint, after_keyset, tenant_parameter
from helix_store.models import Checkpoint, CheckpointKind, Message, Session
from helix_store.sessions.database.locking import advance, lock_session
from helix_store.sessions.database.rows import first_row, session_with_id
from helix_store.sessions.database.sessions import insert_session
from helix_store.sessions.database.trees import delete_tree
from helix_store.sessions.requests import NewSession

__all__ = ["GraphSessionQuery", "GraphSessions"]

_COLUMNS: Final = (
    "session_id",
    "directory",
    "title",
    "workspace_id",
    "typed_metadata",
    "created_at",
    "updated_at",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSessionQuery:
    """The filters and the page of a list of graph sessions, the most recently written first."""

    workspace_id: str | Unset | None = UNSET
    text: str | None = None
    limit: int = 50
    after: tuple[datetime, str] | None = None


class GraphSessions(DatabaseOperations):
    @writes
    def create(self, new: NewSession, *, at: datetime) -> GraphSession:
        insert_session(self.db, new, root_session_id=new.session_id, at=at)
        columns = {**new.encoded.columns, "session_id": new.session_id, "created_at": at, "updated_at": at}
        return read_session(columns)

    @reads
    def get(self, session_id: str) -> GraphSession | None:
        row = first_row(session_with_id(self.db, session_id).values(*_COLUMNS))
        return None if row is None else read_session(row).readable()

    @writes
    def update(self, session_id: str, columns: Mapping[str, Any]) -> GraphSession:
        head = lock_session(self.db, session_id)
        if columns:
            advance(self.db, head, **columns)
        return read_session(session_with_id(self.db, session_id).values(*_COLUMNS).get())

    @writes
    def delete(self, session_id: str) -> int:
        return delete_tree(self.db, session_id, keep_usage=False)

    @reads
    def select(self, query: GraphSessionQuery) -> list[GraphSession]:
        return [read_session(row) for row in self._matching(query).values(*_COLUMNS)]

    @reads
    def latest(self, workspace_id: str | Unset | None) -> GraphContinuation | None:
        newest = self._matching(GraphSessionQuery(workspace_id=workspace_id, limit=1))
        row = first_row(newest.values("pk", *_COLUMNS))
        if row is None:
            return None
        return GraphContinuation(
            session=read_session(row).readable(),
            messages=newest_messages(self.db, row["session_id"]),
            checkpoint=latest_checkpoint(self.db, row["session_id"]),
        )

    @reads
    def summary(self, session_id: str) -> GraphSessionSummary | None:
        return next(iter(self._summaries(session_with_id(self.db, session_id))), None)

    @reads
    def summaries(self, query: GraphSessionQuery) -> list[GraphSessionSummary]:
        return self._summaries(self._matching(query))

    def _summaries(self, sessions: QuerySet[Session]) -> list[GraphSessionSummary]:
        """Return summaries, with three queries for any number of sessions, messages and checkpoints."""
        messages = Message.objects.using(self.db.alias)
        last_message = messages.filter(session_id=OuterRef("pk"), sequence=OuterRef("message_count"))
        listed = sessions.annotate(last_message_id=Subquery(last_message.values("pk")))
        rows = {row["pk"]: row for row in listed.values("pk", "message_count", "last_message_id", *_COLUMNS)}
        counted = (
            Checkpoint.objects.using(self.db.alias)
            .filter(session_id__in=rows, kind=CheckpointKind.GRAPH)
            .order_by()
            .values_list("session_id")
            .annotate(Count("pk"))
        )
        checkpoint_counts = dict(counted)
        last_messages = messages.filter(pk__in=[row["last_message_id"] for row in rows.values()])
        last = {row["id"]: row for row in last_messages.values(*MESSAGE_COLUMNS)}
        return [
            GraphSessionSummary(
                session=read_session(row),
                message_count=row["message_count"],
                last_message=_message_of(row["session_id"], last.get(row["last_message_id"])),
                checkpoint_count=checkpoint_counts.get(key, 0),
            )
            for key, row in rows.items()
        ]

    def _matching(self, query: GraphSessionQuery) -> QuerySet[Session]:
        # The workspace index finds fewer sessions than the agent type index.
        is_of_workspace = isinstance(query.workspace_id, str)
        sessions = (
            Session.objects.using(self.db.alias)
            .alias(agent=NoIndexHint("agent_type") if is_of_workspace else F("agent_type"))
            .filter(tenant=tenant_parameter(self.db.tenant), agent=GRAPH_AGENT_TYPE)
        )
        if query.workspace_id is None:
            sessions = sessions.filter(workspace_id__isnull=True)
        elif not isinstance(query.workspace_id, Unset):
            sessions = sessions.filter(workspace_id=query.workspace_id)
        if query.text is not None:
            sessions = sessions.filter(
                Q(title__icontains=query.text)
                | Q(directory__icontains=query.text)
                | Q(session_id__icontains=query.text)
            )
        if query.after is not None:
            updated_at, session_id = query.after
            last = {"updated_at": updated_at, "session_id": session_id}
            sessions = sessions.filter(after_keyset(Session, last, descending=True))
        return sessions.order_by("-updated_at", "-session_id")[: query.limit]


def _message_of(session_id: str, row: Mapping[str, Any] | None) -> StoredMessage | None:
    return None if row is None else message_from(row, session_id)
