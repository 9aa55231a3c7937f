"""The base of the suite: `make_store`, the hooks that a back end may provide, and sample entries."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

import pytest

from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.usage import TokenCounts, UsageRollup
from helix_store.testing.base import SuiteTests

__all__ = ["EVERY_KIND", "NOON", "UsageTests", "custom", "rolled_up", "sub_agent", "tokens", "tool"]


class UsageTests(SuiteTests):
    """The base class of every part. A subclass provides both stores and, where it can, the other hooks."""

    def make_store(self, *, tenant: str = "") -> UsageStore:
        """Return a usage store to test. Stores of one test share their storage; tests share nothing."""
        raise NotImplementedError("Provide make_store() to run the suite.")

    def make_state_store(self, *, tenant: str = "") -> StateStore:
        """Return the state store of the sessions. It shares storage with `make_store` for the same tenant."""
        raise NotImplementedError("Provide make_state_store() to run the suite.")

    @pytest.fixture
    def usage(self, session_id: str) -> UsageStore:
        """Return a store without entries, which knows the session of `session_id`."""
        return self.make_store()

    @pytest.fixture
    def sessions(self) -> StateStore:
        return self.make_state_store()

    @pytest.fixture
    def session_id(self, sessions: StateStore) -> str:
        """Create the session ``session`` of the user ``user`` and agent type ``agent``, without entries."""
        return sessions.create_session("session", agent_type="agent", user_id="user").session_id


NOON: Final = 1_773_576_000_000
"""12:00:00 UTC on Sunday, 15 March 2026, in epoch milliseconds."""

_AGENT: Final = {"type": "agent", "name": "planner"}


def _entry(kind: str, session_id: str, own: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    shared = {"kind": kind, "session_id": session_id, "step_count": 1, "timestamp": NOON, "source": _AGENT}
    return {**shared, **own, **given}


def tokens(session_id: str = "session", model: str = "no-such-model", **given: Any) -> dict[str, Any]:
    """Return a token entry of a model that no price list knows. Counts are passed by name."""
    names = tuple(field.name for field in fields(TokenCounts))
    counts = {name: given.pop(name) for name in names if name in given}
    return _entry("tokens", session_id, {"model": model, "tokens": counts}, given)


def tool(session_id: str = "session", tool_name: str = "search", **given: Any) -> dict[str, Any]:
    own = {"tool_name": tool_name, "success": True, "duration_ms": 100}
    return _entry("tool", session_id, own, given)


def sub_agent(session_id: str = "session", agent_type: str = "helper", **given: Any) -> dict[str, Any]:
    own = {"agent_type": agent_type, "sub_session_id": "sub", "success": True, "duration_ms": 1_000}
    return _entry("subagent", session_id, own, given)


def custom(session_id: str = "session", name: str = "tavily", **given: Any) -> dict[str, Any]:
    return _entry("custom", session_id, {"type": "api_calls", "name": name, "amount": 1}, given)


EVERY_KIND: Final[list[dict[str, Any]]] = [
    tokens(model="gpt-4o", prompt=100, completion=50, total=150),
    tokens(id="ä/🚂 '; --", step_count=0, timestamp=0, run_id="run-1", cost_usd="0.000000000001"),
    tokens(prompt=1, completion=2, reasoning=3, cached=4, total=2**63 - 1, timestamp=253_402_300_799_999),
    tokens(prompt=9, completion=8, cache_write=5, audio_prompt=6, audio_completion=7, total=17),
    tokens(prompt=1, duration_ms=0),
    tokens(prompt=1, duration_ms=2**63 - 1),
    tool(success=True, duration_ms=0),
    tool(success=False, duration_ms=2**63 - 1, source={"type": "tool", "name": "search"}, cost_usd="1.5"),
    sub_agent(success=True, step_count=2**63 - 1),
    sub_agent(success=False, source={"type": "subagent", "name": "helper"}),
    custom(amount=0),
    custom(amount=2**53, unit="calls"),
    custom(amount=0.1, unit="", cost_usd="9223372.036854775807"),
    custom(amount=1e300, type="x" * 255, unit="y" * 255),
]
"""Every kind of entry, with the smallest and largest values that each field accepts."""


def rolled_up(usage: UsageStore, session_id: str = "session", *, tree: bool = False) -> UsageRollup:
    """Return the rollup of a session that must be known."""
    rollup = usage.get_rollup(session_id, include_sub_agents=tree)
    assert rollup is not None, f"the session {session_id!r} is unknown"
    return rollup
