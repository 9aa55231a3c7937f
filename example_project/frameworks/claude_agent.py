"""A session of Claude Agent SDK in the project's database.

With a real agent the SDK calls the store: ``ClaudeAgentOptions(session_store=store)``. It writes each entry
of its transcript to the store, and loads the transcript from there to resume a session on another machine.
Here entries are written as the SDK does, so that neither its program nor a network is needed.
"""

from __future__ import annotations

import uuid
from typing import Any

from claude_agent_sdk import SessionKey, SessionStore, project_key_for_directory

__all__ = ["DIRECTORY", "key_of", "talk"]

DIRECTORY = "/srv/app"
"""The directory in which the agent works. The SDK groups sessions by directory."""


def key_of(session_id: str) -> SessionKey:
    return {"project_key": project_key_for_directory(DIRECTORY), "session_id": session_id}


async def talk(store: SessionStore, session_id: str, prompt: str, answer: str) -> None:
    """Write one turn, as the SDK mirrors it."""
    key = key_of(session_id)
    known = await store.load(key) or []
    asked = _entry(session_id, "user", known[-1]["uuid"] if known else None, {"content": prompt})
    usage = {"input_tokens": 12, "cache_read_input_tokens": 100, "output_tokens": 8}
    reply = {
        "id": f"msg_{asked['uuid']}",
        "model": "claude-opus-4-6",
        "usage": usage,
        "content": [{"type": "text", "text": answer}],
    }
    await store.append(key, [asked, _entry(session_id, "assistant", asked["uuid"], reply)])


def _entry(session_id: str, role: str, parent: str | None, message: dict[str, Any]) -> Any:
    return {
        "type": role,
        "uuid": str(uuid.uuid4()),
        "parentUuid": parent,
        "sessionId": session_id,
        "cwd": DIRECTORY,
        "timestamp": "2026-11-20T10:00:00.000Z",
        "message": {"role": role, **message},
    }
