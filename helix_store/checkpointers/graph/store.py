"""The graph checkpoint store, with its calls for sessions. Lists of sessions never read a history."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, TypeVar

from django.db.models import Count, F, OuterRef, Q, QuerySet, Subquery

from helix_store import conf
from helix_store.checkpointers.graph.checkpoints import GraphCheckpoints, latest_checkpoint
from helix_store.checkpointers.graph.messages import MESSAGE_COLUMNS, GraphMessages, newest_messages
from helix_store.checkpointers.graph.payloads import (
    SESSION_COLUMNS,
    created_session,
    encode_metadata,
    new_session,
    read_message,
    read_session,
)
from helix_store.checkpointers.graph.types import (
    GRAPH_AGENT_TYPE,
    GraphContinuation,
    GraphPage,
    GraphSession,
    GraphSessionSummary,
)
from helix_store.core import moments, validation
from helix_store.core.ids import new_id
from helix_store.core.limits import MAX_TITLE_BYTES, Limits
from helix_store.core.types import UNSET, Unset
from helix_store.engine.async_twins import async_twin
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.engine.database import Database
from helix_store.engine.expressions import NoIndexHint, after_keyset, tenant_parameter
from helix_store.exceptions import InvalidQuery
from helix_store.models import Checkpoint, CheckpointKind, Message, Session
from helix_store.sessions.database.locking import advance, lock_session
from helix_store.sessions.database.rows import first_row, session_with_id
from helix_store.sessions.database.sessions import insert_session
from helix_store.sessions.database.trees import delete_tree

Listed = TypeVar("Listed", GraphSession, GraphSessionSummary)


class GraphCheckpointStore(GraphMessages, GraphCheckpoints):
    """Sessions, messages and checkpoints of graph runtimes in a Django database, with a checkpoint per wave
    of nodes, a namespace per sub-graph, and forks. Its sessions are sessions of agent type ``graph``: a state
    store loads them, and this store finds the sessions of a state store by their id. Source: the graph
    checkpoint store document.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        super().__init__(Database(using, validation.tenant(tenant)))
        self.tenant: Final = self.db.tenant

    @property
    def limits(self) -> Limits:
        return conf.limits()

    def create_session(
        self,
        directory: str,
        *,
        title: str | None = None,
        workspace_id: str | None = None,
        metadata: dict[Any, Any] | None = None,
        session_id: str | None = None,
    ) -> GraphSession:
        """Create a session, by default with a new id.

        One transaction. ``metadata`` may contain typed values. Raises `SessionExists` for an id in use, and
        `InvalidPayload`. A repeat with the same id raises `SessionExists`.
        """
        chosen_id = new_id() if session_id is None else validation.identifier(session_id, "session_id")
        new = new_session(
            chosen_id,
            directory=directory,
            title=title,
            workspace_id=workspace_id,
            metadata=metadata,
            limits=conf.limits(),
        )
        at = moments.now()
        self.db.transaction(lambda: insert_session(self.db, new, root_session_id=chosen_id, at=at))
        return created_session(new, at)

    def get_session(self, session_id: str) -> GraphSession | None:
        """Return a session of any agent type, or ``None``. One query.

        Raises `IntegrityFault` if its metadata cannot be read.
        """
        found = session_with_id(self.db, validation.identifier(session_id, "session_id"))
        row = self.db.query(lambda: first_row(found.values(*SESSION_COLUMNS)))
        return None if row is None else read_session(row).readable()

    def update_session(
        self,
        session_id: str,
        *,
        title: str | Unset | None = UNSET,
        metadata: dict[Any, Any] | Unset | None = UNSET,
        directory: str | Unset | None = UNSET,
        workspace_id: str | Unset | None = UNSET,
    ) -> GraphSession:
        """Replace the given fields and return the session; ``None`` clears a field (the directory: ``""``).

        One transaction under the session's lock. Raises `SessionNotFound` and `InvalidPayload`. Safe to
        repeat.
        """
        validation.identifier(session_id, "session_id")
        columns: dict[str, Any] = {}
        if not isinstance(title, Unset):
            columns["title"] = validation.title(title)
        if not isinstance(metadata, Unset):
            columns["typed_metadata"] = encode_metadata(metadata, conf.limits())
        if not isinstance(directory, Unset):
            columns["directory"] = "" if directory is None else validation.directory(directory)
        if not isinstance(workspace_id, Unset):
            columns["workspace_id"] = _workspace_filter(workspace_id)

        def update() -> GraphSession:
            head = lock_session(self.db, session_id)
            if columns:
                advance(self.db, head, **columns)
            return read_session(session_with_id(self.db, session_id).values(*SESSION_COLUMNS).get())

        return self.db.transaction(update)

    def delete_session(self, session_id: str) -> int:
        """Delete a session with its rows in all tables and its local descendants; its forks stay complete.

        One transaction. Returns the number of deleted sessions, 0 for an unknown id. Safe to repeat.
        """
        validation.identifier(session_id, "session_id")
        return self.db.transaction(lambda: delete_tree(self.db, session_id, keep_usage=False))

    def list_sessions(
        self, workspace_id: str | Unset | None = UNSET, *, limit: int = 50, cursor: str | None = None
    ) -> GraphPage[GraphSession]:
        """List graph sessions, the most recently written first. One query.

        An empty workspace id is also a filter; ``None`` means sessions without a workspace. ``limit`` is 1 to
        200; larger values mean 200. Raises `InvalidQuery` and `InvalidCursor`.
        """
        return self._page(self._sessions, workspace_id, limit, cursor)

    def search_sessions(
        self,
        text: str,
        workspace_id: str | Unset | None = UNSET,
        *,
        limit: int = 50,
        cursor: str | None = None,
    ) -> GraphPage[GraphSession]:
        """List sessions that contain a string in their title, directory or id, ignoring case. One query,
        which reads all graph sessions of the tenant or the workspace, because no index contains the text.
        """
        if not validation.text(text, "text", limit=MAX_TITLE_BYTES):
            raise InvalidQuery("The text to search for is empty; list_sessions lists all.", path="text")
        return self._page(self._sessions, workspace_id, limit, cursor, text=text)

    def continue_latest(self, workspace_id: str | Unset | None = UNSET) -> GraphContinuation | None:
        """Return the graph session written last, with its messages and its latest checkpoint, or ``None``.

        Three queries.
        """
        newest = self._matching(_workspace_filter(workspace_id))

        def read() -> GraphContinuation | None:
            row = first_row(newest.values(*SESSION_COLUMNS))
            if row is None:
                return None
            return GraphContinuation(
                session=read_session(row).readable(),
                messages=newest_messages(self.db, row["session_id"]),
                checkpoint=latest_checkpoint(self.db, row["session_id"]),
            )

        return self.db.query(read)

    def get_session_summary(self, session_id: str) -> GraphSessionSummary | None:
        """Return a session with its counts and its last message, or ``None``. Three queries."""
        found = session_with_id(self.db, validation.identifier(session_id, "session_id"))
        return next(iter(self.db.query(lambda: self._summaries(found))), None)

    def list_session_summaries(
        self, workspace_id: str | Unset | None = UNSET, *, limit: int = 50, cursor: str | None = None
    ) -> GraphPage[GraphSessionSummary]:
        """List sessions with counts and last messages. Three queries for a page of any size."""
        return self._page(self._summaries, workspace_id, limit, cursor)

    acreate_session = async_twin(create_session)
    aget_session = async_twin(get_session)
    aupdate_session = async_twin(update_session)
    adelete_session = async_twin(delete_session)
    alist_sessions = async_twin(list_sessions)
    asearch_sessions = async_twin(search_sessions)
    acontinue_latest = async_twin(continue_latest)
    aget_session_summary = async_twin(get_session_summary)
    alist_session_summaries = async_twin(list_session_summaries)

    def _page(
        self,
        read: Callable[[QuerySet[Session]], list[Listed]],
        workspace_id: str | Unset | None,
        limit: int,
        cursor: str | None,
        *,
        text: str | None = None,
    ) -> GraphPage[Listed]:
        """Return a page of sessions in the form that ``read`` returns, the most recently written first."""
        workspace_id = _workspace_filter(workspace_id)
        sessions = self._matching(workspace_id, text)
        binding = ["graph sessions", self.db.tenant, workspace_id, text]
        if cursor is not None:
            updated_at, session_id = read_cursor(cursor, query=binding)
            position = {"updated_at": datetime.fromisoformat(updated_at), "session_id": session_id}
            sessions = sessions.filter(after_keyset(Session, position, descending=True))
        limit = validation.page_limit(limit)
        found = self.db.query(lambda: read(sessions[: limit + 1]))
        next_cursor = None
        if len(found) > limit:
            item = found[limit - 1]
            last = item.session if isinstance(item, GraphSessionSummary) else item
            next_cursor = write_cursor([last.updated_at.isoformat(), last.session_id], query=binding)
        return GraphPage(items=found[:limit], next_cursor=next_cursor)

    def _sessions(self, sessions: QuerySet[Session]) -> list[GraphSession]:
        return [read_session(row) for row in sessions.values(*SESSION_COLUMNS)]

    def _summaries(self, sessions: QuerySet[Session]) -> list[GraphSessionSummary]:
        """Return summaries, with three queries for any number of sessions, messages and checkpoints."""
        messages = Message.objects.using(self.db.alias)
        last_message = messages.filter(session_id=OuterRef("pk"), sequence=OuterRef("message_count"))
        listed = sessions.annotate(last_message_id=Subquery(last_message.values("pk")))
        rows = {
            row["pk"]: row
            for row in listed.values("pk", "message_count", "last_message_id", *SESSION_COLUMNS)
        }
        counted = (
            Checkpoint.objects.using(self.db.alias)
            .filter(session_id__in=rows, kind=CheckpointKind.GRAPH)
            .order_by()
            .values_list("session_id")
            .annotate(Count("pk"))
        )
        checkpoint_counts = dict(counted)
        last_messages = messages.filter(pk__in=[row["last_message_id"] for row in rows.values()])
        last = {
            row["session_id"]: read_message(row, rows[row["session_id"]]["session_id"])
            for row in last_messages.values("session_id", *MESSAGE_COLUMNS)
        }
        return [
            GraphSessionSummary(
                session=read_session(row),
                message_count=row["message_count"],
                last_message=last.get(key),
                checkpoint_count=checkpoint_counts.get(key, 0),
            )
            for key, row in rows.items()
        ]

    def _matching(self, workspace_id: str | Unset | None, text: str | None = None) -> QuerySet[Session]:
        # The workspace index finds fewer sessions than the agent type index.
        is_of_workspace = isinstance(workspace_id, str)
        sessions = (
            Session.objects.using(self.db.alias)
            .alias(agent=NoIndexHint("agent_type") if is_of_workspace else F("agent_type"))
            .filter(tenant=tenant_parameter(self.db.tenant), agent=GRAPH_AGENT_TYPE)
        )
        if workspace_id is None:
            sessions = sessions.filter(workspace_id__isnull=True)
        elif not isinstance(workspace_id, Unset):
            sessions = sessions.filter(workspace_id=workspace_id)
        if text is not None:
            sessions = sessions.filter(
                Q(title__icontains=text) | Q(directory__icontains=text) | Q(session_id__icontains=text)
            )
        return sessions.order_by("-updated_at", "-session_id")


def _workspace_filter(workspace_id: Any) -> str | Unset | None:
    """Check a filter: `UNSET` for all workspaces, ``None`` for sessions without one, or an id, even empty."""
    if isinstance(workspace_id, Unset):
        return workspace_id
    return validation.optional_identifier(workspace_id, "workspace_id", empty=True)
