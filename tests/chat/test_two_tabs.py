"""Two tabs of one thread: a message in between, and everybody is told what is stored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from tests.chat.conftest import Chatting, events_of, run_input
from tests.chat.held import held_by_ag_ui, held_by_the_ai_sdk

Make = Callable[..., Chatting]


class _Slow:
    """An agent that says the first half of its first answer, and waits for permission to go on."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, turn: Any, out: Any) -> None:
        while turn.is_active:
            wish = turn.messages()[-1]["content"]
            out.text("First half, ")
            if not self.has_begun.is_set():
                out.text("of the first.")
                self.has_begun.set()
                assert self.may_go_on.wait(30)
            with turn.step() as step:
                text = "First half, of the first." if wish == "one" else "First half, "
                step.say({"role": "assistant", "content": text})
                step.end_turn()


async def _body(response: Any) -> list[dict[str, Any]]:
    return events_of(b"".join([part async for part in response.streaming_content]))


def _ai_input(message_id: str, text: str) -> dict[str, Any]:
    message = {"id": message_id, "role": "user", "parts": [{"type": "text", "text": text}]}
    return {"id": "t", "messages": [message]}


def _held(parts: list[dict[str, Any]]) -> str:
    """The text that a client of the AI SDK holds after these parts."""
    steps = [""]
    for part in parts:
        if part["type"] == "start-step":
            steps.append("")
        elif part["type"] == "reset-step":
            steps[-1] = ""
        elif part["type"] == "text-delta":
            steps[-1] += part["delta"]
    return "".join(steps)


async def _both(site: Chatting, agent: _Slow, first: Any, second: Any) -> tuple[Any, Any]:
    """Make the first request, the second one during its answer, and return the responses to both."""
    one = asyncio.ensure_future(_body(await first()))
    driving = asyncio.ensure_future(asyncio.to_thread(site.drive, "t"))
    await asyncio.to_thread(agent.has_begun.wait, 30)
    two = asyncio.ensure_future(_body(await second()))
    agent.may_go_on.set()
    assert await driving is True
    await sync_to_async(site.drive)("t")
    return await one, await two


async def test_the_answer_to_a_message_in_between_is_a_ui_message_of_its_own(chatting: Make) -> None:
    agent = _Slow()
    site = chatting(answer=agent)
    one, two = await _both(
        site,
        agent,
        lambda: site.request("POST", "ai/", _ai_input("u1", "one")),
        lambda: site.request("POST", "ai/", _ai_input("u2", "two")),
    )
    stored = (await site.json("GET", "threads/t/?format=ai"))["messages"]
    assert [message["role"] for message in stored] == ["user", "assistant", "user", "assistant"]
    for parts, answer in ((one, stored[1]), (two, stored[3])):
        assert parts[0] == {"type": "start", "messageId": answer["id"]}
        assert parts[-1]["type"] == "finish"
        said = "".join(part["delta"] for part in parts if part["type"] == "text-delta")
        assert said == "".join(part["text"] for part in answer["parts"] if part["type"] == "text")


async def test_everybody_gets_the_message_in_between_in_ag_ui(chatting: Make) -> None:
    agent = _Slow()
    site = chatting(answer=agent)
    one, two = await _both(
        site,
        agent,
        lambda: site.request("POST", "agui/", run_input("t", "u1", "one")),
        lambda: site.request("POST", "agui/", run_input("t", "u2", "two")),
    )
    stored = (await site.json("GET", "threads/t/"))["messages"]
    for events in (one, two):
        assert [event["type"] for event in (events[0], events[-1])] == ["RUN_STARTED", "RUN_FINISHED"]
        assert _applied(events) == stored


async def test_a_second_tab_comes_back_to_a_running_answer(chatting: Make) -> None:
    agent = _Slow()
    site = chatting(answer=agent)
    one, two = await _both(
        site,
        agent,
        lambda: site.request("POST", "agui/", run_input("t", "u1", "one")),
        lambda: site.request("GET", "agui/t/"),
    )
    stored = (await site.json("GET", "threads/t/"))["messages"]
    assert _applied(one) == _applied(two) == stored


def _applied(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that an empty client has after these events, which have texts alone."""
    held: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "MESSAGES_SNAPSHOT":
            new = {message["id"]: message for message in event["messages"]}
            held = [new.pop(message["id"]) for message in held if message["id"] in new] + list(new.values())
        elif event["type"] == "TEXT_MESSAGE_START":
            held.append({"id": event["messageId"], "role": "assistant", "content": ""})
        elif event["type"] == "TEXT_MESSAGE_CONTENT":
            held[-1]["content"] += event["delta"]
    return held


async def _led(site: Chatting, response: Any) -> list[dict[str, Any]]:
    """The events of a response while the thread is driven."""
    reading = asyncio.ensure_future(_body(response))
    await asyncio.to_thread(site.drive, "t")
    return await reading


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["user", "system"])
async def test_who_comes_back_follows_the_answer_to_the_last_message_that_is_due(
    chatting: Make, role: str
) -> None:
    site = chatting()
    await site.post("t", "u1", "one")
    await asyncio.to_thread(site.drive, "t")
    tomorrow = datetime.now(UTC) + timedelta(days=1)

    def post() -> None:
        session = site.session("t")
        session.post({"role": role, "content": "two"})
        session.post({"role": "user", "content": "later"}, not_before=tomorrow)

    await sync_to_async(post)()
    parts = await _led(site, await site.request("GET", "ai/t/stream"))
    stored = (await site.json("GET", "threads/t/?format=ai"))["messages"]
    assert [message["role"] for message in stored] == ["user", "assistant", role, "assistant"]
    assert parts[0] == {"type": "start", "messageId": stored[-1]["id"]}
    assert "".join(part.get("delta", "") for part in parts) == "You said two."


@pytest.mark.thorough
@pytest.mark.parametrize("words", ["", "Well, "], ids=["before a step", "in a step"])
async def test_a_message_that_the_agent_receives_itself_ends_the_ui_message(
    chatting: Make, words: str
) -> None:
    has_said, may_receive = threading.Event(), threading.Event()

    def answer(turn: Any, out: Any) -> None:
        out.text("One.")
        with turn.step() as step:
            step.say({"role": "assistant", "content": "One."})
        out.text(words)
        has_said.set()
        assert may_receive.wait(30)
        assert [message["content"] for message in turn.receive()] == ["second"]
        out.text("Two.")
        with turn.step() as step:
            step.say({"role": "assistant", "content": f"{words}Two."})
            step.end_turn()

    site = chatting(answer=answer)
    response = await site.request("POST", "ai/", _ai_input("u1", "one"))
    leading = asyncio.ensure_future(_led(site, response))
    assert await asyncio.to_thread(has_said.wait, 30)
    following = asyncio.ensure_future(site.events("GET", "agui/t/"))
    await site.post("t", "u2", "second")
    may_receive.set()
    parts, events = await leading, await following
    stored = (await site.json("GET", "threads/t/"))["messages"]
    assert [message["content"] for message in stored] == ["one", "One.", "second", f"{words}Two."]
    assert _applied(events) == stored
    assert parts[-1]["type"] == "finish"
    assert _held(parts) == "One."


@pytest.mark.thorough
async def test_a_run_of_a_deleted_thread_does_not_speak_in_the_one_that_begins_anew(chatting: Make) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def answer(turn: Any, out: Any) -> None:
        name = turn.messages()[-1]["content"]
        out.text(f"{name} begins.")
        turn.writer.flush()
        if name == "old":
            has_begun.set()
            assert may_go_on.wait(30)
            for _ in range(3):
                out.text(" Old words.")
                turn.writer.flush()
            said.append("all")
        with turn.step() as step:
            step.say({"role": "assistant", "content": f"{name} begins."})
            step.end_turn()

    said: list[str] = []
    site = chatting(answer=answer)
    await site.post("t", "u1", "old")
    old = asyncio.ensure_future(asyncio.to_thread(site.drive, "t"))
    assert await asyncio.to_thread(has_begun.wait, 30)
    assert (await site.request("DELETE", "threads/t/")).status_code == 204
    await site.post("t", "u1", "new")
    await asyncio.to_thread(site.drive, "t")
    may_go_on.set()
    await old
    assert said == []
    stored = (await site.json("GET", "threads/t/"))["messages"]
    assert [message["content"] for message in stored] == ["new", "new begins."]


@pytest.mark.thorough
async def test_a_response_ends_at_once_if_the_turn_has_ended_before_it_begins(chatting: Make) -> None:
    def run(session_id: str, using: str | None, tenant: str) -> None:
        site.chat.drive(session_id, tenant=tenant)

    site: Chatting = chatting(runner=run)
    for number in range(3):
        response = await site.request("POST", "agui/", run_input("t", f"u{number}"))
        text = b"".join([part async for part in response.streaming_content])
        assert events_of(text)[-1]["type"] == "RUN_FINISHED"
        assert b"heartbeat" not in text, "the response has waited"
    assert len((await site.json("GET", "threads/t/"))["messages"]) == 6


async def test_a_response_has_all_that_a_turn_has_said_before_it_begins(chatting: Make) -> None:
    def run(session_id: str, using: str | None, tenant: str) -> None:
        site.chat.drive(session_id, tenant=tenant)

    def answer(turn: Any, out: Any) -> None:
        out.data("progress", 1, transient=True)
        out.data("place", "Oslo")
        out.text("Yes.")
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Yes."})
            step.end_turn()

    site: Chatting = chatting(runner=run, answer=answer)
    await site.post("t", "u0")
    events = await site.events("POST", "agui/", run_input("t"))
    told = [(event["name"], event["value"]) for event in events if event["type"] == "CUSTOM"]
    assert told == [("progress", 1), ("place", "Oslo")]
    assert held_by_ag_ui(events) == (await site.json("GET", "threads/t/"))["messages"]
    message = {"id": "u2", "role": "user", "parts": [{"type": "text", "text": "Hello"}]}
    parts = await site.events("POST", "ai/", {"id": "t", "messages": [message]})
    told = [(part["type"], part["data"]) for part in parts if part["type"].startswith("data-")]
    assert sorted(told) == [("data-place", "Oslo"), ("data-progress", 1)]
    newest = (await site.json("GET", "threads/t/?format=ai"))["messages"][-1]
    assert held_by_the_ai_sdk(parts) == newest["parts"]


@pytest.mark.thorough
async def test_the_end_of_a_response_tells_all_tokens_of_its_run_and_what_they_have_cost(
    chatting: Make,
) -> None:
    def answer(turn: Any, out: Any) -> None:
        turn.tokens(model="m", prompt=1, completion=2, cost_usd="0.5")
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Yes."})
            step.end_turn()
        turn.tokens(model="m", prompt=10, completion=20, cost_usd="0.25")

    site = chatting(answer=answer)
    first = await _led(site, await site.request("POST", "agui/", run_input("t")))
    await site.request("POST", "ai/", {"id": "t", "messages": [], "trigger": "regenerate-message"})
    anew = await _led(site, await site.request("GET", "agui/t/"))
    for events in (first, anew):
        (usage,) = events[-1]["usage"]
        assert (usage["inputTokens"], usage["outputTokens"]) == (11, 22)
        assert Decimal(events[-1]["metadata"]["costUsd"]) == Decimal("0.75")
