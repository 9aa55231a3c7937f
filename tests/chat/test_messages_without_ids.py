"""Messages that were posted without an id, by the admin for example: clients see one stable id of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections
from django.test.utils import CaptureQueriesContext

from helix_store import Post
from helix_store.actions.sessions import POST
from tests.chat.conftest import Chatting, events_of, run_input

Make = Callable[..., Chatting]


def _thread(site: Chatting, kind: str = "agui") -> dict[str, Any]:
    thread: dict[str, Any] = async_to_sync(site.json)("GET", f"threads/t/?format={kind}")
    return thread


def _said(site: Chatting) -> list[tuple[str, str]]:
    """The user's messages and the answers, each user's message with its id."""
    messages = _thread(site)["messages"]
    return [(each["id"] if each["role"] == "user" else "", each["content"]) for each in messages]


def _begun(site: Chatting) -> None:
    async_to_sync(site.post)("t", "u1", "one")
    site.drive("t")


def _posted(site: Chatting, content: Any = "two") -> Post:
    return site.session("t").post({"role": "user", "content": content})


def _send(site: Chatting, message: dict[str, Any], **more: Any) -> Any:
    body = {"id": "t", "messages": [message], **more}
    response = async_to_sync(site.request)("POST", "ai/", body)
    assert response.status_code == 200, response.content
    return response


def _snapshots(response: Any) -> list[list[dict[str, Any]]]:
    """The snapshots of messages in a response, which must not be empty."""

    async def body() -> bytes:
        return b"".join([part async for part in response.streaming_content])

    events = events_of(async_to_sync(body)())
    found = [event["messages"] for event in events if event["type"] == "MESSAGES_SNAPSHOT"]
    return [messages for messages in found if messages]


def test_a_message_has_the_same_id_before_and_after_its_reception(chatting: Make) -> None:
    site = chatting()
    _begun(site)
    POST.run(site.store.sessions, site.session("t").id, {"text": "two"})
    _posted(site, "three")
    waiting = [each["id"] for each in _thread(site)["waiting"]]
    assert len(set(waiting)) == 2
    response = async_to_sync(site.request)("GET", "agui/t/")
    site.drive("t")
    first, *_ = _snapshots(response)
    assert [each["id"] for each in first[2:]] == waiting
    assert _said(site)[2:] == [(waiting[0], "two"), (waiting[1], "three"), ("", "You said three.")]


def test_a_waiting_message_is_withdrawn_by_the_id_that_is_shown(chatting: Make) -> None:
    site = chatting()
    _begun(site)
    _posted(site)
    own_id = _thread(site)["waiting"][0]["id"]
    response = async_to_sync(site.request)("DELETE", f"threads/t/posts/{own_id}/")
    assert (response.status_code, _thread(site)["waiting"]) == (204, [])


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["by-default", "its-answer", "its-message", "without-messages"])
def test_its_answer_is_made_anew(chatting: Make, what: str) -> None:
    site = chatting()
    _begun(site)
    _posted(site)
    site.drive("t")
    before = _said(site)
    *_, message, answer = _thread(site, "ai")["messages"]
    named = {"its-answer": answer["id"], "its-message": message["id"]}.get(what)
    body = {"trigger": "regenerate-message", "messageId": named}
    if what == "without-messages":
        body["messages"] = []
    for _ in range(2):  # its id is stored from then on
        _send(site, message, **body)
        site.drive("t")
        assert _said(site) == before
        if named == answer["id"]:
            body["messageId"] = _thread(site, "ai")["messages"][-1]["id"]


@pytest.mark.parametrize("is_received", [True, False])
def test_it_is_edited(chatting: Make, is_received: bool) -> None:
    site = chatting()
    _begun(site)
    _posted(site)
    own_id = _thread(site)["waiting"][0]["id"]
    if is_received:
        site.drive("t")
    message = {"id": own_id, "role": "user", "parts": [{"type": "text", "text": "anew"}]}
    for _ in range(2):  # a repeat changes nothing
        _send(site, message, messageId=own_id)
    site.drive("t")
    assert _said(site)[2:] == [(own_id, "anew"), ("", "You said anew.")]


@pytest.mark.parametrize("address", ["agui/", "ai/", "threads/t/posts/"])
@pytest.mark.parametrize("way", ["waiting", "received", "made-anew", "appended"])
def test_a_request_that_ends_with_it_posts_nothing(chatting: Make, address: str, way: str) -> None:
    site = chatting()
    _begun(site)
    if way == "appended":
        site.session("t").say({"role": "user", "content": "two"})
    else:
        _posted(site)
    if way in ("received", "made-anew"):
        site.drive("t")
    if way == "made-anew":
        _send(site, _thread(site, "ai")["messages"][-2], trigger="regenerate-message")
        site.drive("t")
    thread = _thread(site)
    own_id = [each["id"] for each in (*thread["messages"], *thread["waiting"]) if each["role"] == "user"][-1]

    def send(content: str) -> int:
        part = {"type": "text", "text": content}
        body = {
            "agui/": run_input("t", own_id, content),
            "ai/": {"id": "t", "messages": [{"id": own_id, "role": "user", "parts": [part]}]},
            "threads/t/posts/": {"id": own_id, "content": content},
        }[address]
        status: int = async_to_sync(site.request)("POST", address, body).status_code
        return status

    assert send("two") == (201 if address.startswith("threads") else 200)
    assert send("something else") == 409
    assert _thread(site) == thread


def test_the_client_of_an_answer_does_not_outlast_the_next_message(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        seen.append(turn.client.state)
        with turn.step() as step:
            for call_id in turn.results:
                step.say({"role": "tool", "tool_call_id": call_id, "content": "4"})
            if turn.results or len(seen) == 3:
                step.end_turn()
            else:
                step.wait_for({"c": {"tool_name": "ask", "input": {}}})

    seen: list[Any] = []
    site = chatting(answer=answer)
    site.store.new_session(site.session("t").id, agent_type=site.chat.agent_type, user_id="ann")
    _posted(site)
    site.drive("t")
    result = {"id": "r", "role": "tool", "toolCallId": "c", "content": "4"}
    body = {**run_input("t"), "messages": [result], "state": {"n": 1}}
    async_to_sync(site.request)("POST", "agui/", body)
    site.drive("t")
    _posted(site)
    site.drive("t")
    assert seen == [None, {"n": 1}, None]


def test_a_thread_with_one_costs_one_statement_more(chatting: Make) -> None:
    def statements() -> int:
        with CaptureQueriesContext(connections[site.database.alias]) as queries:
            _thread(site)
        return len(queries)

    site = chatting()
    _begun(site)
    usual = statements()
    for _ in range(2):
        _posted(site)
        site.drive("t")
    assert statements() == usual + 1
