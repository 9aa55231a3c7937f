"""A chat with a travel guide, which follows keywords instead of asking a model, and asks before it books."""

from __future__ import annotations

import json
import re
import time
from itertools import takewhile
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET

from example_project.answers import SECONDS_PER_WORD
from example_project.pages import page
from example_project.spending import PRICED_AS, estimated_tokens
from example_project.visitors import visitor_of, welcome
from helix_store import Message, NotApproved, Store, TurnInterrupted, new_id
from helix_store.contrib.chat import Chat, ChatTurn, Out
from helix_store.models import Budget

__all__ = ["BUDGET", "GUIDE", "chat", "chat_page"]

GUIDE: Final = "travel-guide"
BUDGET: Final = "chat"
_LIMIT: Final[dict[str, Any]] = {"scope": "agent_type", "period": "day", "limit_tokens": 2_000}
"""Enough for about six answers, so that you see soon what happens then."""
_FLIGHT: Final = {"flight": "TP 1357", "departs": "07:40", "price_eur": 184}
_LISBON: Final = (
    "Lisbon is a good choice for a weekend: the trams, the river and the light are worth the trip, and "
    "in spring it is warm already. Ask me for a flight, or tell me to book one."
)
_REPLIES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "book": ("Two seats cost 368 euros. Please decide.", "book_flight", {"flight": "TP 1357", "seats": 2}),
    "fl": ("Let me look for flights to Lisbon.", "search_flights", {"origin": "VIE", "destination": "LIS"}),
    "": (_LISBON, "", {}),
}
_TOLD: Final = {
    "search_flights": "The early flight, {flight}, departs at {departs} and costs {price_eur} euros for each "
    "of you. There are two seats at the window. Shall I book it?",
    "book_flight": "It is booked: {seats} seats on {flight}. The reference is {reference}.",
    "refused": "I have not booked anything. Tell me when you want to, and I will ask you again.",
}


def _reply(history: list[Message]) -> tuple[str, str, dict[str, Any]]:
    """Return what a model would: a text, and the tool that it calls with its input, or no tool."""
    new = list(takewhile(lambda message: message["role"] != "assistant", reversed(history)))[::-1]
    results = [(each["name"], json.loads(each["content"])) for each in new if each["role"] == "tool"]
    told = " ".join(_TOLD["refused" if "refused" in got else tool].format(**got) for tool, got in results)
    wish = " ".join(each["content"] for each in new if each["role"] == "user").lower()
    if not wish:
        return told, "", {}
    text, tool, arguments = next(_REPLIES[word] for word in _REPLIES if word in wish)
    return f"{told} {text}".strip(), tool, arguments


def _result(call_id: str, tool: str, result: dict[str, Any]) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": tool, "content": json.dumps(result)}


def _booked(turn: ChatTurn, call_id: str) -> Message:
    """Return the answer to an approved call, which is booked once, however often a worker dies."""
    try:
        with turn.effect(call_id, approval=True, retry=True) as effect:
            if not effect.is_done:
                effect.done({"reference": "LX-4711", **effect.input})
        return _result(call_id, "book_flight", effect.result)
    except NotApproved:
        return _result(call_id, "book_flight", {"refused": "A person did not approve this."})


def _take_turn(turn: ChatTurn, out: Out) -> None:
    if booked := [_booked(turn, call_id) for call_id in turn.results]:
        with turn.step() as step:
            step.say(*booked)
    try:
        while turn.is_active:
            said = ""
            with turn.step() as step:
                history = turn.messages()
                text, tool, arguments = _reply(history)
                for word in re.findall(r"\S+\s?", text):
                    out.text(word)
                    said += word
                    time.sleep(SECONDS_PER_WORD)  # the pace of a model
                call_id, function = f"call-{len(history)}", {"name": tool, "arguments": json.dumps(arguments)}
                calls = [{"id": call_id, "type": "function", "function": function}]
                message = {"role": "assistant", "content": text, **({"tool_calls": calls} if tool else {})}
                step.say(message)
                turn.tokens(model=PRICED_AS, **estimated_tokens(len(json.dumps(history)), message))
                if tool == "book_flight":
                    step.ask_approval(call_id, tool, arguments)
                elif tool:
                    step.say(_result(call_id, tool, _FLIGHT))
                else:
                    step.end_turn()
    except TurnInterrupted:
        # The step is not stored. Keep what the visitor has read.
        kept = [{"role": "assistant", "content": f"{said}…", "id": new_id()}] if said else []
        turn.session.store.append_messages(turn.session.id, kept, fencing_token=turn.fencing_token)
        raise


chat: Final = Chat(GUIDE, _take_turn, name="guide", owner=visitor_of)


@require_GET
def chat_page(request: HttpRequest, thread: str = "") -> HttpResponse:
    """Return the page of a thread, or of a new one. Its script makes the requests to the chat."""
    if (budgets := Store().budgets).get_budget(BUDGET) is None:
        budgets.set_budget(BUDGET, value=GUIDE, **_LIMIT)
    welcome(request)
    context = {"thread": thread, "budget": Budget.objects.get(tenant="", name=BUDGET)}
    return page(request, "example/chat.html", context)
