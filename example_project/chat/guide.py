"""The agent of the chat: a travel guide that follows keywords instead of asking a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Final

from example_project.agent import AgentKind, Reply, ToolCall
from example_project.spending import estimated_tokens
from helix_store import Message

__all__ = ["GUIDE", "guide"]

GUIDE: Final = "travel-guide"

_FLIGHT: Final = {"flight": "TP 1357", "departs": "07:40", "price_eur": 184}


def guide(speak: Callable[[str, int], None]) -> AgentKind:
    """Return the agent. ``speak`` gets each text of the model, with the number of its message."""
    return AgentKind(
        agent_type=GUIDE,
        model=_Guide(speak),
        tools={"search_flights": _search_flights, "book_flight": _book_flight},
        needs_approval=frozenset({"book_flight"}),
        is_chat=True,
    )


class _Guide:
    def __init__(self, speak: Callable[[str, int], None]) -> None:
        self._speak = speak

    def reply(self, history: Sequence[Message]) -> Reply:
        message = _next(history)
        self._speak(message["content"], len(history))
        return Reply(message, estimated_tokens(sum(len(json.dumps(each)) for each in history), message))


def _next(history: Sequence[Message]) -> Message:
    new = list(takewhile(lambda message: message["role"] != "assistant", reversed(history)))[::-1]
    told = [_summary(each["name"], json.loads(each["content"])) for each in new if each["role"] == "tool"]
    wish = " ".join(each["content"] for each in new if each["role"] == "user").lower()
    text, *calls = _fulfilled(wish, f"call-{len(history)}") if wish else ("",)
    message: Message = {"role": "assistant", "content": " ".join([*told, text]).strip()}
    return {**message, "tool_calls": calls} if calls else message


def _fulfilled(wish: str, call_id: str) -> tuple[Any, ...]:
    """Return the answer to a wish, and its tool calls."""
    if "book" in wish:
        text = "I can book the early flight to Lisbon. Two seats cost 368 euros: please decide."
        return text, _call(call_id, "book_flight", flight="TP 1357", passengers=2, total_eur=368)
    if "flight" in wish or "fly" in wish:
        text = "Let me look for flights from Vienna to Lisbon."
        return text, _call(call_id, "search_flights", origin="VIE", destination="LIS")
    return (
        "Lisbon is a good choice for a weekend: the trams, the river and the light are worth the trip, and "
        "in spring it is warm already. Ask me for a flight, or tell me to book one.",
    )


def _summary(tool_name: str, result: dict[str, Any]) -> str:
    if "refused" in result:
        return "I have not booked anything. Tell me when you want to, and I will ask you again."
    if tool_name == "book_flight":
        return f"It is booked: two seats on {result['flight']}. The reference is {result['reference']}."
    return (
        f"The early flight, {result['flight']}, departs at {result['departs']} and costs "
        f"{result['price_eur']} euros for each of you. There are two seats at the window. Shall I book it?"
    )


def _call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _search_flights(call: ToolCall) -> dict[str, Any]:
    call.stage(merge_changes={"flights": [_FLIGHT]})
    return _FLIGHT


def _book_flight(call: ToolCall) -> dict[str, Any]:
    booking = {"reference": "LX-4711", **call.arguments}
    call.stage(merge_changes={"booking": booking})
    return booking
