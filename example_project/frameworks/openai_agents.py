"""OpenAI Agents SDK on this store, without a network: a conversation, and a run that waits for an approval.

python -m example_project.frameworks.openai_agents
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import django
from agents import Agent, ModelResponse, Runner, RunState, Usage, function_tool, set_tracing_disabled
from agents.items import TResponseStreamEvent
from agents.models.interface import Model
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

__all__ = ["ScriptedModel", "banker", "main"]


class ScriptedModel(Model):
    """A model that answers with one text after the other. An answer like ``send_money()`` calls this tool."""

    model = "scripted"

    def __init__(self, *answers: str) -> None:
        self._answers = list(answers)

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        answer = self._answers.pop(0)
        output = _tool_call(answer[:-2]) if answer.endswith("()") else _message(answer)
        usage = Usage(requests=1, input_tokens=50, output_tokens=len(answer), total_tokens=50 + len(answer))
        return ModelResponse(output=[output], usage=usage, response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[TResponseStreamEvent]:
        raise NotImplementedError("The example does not stream.")


def _message(text: str) -> ResponseOutputMessage:
    part = ResponseOutputText(text=text, type="output_text", annotations=[], logprobs=[])
    return ResponseOutputMessage(
        id="message", type="message", role="assistant", content=[part], status="completed"
    )


def _tool_call(name: str) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        id="call", call_id="call-1", type="function_call", name=name, arguments="{}"
    )


@function_tool(needs_approval=True)
def send_money() -> str:
    """Send 5 dollars to Bob."""
    return "Sent."


banker: Agent[Any] = Agent(
    name="banker", model=ScriptedModel("send_money()", "Bob has his money."), tools=[send_money]
)


async def main() -> None:
    from helix_store.contrib.openai_agents import DjangoSession, RunStateStore

    set_tracing_disabled(True)
    session = DjangoSession("openai-agents-example", user_id="ada")
    await session.clear_session()
    guide: Agent[Any] = Agent(name="guide", model=ScriptedModel("Paris.", "The Seine."))
    for question in ("What is the capital of France?", "And its river?"):
        result = await Runner.run(guide, question, session=session)
        await session.store_run_usage(result)
    print(len(await session.get_items()), "items,", await session.get_session_usage())

    states = RunStateStore(user_id="ada")
    waiting = await Runner.run(banker, "Send 5 dollars to Bob")
    state_id = await states.asave(session.session_id, waiting.to_state(), owner="alice")
    claim = await states.aclaim(session.session_id, state_id, resumer="example", owner="alice")
    if claim is not None:
        state: Any = await RunState.from_string(banker, claim.text)
        state.approve(state.get_interruptions()[0])
        print((await Runner.run(banker, state)).final_output)
        await claim.adone()


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    asyncio.run(main())
