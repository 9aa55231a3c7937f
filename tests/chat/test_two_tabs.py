"""Two tabs of one thread: a message in between, and everybody is told what is stored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async

from tests.chat.conftest import Chatting, events_of, run_input

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
