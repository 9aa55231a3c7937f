"""What the released clients of both protocols hold after each exchange is what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chat.live import Client, Site, comparable, node_modules, site
from tests.databases import CommittedDatabase

_WISHES = (
    "hello",
    "think hello weather",
    "silent weather",
    "differ think",
    "agent weather",
    "file data",
    "long think agent",
    "state",
)


@pytest.fixture
def running(committed_db: CommittedDatabase) -> Iterator[Site]:
    with site(committed_db) as found:
        yield found


def _different(running: Site, client: Client, held: dict[str, Any], label: str) -> list[str]:
    stored = running.thread(client.thread, client.kind)["messages"]
    mine, theirs = comparable(held["messages"]), comparable(stored)
    return [] if mine == theirs else [f"{client.kind} {label}:\n client {mine}\n stored {theirs}"]


@pytest.mark.parametrize("kind", ["agui", "ai"])
def test_a_client_holds_what_is_stored(running: Site, kind: str) -> None:
    modules, wrong = node_modules(), []
    for number, wish in enumerate(_WISHES):
        with Client(modules, running, kind, f"thread-{kind}-{number}") as client:
            wrong += _different(running, client, client.do("say", id="u1", text=wish), wish)
            wrong += _different(running, client, client.do("say", id="u2", text="think"), f"{wish}, then on")
            wrong += _different(running, client, client.do("reload"), f"{wish}, after a reload")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["agui", "ai"])
def test_a_client_answers_and_continues(running: Site, kind: str) -> None:
    modules, wrong = node_modules(), []
    with Client(modules, running, kind, f"answers-{kind}") as client:
        for number, approved in enumerate((True, False)):
            wrong += _different(running, client, client.do("say", id=f"u{number}", text="approve"), "asked")
            (call,) = running.thread(client.thread)["calls"]
            held = client.do("answer", approved=approved, digest=call["digest"], id=call["id"])
            wrong += _different(running, client, held, f"approved: {approved}")
        wrong += _different(running, client, client.do("say", id="u3", text="ask think"), "client tool")
        (call,) = running.thread(client.thread)["calls"]
        held = client.do("tool", id="x1", call=call["id"], tool="ask", content="yes")
        wrong += _different(running, client, held, "client tool answered")
        wrong += _different(running, client, client.do("say", id="u4", text="think fail"), "failed")
        wrong += _different(running, client, client.do("say", id="u5", text="think"), "after a failure")
    assert not wrong, "\n".join(wrong)


def test_an_answer_is_made_anew_and_a_message_is_edited(running: Site) -> None:
    modules, wrong = node_modules(), []
    with Client(modules, running, "ai", "edits") as client:
        for number in range(3):
            client.do("say", id=f"u{number}", text=f"hello {number}")
        before = running.thread("edits", "ai")["messages"][-1]["id"]
        wrong += _different(running, client, client.do("regenerate"), "regenerated")
        assert running.thread("edits", "ai")["messages"][-1]["id"] != before
        wrong += _different(running, client, client.do("edit", id="u1", text="think anew"), "edited")
        assert [m["id"] for m in running.thread("edits")["messages"] if m["role"] == "user"] == ["u0", "u1"]
        wrong += _different(running, client, client.do("say", id="u4", text="and on"), "on")
    assert not wrong, "\n".join(wrong)
