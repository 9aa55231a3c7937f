"""An agent of Microsoft Agent Framework, and a workflow that asks a person."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_framework import (
    Agent,
    BaseChatClient,
    ChatResponse,
    Executor,
    HistoryProvider,
    Message,
    Workflow,
    WorkflowBuilder,
    WorkflowContext,
    handler,
    response_handler,
)

__all__ = ["Booking", "Offer", "ScriptedClient", "booking", "guide"]


class ScriptedClient(BaseChatClient[Any]):
    """A model that gives ``answers`` one after the other."""

    def __init__(self, *answers: str, has_ids: bool = True) -> None:
        super().__init__()
        self.answers = list(answers)
        self.has_ids = has_ids
        self.number = 0

    def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Any, **kwargs: Any
    ) -> Awaitable[ChatResponse]:  # type: ignore[override]  # it does not stream
        return self._answer()

    async def _answer(self) -> ChatResponse:
        self.number += 1
        return ChatResponse(
            messages=[Message("assistant", [self.answers.pop(0)])],
            response_id=f"response-{self.number}" if self.has_ids else None,
            model="gpt-5",
            usage_details={
                "input_token_count": 10,
                "output_token_count": 5,
                "total_token_count": 15,
                "cache_creation_input_token_count": 3,
            },
        )


def guide(history: HistoryProvider, *answers: str) -> Agent[Any]:
    return Agent(client=ScriptedClient(*answers), name="guide", context_providers=[history])


@dataclass
class Offer:
    """What a person is asked about. The framework stores it as a pickle."""

    price: str


class Booking(Executor):
    """Asks a person, and books."""

    @handler
    async def offer(self, city: str, context: WorkflowContext) -> None:
        await context.request_info(Offer(f"{city}: 120 euros"), bool)

    @response_handler
    async def answered(self, offer: Offer, approved: bool, context: WorkflowContext[None, str]) -> None:  # type: ignore[type-arg]
        await context.yield_output(f"booked for {offer.price}" if approved else "not booked")


def booking() -> Workflow:
    return WorkflowBuilder(start_executor=Booking(id="booking"), name="trip").build()
