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
    "delegate agent",
    "file data",
    "long think agent",
    "state",
    "unsaid think weather",
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
        for number, (wish, approved) in enumerate(
            (("approve", True), ("approve", False), ("approve mute", True))
        ):
            wrong += _different(running, client, client.do("say", id=f"u{number}", text=wish), wish)
            (call,) = running.thread(client.thread)["calls"]
            held = client.do("answer", approved=approved, digest=call["digest"], id=call["id"])
            wrong += _different(running, client, held, f"{wish}, approved: {approved}")
        for number, wish in enumerate(("ask think", "ask mute", "ask mute silent"), 3):
            wrong += _different(running, client, client.do("say", id=f"u{number}", text=wish), wish)
            (call,) = running.thread(client.thread)["calls"]
            held = client.do("tool", id=f"x{number}", call=call["id"], tool="ask", content="yes")
            wrong += _different(running, client, held, f"{wish}, answered")
        wrong += _different(running, client, client.do("say", id="u6", text="think fail"), "failed")
        wrong += _different(running, client, client.do("say", id="u7", text="think"), "after a failure")
        wrong += _different(running, client, client.do("say", id="u8", text="stumble"), "failed after a step")
    assert not wrong, "\n".join(wrong)


def test_a_client_that_sends_the_answer_that_it_holds_gets_what_it_lacks(running: Site) -> None:
    modules, wrong = node_modules(), []
    wishes = (("long hello", ""), ("long ask think", "tool"), ("long approve", "answer"))
    for cut, back in ((None, "send"), (2, "send"), (5, "send"), (5, "come_back")):
        with Client(modules, running, "ai", f"sends-{cut}-{back}") as client:
            for number, (wish, kind) in enumerate(wishes):
                held = client.do("say", id=f"u{number}", text=wish, cut=None if kind else cut)
                if kind:
                    (call,) = running.thread(client.thread)["calls"]
                    given = {"id": call["id"], "call": call["id"], "approved": True, "digest": call["digest"]}
                    held = client.do(kind, cut=cut, tool="ask", content="yes", **given)
                if cut is not None:
                    assert held["outcome"]["kind"] == "cut"
                    held = client.do(back)
                label = f"{wish}, cut after {cut} reads, then {back}"
                wrong += _different(running, client, held, label)
                wrong += _different(running, client, client.do("send"), f"{label}, sent again")
    assert not wrong, "\n".join(wrong)


def test_a_client_writes_while_a_call_is_open(running: Site) -> None:
    modules = node_modules()
    with Client(modules, running, "ai", "open-call") as client:
        client.do("say", id="u1", text="approve")
        held = client.do("say", id="u2", text="hello")
        assert (held["outcome"]["kind"], held["outcome"]["finishReason"]) == ("success", "tool-calls")
        assert [message["id"] for message in held["messages"][::2]] == ["u1", "u2"]
        assert [each["id"] for each in running.thread("open-call")["waiting"]] == ["u2"]
        (call,) = running.thread("open-call")["calls"]
        held = client.do("answer", approved=True, digest=call["digest"], id=call["id"])
        assert held["messages"][1] == running.thread("open-call", "ai")["messages"][1]
        assert held["messages"][1]["parts"][-1]["state"] == "output-available"
        assert _different(running, client, client.do("come_back"), "after the answer") == []


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
