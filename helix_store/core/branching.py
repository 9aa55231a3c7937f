"""What a new session takes over from the one it branches off."""

from __future__ import annotations

from helix_store.core.payloads import copy_json
from helix_store.core.types import SessionState

__all__ = ["branched_state"]


def branched_state(source: SessionState, *, new_session_id: str, title: str | None = None) -> SessionState:
    """The state a branch starts with, sharing nothing with ``source``.

    The branch is active and at the top of a tree of its own. It keeps who and what the session is, its custom
    state and the client tool calls that were answered; a result, a failure, calls still open, a suspension,
    an expiry and workspace refs belong to the source alone. The store sets versions, counts and times.
    """
    return SessionState(
        session_id=new_session_id,
        agent_type=source.agent_type,
        step_count=source.step_count,
        mode=source.mode,
        custom_state=copy_json(source.custom_state),
        user_id=source.user_id,
        tags=list(source.tags),
        metadata={**source.metadata, "branched_from": source.session_id},
        title=source.title if title is None else title,
        workspace_id=source.workspace_id,
        directory=source.directory,
        root_session_id=new_session_id,
        stream_id=new_session_id,
        completed_client_tool_calls=copy_json(source.completed_client_tool_calls),
    )
