"""Usage of agents, recorded while they run, and of recorded conversations.

An entry is recorded at once and not with its step, because the tokens of a killed worker are used too. Its id
contains the run id: the next worker records entries with other ids, and a repeat records nothing twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from helix_store.core.types import Message, StepInfo
from helix_store.stores import DatabaseUsageStore

__all__ = ["PRICED_AS", "Spending", "estimated_tokens", "recorded_entries"]

PRICED_AS: Final = "gpt-4o"
"""The model whose prices are used for scripts and recordings."""

_CHARACTERS_PER_TOKEN: Final = 4


def estimated_tokens(read: int, message: Message) -> dict[str, int]:
    """Estimated tokens of an answer to ``read`` characters; a real model returns the exact numbers."""
    prompt = read // _CHARACTERS_PER_TOKEN
    completion = len(json.dumps(message)) // _CHARACTERS_PER_TOKEN
    return {"prompt": prompt, "completion": completion, "total": prompt + completion}


@dataclass(frozen=True)
class Spending:
    """Records the usage of one run."""

    usage: DatabaseUsageStore
    session_id: str
    run_id: str
    agent_type: str

    def tokens(self, step: StepInfo, tokens: Mapping[str, int]) -> None:
        own = {"model": PRICED_AS, "tokens": dict(tokens)}
        self._record("tokens", step, f"{self.run_id} {step.step_id}", own)

    @contextmanager
    def tool(self, step: StepInfo, tool_call_id: str, tool_name: str) -> Iterator[None]:
        """Record the duration of the tool call in the block, and whether it fails."""
        with self._timed("tool", step, f"{self.run_id} {tool_call_id}", {"tool_name": tool_name}):
            yield

    @contextmanager
    def sub_agent(self, step: StepInfo, agent_type: str, sub_session_id: str) -> Iterator[None]:
        """The same for a sub-agent. Its tokens are recorded for its session."""
        own = {"agent_type": agent_type, "sub_session_id": sub_session_id}
        with self._timed("subagent", step, f"{self.run_id} {sub_session_id}", own):
            yield

    @contextmanager
    def _timed(self, kind: str, step: StepInfo, entry_id: str, own: dict[str, Any]) -> Iterator[None]:
        started = time.monotonic()
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            duration_ms = round((time.monotonic() - started) * 1_000)
            self._record(kind, step, entry_id, {**own, "success": succeeded, "duration_ms": duration_ms})

    def _record(self, kind: str, step: StepInfo, entry_id: str, own: dict[str, Any]) -> None:
        source = {"type": "agent", "name": self.agent_type}
        entry = _entry(kind, self.session_id, step.step_count, entry_id, source, own)
        self.usage.record_entry({**entry, "run_id": self.run_id})


def recorded_entries(session_id: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What a recorded conversation spent, by estimate: an entry for each answer and each tool result.

    The ids are the messages' places, so that they can be recorded again after a replay that was stopped.
    """
    entries = []
    read = turn = 0
    for number, message in enumerate(messages):
        entry_id = f"{session_id} message-{number}"
        if message["role"] == "assistant":
            turn += 1
            source = {"type": "agent", "name": "recorded"}
            own: dict[str, Any] = {"model": PRICED_AS, "tokens": estimated_tokens(read, message)}
            entries.append(_entry("tokens", session_id, turn, entry_id, source, own))
        elif message["role"] == "tool" and message.get("name"):
            failed = str(message.get("content")).startswith("Error")
            own = {"tool_name": message["name"], "success": not failed, "duration_ms": 0}
            source = {"type": "tool", "name": message["name"]}
            entries.append(_entry("tool", session_id, turn, entry_id, source, own))
        read += len(json.dumps(message))
    return entries


def _entry(
    kind: str, session_id: str, step_count: int, entry_id: str, source: dict[str, str], own: dict[str, Any]
) -> dict[str, Any]:
    return {
        "kind": kind,
        "session_id": session_id,
        "step_count": step_count,
        "timestamp": time.time_ns() // 1_000_000,
        "source": source,
        "id": entry_id,
        **own,
    }
