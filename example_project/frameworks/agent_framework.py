"""Microsoft Agent Framework: an agent and a workflow whose sessions are in the project's database."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_framework import (
    Agent,
    BaseChatClient,
    ChatResponse,
    Content,
    Executor,
    FunctionInvocationLayer,
    HistoryProvider,
    Message,
    Workflow,
    WorkflowBuilder,
    WorkflowContext,
    handler,
    response_handler,
)

__all__ = ["Booking", "Offer", "ScriptedClient", "booking", "guide", "weather"]


def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"Sunny in {city}"


class ScriptedClient(FunctionInvocationLayer[Any], BaseChatClient[Any]):
    """A model that asks for the weather and repeats the tool's answer. A real agent has a real one here."""

    def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Any, **kwargs: Any
    ) -> Awaitable[ChatResponse]:  # type: ignore[override]  # it does not stream
        return self.answer(messages)

    async def answer(self, messages: Sequence[Message]) -> ChatResponse:
        last = messages[-1]
        if last.role == "tool":
            content = Content.from_text(f"{last.contents[0].result}.")
        else:
            call_id = f"call-{len(messages)}"
            content = Content.from_function_call(call_id, "weather", arguments={"city": "Lisbon"})
        return ChatResponse(
            messages=[Message("assistant", [content])],
            model="scripted",
            usage_details={"input_token_count": 100, "output_token_count": 10, "total_token_count": 110},
        )


def guide(history: HistoryProvider, client: BaseChatClient[Any] | None = None) -> Agent[Any]:
    """Return the agent, in any process."""
    return Agent(
        client=client or ScriptedClient(), name="guide", tools=[weather], context_providers=[history]
    )


@dataclass
class Offer:
    """What a person is asked about."""

    price: str


class Booking(Executor):
    """Asks a person, and books."""

    @handler
    async def offer(self, city: str, context: WorkflowContext) -> None:
        await context.request_info(Offer(f"{city} for 120 euros"), bool)

    @response_handler
    async def answered(self, offer: Offer, approved: bool, context: WorkflowContext[None, str]) -> None:
        await context.yield_output(f"{offer.price} is booked." if approved else "Nothing is booked.")


def booking() -> Workflow:
    """Return the workflow. A process that continues it builds it again."""
    return WorkflowBuilder(start_executor=Booking(id="booking"), name="booking").build()
