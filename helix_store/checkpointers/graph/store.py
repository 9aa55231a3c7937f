"""What the groups of calls of the graph store share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from django.utils import timezone

from helix_store import conf
from helix_store.checkpointers.graph.checkpoints import GraphCheckpoints
from helix_store.checkpointers.graph.forks import GraphForks
from helix_store.checkpointers.graph.messages import GraphMessages
from helix_store.checkpointers.graph.payloads import (
    CheckpointRequest,
    encode_checkpoint,
    encode_message,
    encode_messages,
    encode_metadata,
)
from helix_store.checkpointers.graph.sessions import GraphSessionQuery, GraphSessions
from helix_store.checkpointers.graph.types import (
    GRAPH_AGENT_TYPE,
    GraphCheckpoint,
    GraphContinuation,
    GraphPage,
    GraphSession,
    GraphSessionSummary,
    StoredMessage,
)
from helix_store.checkpointers.snapshots.rules import optional_count
from helix_store.core import validation
from helix_store.core.guards import guard
from helix_store.core.ids import new_id
from helix_store.core.limits import Limits
from helix_store.core.types import (
    UNSET,
    CheckpointSource,
    SessionState,
    Unset,
)
from helix_store.engine.async_twins import async_twin
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidQuery
from helix_store.sessions.layout import encode_state
from helix_store.sessions.requests import NewSession

__all__ = [
    "GraphCalls",
    "GraphCheckpointCalls",
    "GraphCheckpointStore",
    "GraphMessageCalls",
    "GraphSessionCalls",
    "namespace_filter",
    "workspace_filter",
]


class GraphCalls:
    """The verbs of one alias and tenant."""

    def __init__(self, db: Database) -> None:
        self._tenant = db.tenant
        self._sessions = GraphSessions(db)
        self._messages = GraphMessages(db)
        self._checkpoints = GraphCheckpoints(db)
        self._forks = GraphForks(db)

    @property
    def tenant(self) -> str:
        return self._tenant

    @property
    def limits(self) -> Limits:
        return conf.limits()


def workspace_filter(workspace_id: Any) -> str | Unset | None:
    """`UNSET` for every workspace, ``None`` for sessions without one; an empty id is a workspace like any."""
    if isinstance(workspace_id, Unset):
        return workspace_id
    return validation.optional_identifier(workspace_id, "workspace_id", empty=True)


def namespace_filter(namespace: Any) -> str | None:
    """``None`` for every namespace; the empty one is that of the outermost graph."""
    return validation.optional_identifier(namespace, "namespace", empty=True)


class GraphSessionCalls(GraphCalls):
    def create_session(
        self,
        directory: str,
        *,
        title: str | None = None,
        workspace_id: str | None = None,
        metadata: dict[Any, Any] | None = None,
        session_id: str | None = None,
    ) -> GraphSession:
        """Create a session; without an id it gets a new one.

        One transaction. ``metadata`` may hold typed values. Raises `SessionExists` for a taken id, and
        `InvalidPayload`.
        """
        chosen_id = new_id() if session_id is None else validation.identifier(session_id, "session_id")
        typed_metadata = encode_metadata(metadata, self.limits)
        state = SessionState(
            session_id=chosen_id,
            agent_type=GRAPH_AGENT_TYPE,
            title=title,
            workspace_id=workspace_id,
            directory=directory,
            root_session_id=chosen_id,
            stream_id=chosen_id,
        )
        new = NewSession(chosen_id, encode_state(state, self.limits))
        new.encoded.columns["typed_metadata"] = typed_metadata
        return self._sessions.create(new, at=timezone.now())

    def get_session(self, session_id: str) -> GraphSession | None:
        """A session, whichever face created it, or ``None``. One query."""
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
        """Replace what is given and return the session; ``None`` clears, a directory to the empty one.

        One transaction under the session's lock. Raises `SessionNotFound` and `InvalidPayload`.
        """
        validation.identifier(session_id, "session_id")
        columns: dict[str, Any] = {}
        if not isinstance(title, Unset):
            columns["title"] = validation.optional_text(title, "title")
        if not isinstance(metadata, Unset):
            columns["typed_metadata"] = encode_metadata(metadata, self.limits)
        if not isinstance(directory, Unset):
            columns["directory"] = validation.optional_text(directory, "directory") or ""
        if not isinstance(workspace_id, Unset):
            columns["workspace_id"] = workspace_filter(workspace_id)
        return self._sessions.update(session_id, columns)

    def delete_session(self, session_id: str) -> int:
        """Delete a session with everything that belongs to it; forks of it stay whole.

        Returns the number of sessions deleted with its local descendants, 0 if unknown. Safe to repeat.
        """
        return self._sessions.delete(validation.identifier(session_id, "session_id"))

    def list_sessions(
        self, workspace_id: str | Unset | None = UNSET, *, limit: int = 50, cursor: str | None = None
    ) -> GraphPage[GraphSession]:
        """Graph sessions, the one written last first. One query.

        An empty workspace id is a filter like any other, ``None`` means sessions without a workspace.
        ``limit`` is 1 to 200 (above means 200). Raises `InvalidQuery` and `InvalidCursor`.
        """
        query = GraphSessionQuery(workspace_id=workspace_filter(workspace_id))
        return self._page(query, limit, cursor)

    def search_sessions(
        self,
        text: str,
        workspace_id: str | Unset | None = UNSET,
        *,
        limit: int = 50,
        cursor: str | None = None,
    ) -> GraphPage[GraphSession]:
        """`list_sessions` of those whose title, directory or id contains a text, in either case.

        One query, which reads every session of the filter: titles have no index for it.
        """
        if not validation.text(text, "text"):
            raise InvalidQuery("The text to search for is empty; list_sessions lists all.", path="text")
        query = GraphSessionQuery(workspace_id=workspace_filter(workspace_id), text=text)
        return self._page(query, limit, cursor)

    def continue_latest(self, workspace_id: str | Unset | None = UNSET) -> GraphContinuation | None:
        """The graph session written last, with its messages and its latest checkpoint; three queries."""
        return self._sessions.latest(workspace_filter(workspace_id))

    def get_session_summary(self, session_id: str) -> GraphSessionSummary | None:
        """A session with its counts and its last message, or ``None``; three queries."""
        return self._sessions.summary(validation.identifier(session_id, "session_id"))

    def list_session_summaries(
        self, workspace_id: str | Unset | None = UNSET, *, limit: int = 50, cursor: str | None = None
    ) -> GraphPage[GraphSessionSummary]:
        """`list_sessions` with counts and last messages; three queries, however many sessions."""
        binding, query = self._bound(GraphSessionQuery(workspace_id=workspace_filter(workspace_id)), cursor)
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
        """What a cursor of this query is bound to, and the query that goes on from one."""
        binding = ["graph sessions", self.tenant, query.workspace_id, query.text]
        if cursor is None:
            return binding, query
        moment, session_id = read_cursor(cursor, query=binding)
        return binding, replace(query, after=(datetime.fromisoformat(moment), session_id))

    acreate_session = async_twin(create_session)
    aget_session = async_twin(get_session)
    aupdate_session = async_twin(update_session)
    adelete_session = async_twin(delete_session)
    alist_sessions = async_twin(list_sessions)
    asearch_sessions = async_twin(search_sessions)
    acontinue_latest = async_twin(continue_latest)
    aget_session_summary = async_twin(get_session_summary)
    alist_session_summaries = async_twin(list_session_summaries)


def _next_cursor(found: list[GraphSession], limit: int, binding: list[Any]) -> str | None:
    if len(found) <= limit:
        return None
    last = found[limit - 1]
    return write_cursor([last.updated_at.isoformat(), last.session_id], query=binding)


class GraphMessageCalls(GraphCalls):
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
        """Append a message and return it as it was stored.

        One transaction under the session's lock: ids increase in append order, and times do too. Tool calls
        and results may hold typed values. Raises `SessionNotFound`, `InvalidPayload`, `LimitExceeded` beyond
        ``max_message_bytes``, and `FencedOutError`. A repeat appends again.
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
        """Append messages in order, all or nothing; each is a dict of what `add_message` takes."""
        validation.identifier(session_id, "session_id")
        encoded = encode_messages(messages, self.limits)
        return self._messages.add(session_id, encoded, guard(fencing_token=fencing_token))

    def get_messages(
        self, session_id: str, *, before: int | datetime | None = None, limit: int | None = None
    ) -> list[StoredMessage]:
        """The newest ``limit`` messages before a message id or a time, oldest first; all without a limit.

        Give the id of a page's first message as ``before`` of the page before it. A message that cannot be
        read is there, and raises `IntegrityFault` when its content is asked for. Raises `SessionNotFound` and
        `InvalidQuery`.
        """
        validation.identifier(session_id, "session_id")
        return self._messages.page(
            session_id, before=_checked_before(before), limit=optional_count(limit, "limit")
        )

    aadd_message = async_twin(add_message)
    aadd_messages = async_twin(add_messages)
    aget_messages = async_twin(get_messages)


def _checked_before(before: int | datetime | None) -> int | datetime | None:
    if isinstance(before, datetime):
        return validation.aware_datetime(before, "before")
    if before is None:
        return None
    if type(before) is not int or not 0 <= before < 2**63:
        raise InvalidQuery("before must be a message id or an aware datetime.", path="before")
    return before


class GraphCheckpointCalls(GraphCalls):
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
        """Store what a graph has done so far and return the checkpoint as it was stored.

        One transaction under the session's lock. Without a ``version`` it takes the next free one of its
        namespace, so a graph may run and resume as often as it likes. ``node_results`` holds a dict with a
        ``status`` by node id; typed values are kept. It marks the session as just written and leaves its
        version alone. Raises `SessionNotFound`, `ConflictError` for a taken version, `CheckpointNotFound` for
        a parent that the session does not have, `InvalidPayload`, `LimitExceeded` and `FencedOutError`.
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
        """A checkpoint by its id alone, or ``None``. One query."""
        return self._checkpoints.get(validation.identifier(checkpoint_id, "checkpoint_id"))

    def get_latest_checkpoint(self, session_id: str, namespace: str | None = None) -> GraphCheckpoint | None:
        """The checkpoint of the highest version, in one namespace or in all, whatever its step. One query.

        ``None`` when there is none or the session is unknown. Of equal versions in several namespaces it is
        the one that was saved last.
        """
        validation.identifier(session_id, "session_id")
        return self._checkpoints.latest(session_id, namespace_filter(namespace))

    def list_checkpoints(
        self,
        session_id: str,
        *,
        namespace: str | None = None,
        limit: int = 20,
        cursor: str | None = None,
    ) -> GraphPage[GraphCheckpoint]:
        """Checkpoints, the highest version first: the first one is the latest. One query.

        ``namespace=None`` means all of them, the empty one is that of the outermost graph. ``limit`` is 1 to
        200 (above means 200). A checkpoint that cannot be read is there, and raises `IntegrityFault` when one
        of its typed values is asked for. Raises `SessionNotFound`, `InvalidQuery` and `InvalidCursor`.
        """
        validation.identifier(session_id, "session_id")
        chosen = namespace_filter(namespace)
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

        It has the messages that the session had at the checkpoint, with their times, and a copy of the
        checkpoint whose parent is the original and whose source is ``fork``. With history it also has every
        checkpoint that was saved before, in all namespaces, less later versions of the checkpoint's own.
        One transaction, six statements whatever the history's length. Deleting the original leaves a fork
        whole. Raises `CheckpointNotFound`. A repeat makes another fork.
        """
        return self._forks.fork(
            validation.identifier(checkpoint_id, "checkpoint_id"),
            new_session_id=new_id(),
            title=validation.optional_text(title, "title"),
            with_history=bool(with_history),
        )

    asave_checkpoint = async_twin(save_checkpoint)
    aget_checkpoint = async_twin(get_checkpoint)
    aget_latest_checkpoint = async_twin(get_latest_checkpoint)
    alist_checkpoints = async_twin(list_checkpoints)
    afork = async_twin(fork)


class GraphCheckpointStore(GraphSessionCalls, GraphMessageCalls, GraphCheckpointCalls):
    """Sessions, messages and checkpoints of graph runtimes in a Django database.

    One checkpoint per wave of nodes, a namespace per sub-graph, forks. Its sessions are sessions like any
    other, of agent type ``graph``: a state store loads them, and this store finds other sessions by their id.
    Source: the graph checkpoint store document.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        super().__init__(Database(using, validation.tenant(tenant), None))
