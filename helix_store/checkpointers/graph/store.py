"""The graph checkpoint store: sessions, messages and checkpoints of graph runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from helix_store import conf
from helix_store.checkpointers.graph.checkpoints import GraphCheckpoints
from helix_store.checkpointers.graph.messages import GraphMessages
from helix_store.checkpointers.graph.payloads import (
    CheckpointRequest,
    encode_checkpoint,
    encode_message,
    encode_messages,
    encode_metadata,
    new_session,
)
from helix_store.checkpointers.graph.sessions import GraphSessionQuery, GraphSessions
from helix_store.checkpointers.graph.types import (
    GraphCheckpoint,
    GraphContinuation,
    GraphPage,
    GraphSession,
    GraphSessionSummary,
    StoredMessage,
)
from helix_store.checkpointers.snapshots.rules import optional_count
from helix_store.core import moments, validation
from helix_store.core.guards import guard
from helix_store.core.ids import new_id
from helix_store.core.limits import MAX_BIGINT, MAX_TITLE_BYTES, Limits
from helix_store.core.types import (
    UNSET,
    CheckpointSource,
    Unset,
)
from helix_store.engine.async_twins import async_twin
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery

__all__ = ["GraphCheckpointStore"]


class GraphCheckpointStore:
    """Sessions, messages and checkpoints of graph runtimes in a Django database, with a checkpoint per wave
    of nodes, a namespace per sub-graph, and forks. Its sessions are sessions of agent type ``graph``: a state
    store loads them, and this store finds the sessions of a state store by their id. Source: the graph
    checkpoint store document.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant))
        self._tenant = db.tenant
        self._sessions = GraphSessions(db)
        self._messages = GraphMessages(db)
        self._checkpoints = GraphCheckpoints(db)

    @property
    def tenant(self) -> str:
        return self._tenant

    @property
    def limits(self) -> Limits:
        return conf.limits()

    # Sessions

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
            limits=self.limits,
        )
        return self._sessions.create(new, at=moments.now())

    def get_session(self, session_id: str) -> GraphSession | None:
        """Return a session of any agent type, or ``None``. One query.

        Raises `IntegrityFault` if its metadata cannot be read.
        """
        return self._sessions.get(validation.identifier(session_id, "session_id"))

    def update_session(
        self,
        session_id: str,
        *,
        title: str | Unset | None = UNSET,
        metadata: dict[Any, Any] | Unset | None = UNSET,
        directory: str | Unset | None = UNSET,
        workspace_id: str | Unset | None = UNSET,
    ) -> GraphSession:
        """Replace the given fields and return the session; ``None`` clears a field, the directory to ``""``.

        One transaction under the session's lock. Raises `SessionNotFound` and `InvalidPayload`. Safe to
        repeat.
        """
        validation.identifier(session_id, "session_id")
        columns: dict[str, Any] = {}
        if not isinstance(title, Unset):
            columns["title"] = validation.title(title)
        if not isinstance(metadata, Unset):
            columns["typed_metadata"] = encode_metadata(metadata, self.limits)
        if not isinstance(directory, Unset):
            columns["directory"] = "" if directory is None else validation.directory(directory)
        if not isinstance(workspace_id, Unset):
            columns["workspace_id"] = _workspace_filter(workspace_id)
        return self._sessions.update(session_id, columns)

    def delete_session(self, session_id: str) -> int:
        """Delete a session with its rows in all tables and its local descendants; its forks stay complete.

        One transaction. Returns the number of deleted sessions, 0 for an unknown id. Safe to repeat.
        """
        return self._sessions.delete(validation.identifier(session_id, "session_id"))

    def list_sessions(
        self, workspace_id: str | Unset | None = UNSET, *, limit: int = 50, cursor: str | None = None
    ) -> GraphPage[GraphSession]:
        """List graph sessions, the most recently written first. One query.

        An empty workspace id is also a filter; ``None`` means sessions without a workspace. ``limit`` is 1 to
        200 (above means 200). Raises `InvalidQuery` and `InvalidCursor`.
        """
        query = GraphSessionQuery(workspace_id=_workspace_filter(workspace_id))
        return self._page(query, limit, cursor)

    def search_sessions(
        self,
        text: str,
        workspace_id: str | Unset | None = UNSET,
        *,
        limit: int = 50,
        cursor: str | None = None,
    ) -> GraphPage[GraphSession]:
        """List sessions with a text in title, directory or id, ignoring case. One query, which reads all
        graph sessions of the tenant or the workspace, because no index contains the text.
        """
        if not validation.text(text, "text", limit=MAX_TITLE_BYTES):
            raise InvalidQuery("The text to search for is empty; list_sessions lists all.", path="text")
        query = GraphSessionQuery(workspace_id=_workspace_filter(workspace_id), text=text)
        return self._page(query, limit, cursor)

    def continue_latest(self, workspace_id: str | Unset | None = UNSET) -> GraphContinuation | None:
        """Return the graph session written last, with its messages and its latest checkpoint, or ``None``.

        Three queries.
        """
        return self._sessions.latest(_workspace_filter(workspace_id))

    def get_session_summary(self, session_id: str) -> GraphSessionSummary | None:
        """Return a session with its counts and its last message, or ``None``. Three queries."""
        return self._sessions.summary(validation.identifier(session_id, "session_id"))

    def list_session_summaries(
        self, workspace_id: str | Unset | None = UNSET, *, limit: int = 50, cursor: str | None = None
    ) -> GraphPage[GraphSessionSummary]:
        """List sessions with counts and last messages. Three queries for a page of any size."""
        binding, query = self._bound(GraphSessionQuery(workspace_id=_workspace_filter(workspace_id)), cursor)
        limit = validation.page_limit(limit)
        found = self._sessions.summaries(replace(query, limit=limit + 1))
        sessions = [summary.session for summary in found]
        return GraphPage(items=found[:limit], next_cursor=_next_cursor(sessions, limit, binding))

    def _page(self, query: GraphSessionQuery, limit: int, cursor: str | None) -> GraphPage[GraphSession]:
        binding, query = self._bound(query, cursor)
        limit = validation.page_limit(limit)
        found = self._sessions.select(replace(query, limit=limit + 1))
        return GraphPage(items=found[:limit], next_cursor=_next_cursor(found, limit, binding))

    def _bound(self, query: GraphSessionQuery, cursor: str | None) -> tuple[list[Any], GraphSessionQuery]:
        """Return the binding of the query's cursors, and the query of the page after ``cursor``."""
        binding = ["graph sessions", self.tenant, query.workspace_id, query.text]
        if cursor is None:
            return binding, query
        updated_at, session_id = read_cursor(cursor, query=binding)
        return binding, replace(query, after=(datetime.fromisoformat(updated_at), session_id))

    acreate_session = async_twin(create_session)
    aget_session = async_twin(get_session)
    aupdate_session = async_twin(update_session)
    adelete_session = async_twin(delete_session)
    alist_sessions = async_twin(list_sessions)
    asearch_sessions = async_twin(search_sessions)
    acontinue_latest = async_twin(continue_latest)
    aget_session_summary = async_twin(get_session_summary)
    alist_session_summaries = async_twin(list_session_summaries)

    # Messages

    def add_message(
        self,
        session_id: str,
        *,
        role: str,
        content: str | None = None,
        tool_calls: Any = None,
        tool_results: Any = None,
        tokens_in: int | None = None,
        tokens_out: int | None = None,
        fencing_token: int | None = None,
    ) -> StoredMessage:
        """Append a message and return the stored one.

        One transaction under the session's lock: ids and times increase in append order. Tool calls and
        results may contain typed values. Raises `SessionNotFound`, `InvalidPayload`, `LimitExceeded` beyond
        ``max_message_bytes``, and `FencedOutError`. A repeat appends a second message.
        """
        validation.identifier(session_id, "session_id")
        message = {
            "role": role,
            "content": content,
            "tool_calls": tool_calls,
            "tool_results": tool_results,
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
        }
        encoded = encode_message(message, self.limits)
        return self._messages.add(session_id, [encoded], guard(fencing_token=fencing_token))[0]

    def add_messages(
        self, session_id: str, messages: Sequence[Mapping[str, Any]], *, fencing_token: int | None = None
    ) -> list[StoredMessage]:
        """Append messages in order, all or none; each is a dict of the arguments of `add_message`.

        One transaction; errors and repeats are the same as for `add_message`.
        """
        validation.identifier(session_id, "session_id")
        encoded = encode_messages(messages, self.limits)
        return self._messages.add(session_id, encoded, guard(fencing_token=fencing_token))

    def get_messages(
        self, session_id: str, *, before: int | datetime | None = None, limit: int | None = None
    ) -> list[StoredMessage]:
        """Return the newest ``limit`` messages before a message id or a time, oldest first; by default all.

        ``before`` of the previous page is the id of the first message of this one. A message that cannot be
        read is in the list, and raises `IntegrityFault` when its content is read. Raises `SessionNotFound`
        and `InvalidQuery`.
        """
        validation.identifier(session_id, "session_id")
        return self._messages.page(
            session_id, before=_checked_before(before), limit=optional_count(limit, "limit")
        )

    aadd_message = async_twin(add_message)
    aadd_messages = async_twin(add_messages)
    aget_messages = async_twin(get_messages)

    # Checkpoints

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

        One transaction under the session's lock. Without a ``version`` it takes the next free one of its
        namespace, so a graph may run and resume any number of times. ``node_results`` has a dict with a
        ``status`` for each node id; typed values are kept. It updates the session's ``updated_at`` and does
        not change its version. Raises `SessionNotFound`, `ConflictError` for a version in use,
        `CheckpointNotFound` for a parent that is not in the session, `InvalidPayload`, `LimitExceeded` and
        `FencedOutError`. A repeat without a version stores a second checkpoint.
        """
        validation.identifier(session_id, "session_id")
        if version is not None:
            validation.whole_number(version, "version", minimum=1)
        request = CheckpointRequest(
            session_id=session_id,
            namespace=validation.tenant(namespace, "namespace"),
            version=version,
            step=validation.whole_number(step, "step"),
            node_id=validation.optional_identifier(node_id, "node_id"),
            payload=encode_checkpoint(
                node_results=node_results,
                pending_nodes=pending_nodes,
                cycle_state=cycle_state,
                limits=self.limits,
            ),
            source=validation.enum(CheckpointSource, source, "source"),
            parent_id=validation.optional_identifier(parent_id, "parent_id"),
            guard=guard(fencing_token=fencing_token),
        )
        return self._checkpoints.save(request)

    def get_checkpoint(self, checkpoint_id: str) -> GraphCheckpoint | None:
        """Return a checkpoint by its id alone, or ``None``. One query.

        Raises `IntegrityFault` if it cannot be read.
        """
        return self._checkpoints.get(validation.identifier(checkpoint_id, "checkpoint_id"))

    def get_latest_checkpoint(self, session_id: str, namespace: str | None = None) -> GraphCheckpoint | None:
        """Return the checkpoint with the highest version, in one namespace or in all, or ``None``. One query.

        Its step may be lower than another checkpoint's step. If versions in several namespaces are equal, it
        is the one that was saved last.
        """
        validation.identifier(session_id, "session_id")
        return self._checkpoints.latest(session_id, _namespace_filter(namespace))

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
        chosen = _namespace_filter(namespace)
        binding = ["graph checkpoints", self.tenant, session_id, chosen]
        after = None
        if cursor is not None:
            version, key = read_cursor(cursor, query=binding)
            after = (version, key)
        items, following = self._checkpoints.select(
            session_id, namespace=chosen, limit=validation.page_limit(limit), after=after
        )
        next_cursor = None if following is None else write_cursor(list(following), query=binding)
        return GraphPage(items=items, next_cursor=next_cursor)

    def fork(
        self, checkpoint_id: str, *, title: str | None = None, with_history: bool = False
    ) -> GraphSession:
        """Start a new session from a checkpoint and return it.

        The fork has the messages up to the checkpoint, with their times, and a copy of the checkpoint with
        the original as its parent and ``fork`` as its source. ``with_history=True`` also copies the
        checkpoints that were saved before it, in all namespaces, except later versions of its own namespace.
        One transaction under the session's lock, six statements for a history of any length. A fork stays
        complete when the original is deleted. Raises `CheckpointNotFound`. A repeat makes a second fork.
        """
        return self._checkpoints.fork(
            validation.identifier(checkpoint_id, "checkpoint_id"),
            new_session_id=new_id(),
            title=validation.title(title),
            with_history=bool(with_history),
        )

    asave_checkpoint = async_twin(save_checkpoint)
    aget_checkpoint = async_twin(get_checkpoint)
    aget_latest_checkpoint = async_twin(get_latest_checkpoint)
    alist_checkpoints = async_twin(list_checkpoints)
    afork = async_twin(fork)


def _workspace_filter(workspace_id: Any) -> str | Unset | None:
    """Check a filter: `UNSET` for all workspaces, ``None`` for sessions without one, or an id, even empty."""
    if isinstance(workspace_id, Unset):
        return workspace_id
    return validation.optional_identifier(workspace_id, "workspace_id", empty=True)


def _namespace_filter(namespace: Any) -> str | None:
    """Check a filter: ``None`` for all namespaces; the empty one belongs to the outermost graph."""
    return validation.optional_identifier(namespace, "namespace", empty=True)


def _next_cursor(found: list[GraphSession], limit: int, binding: list[Any]) -> str | None:
    if len(found) <= limit:
        return None
    last = found[limit - 1]
    return write_cursor([last.updated_at.isoformat(), last.session_id], query=binding)


def _checked_before(before: int | datetime | None) -> int | datetime | None:
    if isinstance(before, datetime):
        return validation.aware_datetime(before, "before")
    if before is None:
        return None
    if type(before) is not int or not 0 <= before <= MAX_BIGINT:
        raise InvalidQuery("before must be a message id or an aware datetime.", path="before")
    return before
