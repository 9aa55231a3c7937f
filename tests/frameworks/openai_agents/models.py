"""A model without a network, and agents that use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, ModelResponse, function_tool
from agents.items import TResponseStreamEvent
from agents.models.interface import Model
from agents.usage import Usage
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

__all__ = ["ScriptedModel", "approving_agent", "call", "talking_agent", "text"]


def text(words: str) -> ResponseOutputMessage:
    part = ResponseOutputText(text=words, type="output_text", annotations=[], logprobs=[])
    return ResponseOutputMessage(
        id="message", type="message", role="assistant", content=[part], status="completed"
    )


def call(name: str, arguments: str = "{}") -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        id="call", call_id="call-1", type="function_call", name=name, arguments=arguments
    )


class ScriptedModel(Model):
    """Answers with one output after the other, and remembers what it was asked."""

    model = "scripted-1"

    def __init__(self, *outputs: Any) -> None:
        self.outputs = list(outputs)
        self.inputs: list[Any] = []

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **_: Any) -> ModelResponse:
        self.inputs.append(input)
        usage = Usage(requests=1, input_tokens=100, output_tokens=20, total_tokens=120)
        return ModelResponse(output=[self.outputs.pop(0)], usage=usage, response_id=None)

    def stream_response(self, *args: Any, **_: Any) -> AsyncIterator[TResponseStreamEvent]:
        raise NotImplementedError


def talking_agent(*answers: str) -> Agent[Any]:
    return Agent(name="talker", model=ScriptedModel(*map(text, answers)))


def approving_agent() -> Agent[Any]:
    """It wants to send money, which needs an approval."""

    @function_tool(needs_approval=True)
    def send_money() -> str:
        """Send money."""
        return "sent"

    return Agent(name="banker", model=ScriptedModel(call("send_money"), text("done")), tools=[send_money])
