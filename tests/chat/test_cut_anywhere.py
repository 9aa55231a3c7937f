"""A client that is cut after any event comes back, and holds what is stored: nothing twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from helix_store.contrib.chat import reading
from helix_store.contrib.chat.threads import load_thread, newest_chunk
from tests.chat.conftest import Chatting

Make = Callable[..., Chatting]

TEXT = "One two three four."


@dataclass
class _Client:
    """What a client of AG-UI holds, and the position that it comes back with."""

    texts: dict[str, str] = field(default_factory=dict)
    position: str = ""

    def take(self, block: str) -> None:
        for line in block.split("\n"):
            if line.startswith("id:"):
                self.position = line[3:].strip()
            elif line.startswith("data: {"):
                self._event(json.loads(line[6:]))

    def _event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "MESSAGES_SNAPSHOT":
                self.texts = {each["id"]: each.get("content", "") for each in event["messages"]}
            case "TEXT_MESSAGE_START":
                self.texts.setdefault(event["messageId"], "")
            case "TEXT_MESSAGE_CONTENT":
                self.texts[event["messageId"]] += event["delta"]


def _answer(turn: Any, out: Any) -> None:
    for word in TEXT.split(" "):
        out.text(f"{word} ")
        out.data("demo.noise", word, transient=True)  # so that each word is a chunk
    with turn.step() as step:
        step.say({"role": "assistant", "content": f"{TEXT} "})
        step.end_turn()


async def _blocks(site: Chatting, position: str = "") -> list[str]:
    headers = {"Last-Event-ID": position} if position else {}
    response = await site.request("GET", "agui/t/", **headers)
    assert response.status_code == 200
    text = b"".join([part async for part in response.streaming_content]).decode()
    return [block for block in text.split("\n\n") if block]


async def _wrong_after_cuts(site: Chatting, blocks: Iterable[str]) -> dict[int, Any]:
    """What a client holds in the end, for each number of events after which a cut goes wrong."""
    stored = {each["id"]: each["content"] for each in (await site.json("GET", "threads/t/"))["messages"]}
    wrong, seen = {}, list(blocks)
    for cut in range(1, len(seen) + 1):
        client = _Client()
        for block in seen[:cut]:
            client.take(block)
        for block in await _blocks(site, client.position):
            client.take(block)
        if client.texts != stored:
            wrong[cut] = (client.position, client.texts)
    return wrong


async def test_a_turn_that_ends_while_its_thread_is_read(
    chatting: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = chatting(answer=_answer)
    await site.post("t", "u1")
    await sync_to_async(site.drive)("t")
    session_id = site.chat.session_id("ann", "t")
    chunks = await sync_to_async(site.store.streams.read_after)(session_id, 0)
    half = [each for each in chunks if each.chunk["type"] == "text"][1]
    before = [(half.sequence, half.chunk)]

    def newest(*thread: Any) -> tuple[int, Any]:
        return before.pop() if before else newest_chunk(*thread)

    monkeypatch.setattr(reading, "newest_chunk", newest)
    assert await _wrong_after_cuts(site, await _blocks(site)) == {}


@pytest.mark.thorough
async def test_a_turn_that_begins_when_its_thread_has_come_to_rest(
    chatting: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = chatting(answer=_answer)
    await site.post("t", "u1")
    await sync_to_async(site.drive)("t")
    calls = 0

    def after_another_turn(*thread: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first one joins the thread
            async_to_sync(site.post)("t", "u2")
            site.drive("t")
        return load_thread(*thread, **options)

    monkeypatch.setattr(reading, "load_thread", after_another_turn)
    blocks = await _blocks(site)
    assert calls >= 2
    assert await _wrong_after_cuts(site, blocks) == {}
