"""Usage of agents, recorded while they run, and of recorded conversations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

from helix_store import Message, Step, Turn
from helix_store.core.contracts import UsageStore

__all__ = ["PRICED_AS", "Spending", "estimated_tokens", "recorded_entries"]

PRICED_AS: Final = "gpt-4o"
"""The model whose prices are used for scripts and recordings."""

_CHARACTERS_PER_TOKEN: Final = 4


def estimated_tokens(read: int, message: Message) -> dict[str, int]:
    """Estimate the tokens of an answer to ``read`` characters; a real model returns exact numbers."""
    prompt = read // _CHARACTERS_PER_TOKEN
    completion = len(json.dumps(message)) // _CHARACTERS_PER_TOKEN
    return {"prompt": prompt, "completion": completion, "total": prompt + completion}


@dataclass(frozen=True)
class Spending:
    """The usage of one step of an agent."""

    usage: UsageStore
    turn: Turn
    step: Step

    def tokens(self, tokens: Mapping[str, int]) -> None:
        """Record at once, not with the step like `Turn.tokens`, because a killed worker also used tokens."""
        self._record("tokens", self.step.id, model=PRICED_AS, tokens=dict(tokens))

    @contextmanager
    def tool(self, tool_name: str) -> Iterator[None]:
        """Record the duration of the tool call in the block, and whether it fails."""
        with _timed(partial(self.turn.tool, tool_name)):
            yield

    @contextmanager
    def sub_agent(self, agent_type: str, sub_session_id: str) -> Iterator[None]:
        """Record a sub-agent in the same way. Its tokens are recorded for its session."""
        own = {"agent_type": agent_type, "sub_session_id": sub_session_id}
        with _timed(partial(self._record_sub_agent, own)):
            yield

    def _record_sub_agent(self, own: dict[str, str], succeeded: bool, duration: timedelta) -> None:
        duration_ms = duration // timedelta(milliseconds=1)
        self._record("subagent", own["sub_session_id"], success=succeeded, duration_ms=duration_ms, **own)

    def _record(self, kind: str, name: str, **own: Any) -> None:
        # The id contains the run: the next worker records entries with other ids.
        run_id = self.step.run_id
        source = {"type": "agent", "name": self.step.state.agent_type}
        entry = _entry(kind, self.step.session.id, self.step.number, f"{run_id} {name}", source, own)
        self.usage.record_entry({**entry, "run_id": run_id})


@contextmanager
def _timed(record: Callable[[bool, timedelta], object]) -> Iterator[None]:
    started = time.monotonic()
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        record(succeeded, timedelta(seconds=time.monotonic() - started))


def recorded_entries(session_id: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the estimated usage of a recorded conversation: an entry for each answer and tool result. The
    ids are the messages' positions, so that they can be recorded again after an interrupted replay.
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
