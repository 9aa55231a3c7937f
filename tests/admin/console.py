"""Sessions with which every page of the console has something to show."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from helix_store import Store
from helix_store.core import moments
from helix_store.models import Session
from tests.databases import CommittedDatabase

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAYAAACNMs+9AAAAFUlEQVR42mP8z8BQz0AEYBxVSF+FABJADveWkH6oAAAAAElFTkSuQmCC"
)
MARKDOWN = "# Findings\n\nIt is **red**:\n\n1. small\n2. square\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n`code`"


class NoAnswer(Exception):
    """A service that did not answer."""


def fill_console(database: CommittedDatabase) -> dict[str, int]:
    """Write the sessions, and return their keys by their ids."""
    store = Store(database.alias, tenant=database.tenant)
    _waits(store)
    _approved(store)
    _unknown(store)
    _failed(store)
    _says(store)
    _family(store)
    _spends(store)
    store.budgets.set_budget("of-ana", scope="user", value="ana@example.org", period="month", limit_usd=5)
    store.budgets.set_budget("each agent", scope="agent_type", limit_tokens=1_000_000)
    sessions = Session.objects.using(database.alias).filter(tenant=database.tenant)
    return dict(sessions.values_list("session_id", "pk"))


def _waits(store: Store) -> None:
    session = store.new_session(
        "waits", agent_type="planner", user_id="ana@example.org", title="Books a trip"
    )
    session.post({"role": "user", "content": "a later post"}, not_before=moments.now() + timedelta(hours=1))
    with session.turn() as turn:
        with turn.step() as step:
            step.say({"role": "user", "content": "Book it, please."})
        with turn.step() as step:
            step.say(_call("book_trip"))
            step.ask_approval("call-1", "book_trip", {"total_eur": 394})


def _call(tool: str) -> dict[str, Any]:
    function = {"name": tool, "arguments": '{"total_eur": 394}'}
    return {"role": "assistant", "tool_calls": [{"id": "call-1", "type": "function", "function": function}]}


def _approved(store: Store) -> None:
    session = store.new_session(
        "approved", agent_type="planner", user_id="ana@example.org", title="Was approved"
    )
    with session.turn() as turn, turn.step() as step:
        step.say(_call("pay_invoice"))
        step.ask_approval("call-1", "pay_invoice", {"total_eur": 394})
    store.sessions.submit_tool_result(
        "approved", "call-1", approval_id="call-1", approved=True, actor="the boss"
    )


def _unknown(store: Store) -> None:
    session = store.new_session(
        "unknown", agent_type="payer", user_id="sam@example.org", title="Charges a card"
    )
    with suppress(NoAnswer), session.turn() as turn, turn.effect("charge", tool_name="charge_card"):
        raise NoAnswer("the card service did not answer")


def _failed(store: Store) -> None:
    for number in range(2):
        session = store.new_session(
            f"failed-{number}", agent_type="analyst", user_id="mia@example.org", title="Writes a report"
        )
        with suppress(ValueError), session.turn() as turn:
            with turn.step() as step:
                step.say({"role": "user", "content": "Write it."})
            raise ValueError("the rate is not a number")


def _says(store: Store) -> None:
    session = store.new_session("says", agent_type="writer", user_id="mia@example.org", title="Says much")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    with session.turn() as turn, turn.step() as step:
        step.say({"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]})
        step.say({"role": "assistant", "content": MARKDOWN})


def _family(store: Store) -> None:
    store.sessions.create_session("root", agent_type="planner", title="Has sub-agents")
    for number in range(2):
        name = f"child-{number}"
        store.sessions.create_session(name, agent_type="searcher", parent_session_id="root", title="Searches")
        store.sessions.add_sub_session_refs(
            "root", [{"sub_session_id": name, "agent_type": "searcher", "status": "completed"}]
        )


def _spends(store: Store) -> None:
    """Two weeks of usage: one agent has become dearer, and one tool is slow."""
    for day in range(14):
        at = datetime.now(UTC) - timedelta(days=day, minutes=1)
        for name, agent_type in (("says", "writer"), ("waits", "planner")):
            cost = 4 if agent_type == "writer" and day < 7 else 1
            entry = {"session_id": name, "step_count": 1, "timestamp": at}
            source = {"type": "agent", "name": agent_type}
            store.usage.record_entry(
                {
                    **entry,
                    "kind": "tokens",
                    "source": source,
                    "model": "gpt-4o",
                    "tokens": {"prompt": 900, "completion": 100, "total": 1_000},
                    "cost_usd": str(cost),
                }
            )
            for tool, took in (("search_flights", 9_000), ("read_file", 20)):
                store.usage.record_entry(
                    {
                        **entry,
                        "kind": "tool",
                        "source": {"type": "tool", "name": tool},
                        "tool_name": tool,
                        "success": day != 3,
                        "duration_ms": took,
                    }
                )
