"""An agent of Google ADK whose sessions are in the project's database."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService
from google.genai import types

__all__ = ["APP", "ScriptedModel", "ask", "runner_of", "weather"]

APP = "travel"


def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"Sunny in {city}"


class ScriptedModel(BaseLlm):
    """A model that asks for the weather and repeats the tool's answer. A real agent has a real model here."""

    model: str = "scripted"

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        (*_, last) = llm_request.contents[-1].parts or [types.Part()]
        if last.function_response is None:
            part = types.Part(function_call=types.FunctionCall(name="weather", args={"city": "Lisbon"}))
        else:
            part = types.Part(text=f"{(last.function_response.response or {})['result']}.")
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=100, candidates_token_count=10, total_token_count=110
        )
        content = types.Content(role="model", parts=[part])
        yield LlmResponse(content=content, usage_metadata=usage, model_version="scripted")


def runner_of(service: BaseSessionService, model: BaseLlm | None = None) -> Runner:
    """Return the runner of the agent, in any process."""
    agent = LlmAgent(name="guide", model=model or ScriptedModel(), tools=[weather])
    return Runner(app_name=APP, agent=agent, session_service=service)


async def ask(runner: Runner, user_id: str, session_id: str, question: str) -> str:
    """Run one turn, and return the answer."""
    message = types.Content(role="user", parts=[types.Part(text=question)])
    answer: Any = ""
    async for event in runner.run_async(user_id=user_id, session_id=session_id, new_message=message):
        if event.is_final_response() and event.content and event.content.parts:
            answer = event.content.parts[0].text
    return str(answer)
