"""Graph sessions: create, change, list, search, sum up."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from django.utils import timezone

from helix_store.checkpointers.graph_calls import GraphCalls, workspace_filter
from helix_store.core import validation
from helix_store.core.graph import (
    GRAPH_AGENT_TYPE,
    GraphContinuation,
    GraphPage,
    GraphSession,
    GraphSessionSummary,
)
from helix_store.core.graph_payloads import encode_metadata
from helix_store.core.ids import new_id
from helix_store.core.requests import NewSession
from helix_store.core.session_state import encode_state
from helix_store.core.types import UNSET, SessionState, Unset
from helix_store.exceptions import InvalidQuery
from helix_store.stores.async_twins import async_twin
from helix_store.stores.cursors import read_cursor, write_cursor
from helix_store.stores.database.graph_sessions import GraphSessionQuery

__all__ = ["GraphSessionCalls"]


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
