"""The argument of a command that selects an open call of a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandError

from helix_store.exceptions import SessionNotFound
from helix_store.management.base import PROBLEMS_FOUND, USAGE
from helix_store.management.text import visible
from helix_store.sessions.tool_calls import ToolCalls
from helix_store.stores import DatabaseStateStore

__all__ = ["chosen_call"]


def chosen_call(store: DatabaseStateStore, session_id: str, text: str | None) -> tuple[str, str | None]:
    """Return the id and approval id of the call that ``text`` selects: by its id, or by the start of its id.

    ``None`` selects the only open call. If the session does not own the call, only its id is known.
    """
    state = store.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    calls = ToolCalls(state.pending_client_tool_calls, state.completed_client_tool_calls)
    open_calls = calls.unanswered
    if text is not None and (text in calls.pending or text in calls.completed):
        return text, _approval_id(calls.pending.get(text))
    matches = [call_id for call_id in open_calls if call_id.startswith(text or "")]
    if len(matches) == 1:
        return matches[0], _approval_id(open_calls[matches[0]])
    if matches:
        named = ", ".join(
            f"{visible(call_id)} ({visible(str(open_calls[call_id].get('tool_name')))})"
            for call_id in matches
        )
        raise CommandError(
            f"The session waits for {len(matches)} answers: {named}. Name one with --call.", returncode=USAGE
        )
    if text is None:
        raise CommandError(
            f"The session {visible(session_id)} is not waiting for an answer.", returncode=PROBLEMS_FOUND
        )
    return text, None


def _approval_id(call: Any) -> str | None:
    found = call.get("approval_id") if isinstance(call, Mapping) else None
    return found if isinstance(found, str) else None
