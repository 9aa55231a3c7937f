"""An agent of Strands whose sessions are in the project's database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from strands import Agent, tool
from strands.models import Model
from strands.session import RepositorySessionManager

from helix_store.contrib.strands import DjangoSessionRepository

__all__ = ["ScriptedModel", "agent_of", "weather"]


@tool
def weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: the name of the city
    """
    return f"Sunny in {city}"


class ScriptedModel(Model):
    """A model that asks for the weather and repeats the tool's answer. A real agent has a real model here."""

    def update_config(self, **model_config: Any) -> None:
        """Do nothing, because a script has no settings."""

    def get_config(self) -> dict[str, Any]:
        return {"model_id": "scripted"}

    def structured_output(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def stream(self, messages: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        yield {"messageStart": {"role": "assistant"}}
        result = _tool_result(messages[-1])
        if result is None:
            use = {"toolUse": {"name": "weather", "toolUseId": f"call-{len(messages)}"}}
            yield {"contentBlockStart": {"start": use}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": '{"city": "Lisbon"}'}}}}
        else:
            yield {"contentBlockDelta": {"delta": {"text": f"{result}."}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if result is None else "end_turn"}}
        usage = {"inputTokens": 100 + len(messages), "outputTokens": 10, "totalTokens": 110 + len(messages)}
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


def _tool_result(message: Mapping[str, Any]) -> str | None:
    for block in message["content"]:
        if "toolResult" in block:
            return str(block["toolResult"]["content"][0]["text"])
    return None


def agent_of(session_id: str, repository: DjangoSessionRepository) -> Agent:
    """Return the agent of a session with its history, in any process."""
    manager = RepositorySessionManager(session_id=session_id, session_repository=repository)
    return Agent(
        agent_id="guide",
        model=ScriptedModel(),
        tools=[weather],
        session_manager=manager,
        callback_handler=None,
    )
