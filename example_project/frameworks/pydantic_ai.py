"""Pydantic AI on this store, without a network: a question, an approval that waits, a fork.

python -m example_project.frameworks.pydantic_ai
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import django
from pydantic_ai import Agent, DeferredToolRequests
from pydantic_ai.conversation import Conversation
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

if TYPE_CHECKING:
    from helix_store.contrib.pydantic_ai import DjangoConversationStore

__all__ = ["ask", "book", "main", "travel_agent"]


def _reply(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Book on request, and report the result."""
    last = messages[-1].parts[-1]
    if isinstance(last, ToolReturnPart):
        return ModelResponse(parts=[TextPart(f"Done: {last.content}")])
    text = str(getattr(last, "content", ""))
    if "book" in text.lower():
        return ModelResponse(
            parts=[ToolCallPart("book", {"city": "Lisbon"}, "call-1")], model_name="travel-1"
        )
    return ModelResponse(parts=[TextPart("Lisbon is sunny.")])


def travel_agent() -> Agent[None, str | DeferredToolRequests]:
    agent = Agent(FunctionModel(_reply, model_name="travel-1"), output_type=[str, DeferredToolRequests])

    @agent.tool_plain(requires_approval=True)
    def book(city: str) -> str:
        return f"a room in {city} is booked"

    return agent


async def ask(store: DjangoConversationStore, name: str, question: str, *, user: str) -> str:
    """Run one turn of a conversation. The answer tells when a person must approve a booking."""
    conversation = await store.load(name, scope=user) or Conversation(conversation_id=name)
    result = await travel_agent().run(question, conversation=conversation)
    await store.save(result, scope=user)
    waits = isinstance(result.output, DeferredToolRequests)
    return "A person must approve the booking." if waits else str(result.output)


async def book(store: DjangoConversationStore, name: str, *, approved: bool, user: str) -> str:
    """Answer the approval that a conversation waits for, in any process and at any later time."""
    conversation = await store.load(name, scope=user)
    if conversation is None or conversation.deferred_tool_requests is None:
        return "Nothing waits for an approval."
    requests = conversation.deferred_tool_requests
    answers = requests.build_results(approvals={call.tool_call_id: approved for call in requests.approvals})
    result = await travel_agent().run(conversation=conversation, deferred_tool_results=answers)
    await store.save(result, scope=user)
    return str(result.output)


async def main() -> None:
    from helix_store.contrib.pydantic_ai import DjangoConversationStore

    store = DjangoConversationStore()
    await store.delete("pydantic-ai-example")
    for question in ("How is Lisbon?", "Book it."):
        print(await ask(store, "pydantic-ai-example", question, user="ada"))
    print(await book(store, "pydantic-ai-example", approved=True, user="ada"))
    fork = await store.fork("pydantic-ai-example", at=2)
    print(await ask(store, fork.conversation_id, "And in winter?", user="ada"))


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    asyncio.run(main())
