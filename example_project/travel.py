"""The agents of the demo: a travel planner whose model follows a script, and a visa adviser that it asks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from example_project.agent import Agent, AgentKind, Reply, ToolCall
from example_project.card_service import charge
from example_project.spending import estimated_tokens
from helix_store import Effect, Message, Store, SubSessionRef

__all__ = ["PLANNER", "VISA_ADVISER", "start_trip"]


@dataclass(frozen=True)
class ScriptedModel:
    """A model that returns its lines in order. Only the history decides which is next."""

    lines: tuple[Message, ...]

    def reply(self, history: Sequence[Message]) -> Reply:
        line = self.lines[sum(message["role"] == "assistant" for message in history)]
        read = sum(len(json.dumps(message)) for message in history)
        return Reply(line, estimated_tokens(read, line))


def _calls(*calls: tuple[str, str, dict[str, Any]]) -> Message:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for call_id, name, arguments in calls
        ],
    }


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _ask_visa_adviser(call: ToolCall) -> dict[str, Any]:
    """Run the adviser in a sub-session. A second attempt continues the sub-session of the first."""
    sessions, session_id, question = call.store.sessions, call.step.session.id, call.arguments["question"]
    sub_session_id = f"{session_id}.{call.tool_call_id}"
    ref = SubSessionRef(
        sub_session_id=sub_session_id,
        agent_type=VISA_ADVISER.agent_type,
        parent_tool_call_id=call.tool_call_id,
    )
    sessions.add_sub_session_refs(session_id, [ref])
    _start(call.store, sub_session_id, VISA_ADVISER.agent_type, question, parent_session_id=session_id)
    with call.spending.sub_agent(VISA_ADVISER.agent_type, sub_session_id):
        state = Agent(call.store, VISA_ADVISER, report=call.report).run(sub_session_id)
    sessions.update_sub_session_ref(
        session_id, sub_session_id, status=state.status.value, output=state.output
    )
    call.stage(merge_changes={"visa": state.output})
    return dict(state.output)


def _search_flights(call: ToolCall) -> dict[str, Any]:
    found = {"flight": "TP 1357", "price_eur": 184}
    call.stage(merge_changes={"flights": [found]})
    return found


def _search_hotels(call: ToolCall) -> dict[str, Any]:
    found = {"hotel": "Casa do Rio", "price_eur": 210}
    call.stage(merge_changes={"hotels": [found]})
    return found


def _pay_for_trip(effect: Effect) -> dict[str, Any]:
    """Charge the card, under a reference by which a person finds the charge at the service."""
    return charge(effect.input["total_eur"], reference=effect.key)


def _book_trip(call: ToolCall) -> dict[str, Any]:
    booking = {"reference": "LX-4711", **call.arguments, **call.outcome}
    call.stage(patches=[{"op": "add", "path": "/booking", "value": booking}])
    return booking


VISA_ADVISER: Final = AgentKind(
    agent_type="visa-adviser",
    model=ScriptedModel((_says("No visa is needed for a weekend; an identity card is enough."),)),
    tools={},
)

PLANNER: Final = AgentKind(
    agent_type="travel-planner",
    model=ScriptedModel(
        (
            _calls(
                ("call-visa", "ask_visa_adviser", {"question": "Do two Austrians need a visa for Lisbon?"})
            ),
            _calls(
                ("call-flights", "search_flights", {"from": "VIE", "to": "LIS", "passengers": 2}),
                ("call-hotels", "search_hotels", {"city": "Lisbon", "nights": 2}),
            ),
            _calls(
                ("call-book", "book_trip", {"flight": "TP 1357", "hotel": "Casa do Rio", "total_eur": 394})
            ),
            _says("Your weekend in Lisbon is booked: flight TP 1357 and two nights at Casa do Rio, 394 EUR."),
        )
    ),
    tools={
        "ask_visa_adviser": _ask_visa_adviser,
        "search_flights": _search_flights,
        "search_hotels": _search_hotels,
        "book_trip": _book_trip,
    },
    effects={"book_trip": _pay_for_trip},
)


def start_trip(store: Store, session_id: str, *, title: str) -> None:
    """Create a session with the traveller's request."""
    wish = "Plan a weekend in Lisbon for two of us from Vienna, and book it."
    _start(store, session_id, PLANNER.agent_type, wish, title=title, user_id="ana@example.org")


def _start(store: Store, session_id: str, agent_type: str, wish: str, **fields: Any) -> None:
    """Create a session with a request, or find the session of a worker that died."""
    state = store.sessions.load_state(session_id) or store.sessions.create_session(
        session_id, agent_type=agent_type, tags=["demo"], **fields
    )
    if state.message_count == 0:
        store.session(session_id).say({"role": "user", "content": wish})
