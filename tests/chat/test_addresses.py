"""The addresses under the mount: what they answer, and the errors before a response begins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import User
from django.db import DatabaseError, OperationalError, connections
from django.test import AsyncClient, AsyncRequestFactory, Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject

from helix_store import (
    ApprovalUsed,
    FencedOutError,
    HelixStoreError,
    IdempotencyConflict,
    IntegrityFault,
    LockLostError,
    NotSupportedOnBackend,
    OutcomeUnknown,
    SessionEnded,
    StaleStateError,
    Store,
    StoreBusy,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    StreamClosed,
    StreamTruncated,
    TenantMoved,
    UnsupportedIsolation,
)
from helix_store.contrib.chat import agui, reading, threads, views
from helix_store.contrib.chat.reading import join, open_feed, open_reasoning
from helix_store.contrib.chat.requests import Answered, error_response
from helix_store.contrib.chat.stored import entries
from helix_store.contrib.chat.threads import Activity, give_answers, newest_chunk
from tests.chat.conftest import Chatting, events_of, run_input
from tests.chat.held import held_by_ag_ui

Make = Callable[..., Chatting]


async def _drive(site: Chatting, thread: str = "t") -> None:
    # Each delta is a chunk.
    with override_settings(HELIX_STORE={"CHAT_FLUSH_MS": 0}):
        await sync_to_async(site.drive)(thread)


async def test_bad_input_is_refused_with_its_path(chatting: Make) -> None:
    site = chatting()
    data = {"type": "data-x", "data": 1}
    user = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}
    cells: list[tuple[str, str, Any, int, str]] = [
        ("POST", "agui/", b"no json", 400, ""),
        ("POST", "agui/", [], 400, ""),
        ("POST", "agui/", run_input("a/b"), 400, "/threadId"),
        ("POST", "agui/", run_input(""), 400, "/threadId"),
        ("POST", "agui/", run_input("x" * 256), 400, "/threadId"),
        ("POST", "agui/", run_input("t", ""), 400, "/messages/0/id"),
        ("POST", "agui/", run_input("t", "a/b"), 400, "/messages/0/id"),
        ("POST", "agui/", run_input("t", "\U0001f600" * 192), 400, "/messages/0/id"),
        ("POST", "threads/t/posts/", {"id": "\U0001f600" * 255, "content": "Hi"}, 400, "/id"),
        ("POST", "agui/", run_input("t", content=5), 400, "/messages/0/content"),
        ("POST", "agui/", run_input("t", content=[{"type": "image"}]), 400, "/messages/0/content"),
        ("POST", "agui/", {**run_input("t"), "messages": None}, 400, "/messages"),
        ("POST", "agui/", {**run_input("t"), "messages": ["?"]}, 400, "/messages/0"),
        ("POST", "agui/", run_input("t", tools={}), 400, "/tools"),
        ("POST", "agui/", run_input("t", resume=[{}]), 400, "/resume/0/interruptId"),
        ("POST", "agui/", run_input("t", resume=[{"interruptId": "c"}]), 400, "/resume/0/status"),
        (
            "POST",
            "agui/",
            run_input("t", resume=[{"interruptId": "c", "status": "resolved"}]),
            400,
            "/resume/0/payload/approved",
        ),
        (
            "POST",
            "agui/",
            run_input("t", resume=[{"interruptId": "c", "status": "cancelled", "metadata": "?"}]),
            404,
            "",
        ),
        (
            "POST",
            "agui/",
            run_input(
                "t",
                resume=[
                    {"interruptId": "c", "status": "resolved", "payload": {"approved": True, "digest": 5}}
                ],
            ),
            400,
            "/resume/0/payload/digest",
        ),
        ("POST", "agui/", run_input("t", context=[float("nan")]), 400, ""),
        ("POST", "agui/", b'{"threadId": "t", "runId": "r", "messages": [], "state": 1e999}', 400, ""),
        ("POST", "agui/", run_input(".."), 400, "/threadId"),
        ("GET", "agui/unknown/", None, 404, ""),
        ("POST", "ai/", {"messages": [user]}, 400, "/id"),
        ("POST", "ai/", {"id": "a/b", "messages": [user]}, 400, "/id"),
        ("POST", "ai/", {"id": "t", "messages": []}, 400, "/messages"),
        ("POST", "ai/", {"id": "t", "messages": ["?"]}, 400, "/messages/0"),
        ("POST", "ai/", {"id": "t", "messages": [user], "trigger": "?"}, 400, "/trigger"),
        ("POST", "ai/", {"id": "t", "message": {**user, "id": ""}}, 400, "/message/id"),
        ("POST", "ai/", {"id": "t", "message": {**user, "parts": []}}, 400, "/message/parts"),
        ("POST", "ai/", {"id": "t", "message": {**user, "parts": [data, data]}}, 400, "/message/parts"),
        (
            "POST",
            "ai/",
            {"id": "t", "message": {**user, "parts": [data]}, "messageId": "u"},
            400,
            "/message/parts",
        ),
        ("POST", "ai/", {"id": "t", "message": {**user, "role": "system"}}, 400, "/message/role"),
        ("GET", "ai/unknown/stream", None, 404, ""),
        ("GET", "threads/unknown/", None, 404, ""),
        ("GET", "threads/unknown/?format=xml", None, 400, "/format"),
        ("GET", "threads/?cursor=x", None, 400, "/cursor"),
        ("GET", "threads/?limit=0", None, 400, "/limit"),
        ("PATCH", "threads/unknown/", {"title": "A"}, 404, ""),
        ("PATCH", "threads/unknown/", {"title": 1}, 400, "/title"),
        ("DELETE", "threads/unknown/", None, 404, ""),
        ("POST", "threads/unknown/stop/", None, 404, ""),
        ("POST", "threads/t/posts/", {"id": "", "content": "Hi"}, 400, "/id"),
        ("POST", "threads/t/posts/", {"id": "u"}, 400, "/content"),
        ("DELETE", "threads/unknown/posts/u/", None, 404, ""),
        ("POST", "threads/unknown/calls/c/", {"result": 1}, 404, ""),
        ("POST", "threads/unknown/calls/c/", {"approved": "yes"}, 400, "/approved"),
        ("POST", "threads/unknown/calls/c/", {"approved": True}, 400, "/digest"),
        ("POST", "threads/unknown/calls/c/", {}, 400, "/approved"),
        ("POST", "threads/unknown/calls/c/", {"result": 1, "error": "x"}, 400, "/error"),
        ("POST", "threads/unknown/calls/c/", {"error": 1}, 400, "/error"),
        ("PUT", "threads/", None, 405, ""),
    ]
    wrong = []
    for method, address, body, status, path in cells:
        response = await site.request(method, address, body)
        told = json.loads(response.content)
        if (response.status_code, told.get("path")) != (status, path) or set(told) != {
            "code",
            "message",
            "path",
        }:
            wrong.append((method, address, body, response.status_code, told))
    assert not wrong, "\n".join(map(str, wrong))
    assert site.runs == []


async def test_bad_input_to_a_thread_is_refused_with_its_path(chatting: Make) -> None:
    """Only a body that is no JSON object at all has no path: see the table before."""

    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            step.say({"role": "assistant", "content": "May I?"})
            step.ask_approval("a", "refund", {"euros": 5})
            step.wait_for({"c": {"tool_name": "where", "input": {}}})

    site = chatting(answer=answer)
    await site.post("t", "u1")
    await _drive(site)
    calls = {call["id"]: call for call in (await site.json("GET", "threads/t/"))["calls"]}
    decision = {"approved": True, "digest": calls["a"]["digest"]}

    def resumed(call_id: str, status: str = "resolved", **payload: Any) -> dict[str, Any]:
        entry = {"interruptId": call_id, "status": status, "payload": {**decision, **payload}}
        return {"threadId": "t", "runId": "r", "messages": [], "resume": [entry]}

    def continued(call_id: str, **approval: Any) -> dict[str, Any]:
        own = {"id": "x", "approved": True, "descriptor": {"digest": decision["digest"]}, **approval}
        part = {"type": "tool-refund", "toolCallId": call_id, "state": "approval-responded", "approval": own}
        return {"id": "t", "messages": [{"id": "m", "role": "assistant", "parts": [part]}]}

    part = "/messages/0/parts/0"
    cells: list[tuple[str, str, Any, str]] = [
        ("GET", "agui/%0A/", None, "/thread"),
        ("GET", "ai/%0A/stream", None, "/thread"),
        ("GET", "ai/t/stream?from=x", None, "/from"),
        ("GET", "threads/?q=%00", None, "/q"),
        ("GET", "threads/?cursor=zz", None, "/cursor"),
        ("GET", "threads/%0A/", None, "/thread"),
        ("POST", "threads/%0A/stop/", None, "/thread"),
        ("DELETE", "threads/t/posts/%0A/", None, "/post"),
        ("PATCH", "threads/t/", {"title": "a\0b"}, "/title"),
        ("POST", "threads/t/calls/%0A/", {"result": 1}, "/call"),
        ("POST", "threads/t/calls/a/", {}, "/approved"),
        ("POST", "threads/t/calls/a/", {"result": 1}, "/result"),
        ("POST", "threads/t/calls/a/", {"error": "x"}, "/error"),
        ("POST", "threads/t/calls/a/", {**decision, "input": {"euros": 6}}, "/input"),
        ("POST", "threads/t/calls/a/", {**decision, "digest": "\ud800"}, "/digest"),
        ("POST", "threads/t/calls/c/", decision, "/approved"),
        ("POST", "agui/", resumed("unknown"), "/resume/0/interruptId"),
        ("POST", "agui/", resumed("unknown", "cancelled"), "/resume/0/interruptId"),
        ("POST", "agui/", resumed("a", input={"euros": 6}), "/resume/0/payload/input"),
        ("POST", "agui/", resumed("a", digest=None), "/resume/0/payload/digest"),
        ("POST", "agui/", resumed("a", "cancelled", digest="\ud800"), "/resume/0/payload/digest"),
        ("POST", "ai/", continued("unknown"), f"{part}/toolCallId"),
        ("POST", "ai/", continued("a", approved=1), f"{part}/approval/approved"),
        ("POST", "ai/", continued("a", descriptor={}), f"{part}/approval/digest"),
    ]
    wrong = []
    for method, address, body, path in cells:
        response = await site.request(method, address, body)
        told: Any = None if response.streaming else json.loads(response.content)
        if response.status_code != 400 or told["path"] != path:
            wrong.append((method, address, body, response.status_code, told))
    response = await site.request("GET", "agui/t/", **{"Last-Event-ID": "x"})
    if json.loads(response.content)["path"] != "/Last-Event-ID":
        wrong.append(response.content)
    assert not wrong, "\n".join(map(str, wrong))


async def test_who_may_use_a_chat(chatting: Make) -> None:
    site = chatting(may_run=lambda request: {"1": True, "2": False}.get(request.headers.get("X-May"), 7.2))
    wrong = {}
    for may, owner, status in (("1", None, 401), ("2", "ann", 403), ("3", "ann", 429)):
        given = {"X-May": may}
        response = await site.request("POST", "agui/", run_input("t"), owner=owner, **given)
        if response.status_code != status:
            wrong[may] = response.status_code
        if status == 429:
            # A client that comes back after 7 seconds is refused again.
            assert response.headers["Retry-After"] == "8"
    assert not wrong
    assert (await site.request("GET", "threads/", owner=None)).status_code == 401


async def test_another_owners_thread_is_unknown(chatting: Make) -> None:
    site = chatting()
    await site.post("t", "u1")
    own = await site.request("GET", "threads/t/")
    others = await site.request("GET", "threads/t/", owner="bob")
    unknown = await site.request("GET", "threads/none/", owner="bob")
    assert (own.status_code, others.status_code) == (200, 404)
    assert json.loads(others.content)["code"] == json.loads(unknown.content)["code"]
    assert (await site.json("GET", "threads/", owner="bob"))["threads"] == []


async def test_no_address_of_a_thread_begins_one(chatting: Make) -> None:
    """An unknown thread and another owner's are one: nothing is stored, whoever asks."""
    site = chatting()
    await site.post("t", "u1")
    before = await site.json("GET", "threads/t/")
    cells: list[tuple[str, str, Any]] = [
        ("GET", "agui/{}/", None),
        ("GET", "ai/{}/stream", None),
        ("GET", "threads/{}/", None),
        ("PATCH", "threads/{}/", {"title": "A"}),
        ("DELETE", "threads/{}/", None),
        ("POST", "threads/{}/stop/", None),
        ("POST", "threads/{}/posts/", {"id": "u2", "content": "Hi"}),
        ("POST", "threads/{}/posts/", {"id": "post-1", "content": "Hi"}),
        ("POST", "threads/{}/posts/", {"content": "Hi"}),
        ("DELETE", "threads/{}/posts/u1/", None),
        ("POST", "threads/{}/calls/c/", {"result": 1}),
    ]
    wrong = []
    for method, address, body in cells:
        told = []
        for thread in ("t", "unknown"):
            response = await site.request(method, address.format(thread), body, owner="bob")
            told.append((response.status_code, json.loads(response.content)["code"]))
        if told[0][0] != 404 or told[0] != told[1]:
            wrong.append((method, address, body, told))
    assert not wrong, "\n".join(map(str, wrong))
    assert (await site.json("GET", "threads/", owner="bob"))["threads"] == []
    assert await site.json("GET", "threads/t/") == before
    assert site.runs == [site.session("t").id]


async def test_the_owner_is_by_default_the_signed_in_user(chatting: Make) -> None:
    site = chatting(owner=None)
    response = await site.request("GET", "threads/", owner=None)
    assert response.status_code == 401
    user = User(pk=417, username="ann")

    class SignedIn:
        def __init__(self, get_response: Any) -> None:
            self.get_response = get_response

    async def auser() -> User:
        return user

    request = AsyncRequestFactory().post("/", json.dumps(run_input("t")), content_type="application/json")
    request.auser = auser
    view = next(each.callback for each in site.chat.urls[0] if each.name == "agui")
    assert (await view(request)).status_code == 200
    found = await sync_to_async(lambda: site.session("t", "417").posts().items)()
    assert found[0].author == "user:417"


async def test_a_repeat_joins_and_another_message_conflicts(chatting: Make) -> None:
    site = chatting()
    await site.post("t", "u1")
    await _drive(site)
    first = await site.events("POST", "agui/", run_input("t"))
    again = await site.events("POST", "agui/", run_input("t"))
    assert [event["type"] for event in first] == [event["type"] for event in again]
    assert len((await site.json("GET", "threads/t/"))["messages"]) == 2
    other = await site.request("POST", "agui/", run_input("t", content="Else"))
    assert (other.status_code, json.loads(other.content)["code"]) == (409, "idempotency_conflict")


async def test_a_repeat_with_another_state_of_the_client_joins(chatting: Make) -> None:
    site = chatting()
    for number in range(2):
        # By now, the client has the state that the first response began with.
        run = run_input(
            "t", state={"number": number}, context=[{"description": "time", "value": f"{number}"}]
        )
        response = await site.request("POST", "agui/", run)
        assert response.status_code == 200
        await response.streaming_content.aclose()
    await _drive(site)
    assert (await site.request("POST", "agui/", run)).status_code == 200
    assert len((await site.json("GET", "threads/t/"))["messages"]) == 2


async def test_the_metadata_of_a_ui_message_is_kept(chatting: Make) -> None:
    site = chatting()
    parts = [{"type": "text", "text": "Hello"}]
    message = {"id": "u1", "role": "user", "metadata": {"sent": "today"}, "parts": parts}
    await site.request("POST", "ai/", {"id": "t", "messages": [message]})
    await _drive(site)
    assert (await site.json("GET", "threads/t/?format=ai"))["messages"][0] == message
    assert (await site.json("GET", "threads/t/"))["messages"][1]["content"] == "You said Hello."


async def test_data_of_a_user_is_stored_and_no_model_sees_it(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        seen.extend(turn.messages())
        with turn.step() as step:
            step.end_turn()

    seen: list[Any] = []
    site = chatting(answer=answer)
    text, data = {"type": "text", "text": "Here"}, {"type": "data-place", "data": {"city": "Łódź"}}
    message = {"id": "u1", "role": "user", "parts": [text, data]}
    for _ in range(2):  # a repeat joins
        response = await site.request("POST", "ai/", {"id": "t", "messages": [message]})
        assert response.status_code == 200, response.content
    await _drive(site)
    thread = await site.json("GET", "threads/t/?format=ai")
    assert (thread["title"], thread["messages"]) == ("Here", [message])
    assert (await site.json("GET", "threads/t/"))["messages"][0]["content"] == [text]
    assert seen == [{"role": "user", "content": [text]}]


async def test_a_thread_begins_with_any_text(chatting: Make) -> None:
    site = chatting()
    for number, text in enumerate(("a\0b", "\ud83d", "")):
        await site.post(f"t{number}", "u1", text)
        assert (await site.json("GET", f"threads/t{number}/"))["waiting"][0]["content"] == text
    titles = [each["title"] for each in (await site.json("GET", "threads/"))["threads"]]
    assert titles == [None, None, "ab"]


def test_a_turn_that_has_said_nothing_is_stopped(chatting: Make) -> None:
    site = chatting()
    async_to_sync(site.post)("t", "u1")
    with site.session("t").turn() as turn:
        assert async_to_sync(site.json)("POST", "threads/t/stop/") == {"stopped": True}
        with turn.step():
            pytest.fail("The turn is to be interrupted.")


async def test_an_idle_thread_is_a_snapshot_and_its_outcome(chatting: Make) -> None:
    site = chatting()
    await site.post("t", "u1")
    await _drive(site)
    response = await site.request("GET", "agui/t/")
    assert response.headers["Cache-Control"] == "private, no-store"
    assert response.headers["X-Accel-Buffering"] == "no"
    events = events_of(b"".join([part async for part in response.streaming_content]))
    assert [event["type"] for event in events] == [
        *("RUN_STARTED", "STATE_SNAPSHOT", "MESSAGES_SNAPSHOT", "RUN_FINISHED"),
    ]
    assert events[2]["messages"] == (await site.json("GET", "threads/t/"))["messages"]
    assert (await site.request("GET", "ai/t/stream")).status_code == 204


async def test_the_ai_sdk_gets_its_headers_and_its_end(chatting: Make) -> None:
    site = chatting()
    body = {"id": "t", "messages": [{"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}]}
    response = await site.request("POST", "ai/", body)
    assert response.headers["x-vercel-ai-ui-message-stream"] == "v1"
    await _drive(site)
    text = b"".join([part async for part in response.streaming_content])
    assert text.endswith(b"data: [DONE]\n\n")
    parts = events_of(text)
    assert [part["type"] for part in parts] == [
        *("start", "start-step", "text-start", "text-delta", "text-end", "finish-step", "finish"),
    ]
    (_, answer) = (await site.json("GET", "threads/t/?format=ai"))["messages"]
    assert answer["id"] == parts[0]["messageId"]


async def test_a_thread_is_listed_renamed_and_deleted(chatting: Make) -> None:
    site = chatting(title=lambda message: f"About {message['content']}")
    for number in range(5):
        await site.post(f"t{number}", f"u{number}", f"topic {number}")
    found, cursor = [], ""
    while True:
        page = await site.json("GET", f"threads/?limit=2&cursor={cursor}")
        found += page["threads"]
        if not page["cursor"]:
            break
        cursor = page["cursor"]
    assert [each["id"] for each in found] == ["t4", "t3", "t2", "t1", "t0"]
    assert found[0]["title"] == "About topic 4"
    assert [each["id"] for each in (await site.json("GET", "threads/?q=TOPIC 2"))["threads"]] == ["t2"]
    assert (await site.request("PATCH", "threads/t2/", {"title": "Mine"})).status_code == 200
    assert (await site.json("GET", "threads/t2/"))["title"] == "Mine"
    assert (await site.request("DELETE", "threads/t2/")).status_code == 204
    assert (await site.request("GET", "threads/t2/")).status_code == 404


async def test_branches_of_a_thread_are_not_listed_as_the_thread(chatting: Make) -> None:
    site = chatting()
    for number in range(3):
        await site.post(f"t{number}", "u1")
        await _drive(site, f"t{number}")
        for _ in range(2):
            await sync_to_async(site.session(f"t{number}").branch)()
    # Somebody may also choose an id like that of a thread.
    await sync_to_async(site.session("t1").branch)(new_session_id=site.chat.session_id("ann", "new"))
    page: dict[str, Any] = {"cursor": ""}
    pages = []
    while page["cursor"] is not None:
        page = await site.json("GET", f"threads/?limit=1&cursor={page['cursor']}")
        pages.append([each["id"] for each in page["threads"]])
    assert pages == [[], ["t2"], ["t1"], ["t0"]]


async def test_a_long_title_is_shortened_when_a_thread_begins(chatting: Make) -> None:
    site = chatting(title=lambda message: message["content"] * 3_000)
    await site.post("t", "u1", "Łó")
    title = (await site.json("GET", "threads/t/"))["title"]
    assert title.startswith("ŁóŁó")
    assert 4_090 < len(title.encode()) <= 4_096
    # A title that a person has chosen is theirs to shorten.
    assert (await site.request("PATCH", "threads/t/", {"title": "Ł" * 3_000})).status_code == 413


async def test_a_waiting_message_is_listed_and_withdrawn(chatting: Make) -> None:
    site = chatting()
    await site.post("t", "u1")
    thread = await site.json("GET", "threads/t/")
    assert thread["status"] == "running"
    assert [each["id"] for each in thread["waiting"]] == ["u1"]
    assert (await site.request("DELETE", "threads/t/posts/u1/")).status_code == 204
    assert (await site.request("DELETE", "threads/t/posts/u1/")).status_code == 404
    thread = await site.json("GET", "threads/t/")
    assert (thread["status"], thread["waiting"]) == ("idle", [])


async def test_an_approval_is_answered_with_its_digest(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        if turn.results:
            with turn.step() as step:
                approved = step.use_approval("c")
                step.say({"role": "tool", "tool_call_id": "c", "content": str(approved.input["euros"])})
                step.end_turn()
            return
        with turn.step() as step:
            step.say({"role": "assistant", "content": "May I?"})
            step.ask_approval("c", "refund", {"euros": 500}, editable=True)

    site = chatting(answer=answer)
    await site.post("t", "u1")
    await _drive(site)
    thread = await site.json("GET", "threads/t/")
    (call,) = thread["calls"]
    assert thread["status"] == "waiting"
    assert (call["id"], call["name"], call["input"]) == ("c", "refund", {"euros": 500})
    # The client is told of a call that no message makes.
    assert thread["messages"][-1]["toolCalls"][0]["id"] == "c"
    wrong = await site.request("POST", "threads/t/calls/c/", {"approved": True, "digest": "0" * 64})
    assert (wrong.status_code, json.loads(wrong.content)["code"]) == (409, "changed")
    unknown = await site.request("POST", "threads/t/calls/d/", {"approved": True, "digest": "0" * 64})
    assert unknown.status_code == 404
    assert (await site.request("POST", "threads/t/calls/c/", {"result": 1})).status_code == 400
    edited = {"approved": True, "digest": call["digest"], "input": {"euros": 300}}
    assert (await site.json("POST", "threads/t/calls/c/", edited))["accepted"] is True
    assert (await site.json("POST", "threads/t/calls/c/", edited))["accepted"] is False
    assert len(site.runs) == 2
    await _drive(site)
    assert (await site.json("GET", "threads/t/"))["messages"][-1]["content"] == "300"


@pytest.mark.parametrize("owner", ["ann", "user:7"])
async def test_an_owner_of_any_text_answers_unless_it_is_the_requester(chatting: Make, owner: str) -> None:
    """Text in the stored form of a Django user is not taken for one."""

    def answer(turn: Any, out: Any) -> None:
        requester = {"own": turn.state.user_id, "others": "bob"}[turn.messages()[-1]["content"]]
        with turn.step() as step:
            step.ask_approval("c", "refund", {}, requester=requester)

    site = chatting(answer=answer)
    wrong = {}
    for thread, status in (("own", 403), ("others", 200)):
        posted = await site.request("POST", "agui/", run_input(thread, content=thread), owner=owner)
        assert posted.status_code == 200, posted.content
        await posted.streaming_content.aclose()
        await sync_to_async(site.drive)(thread, owner)
        (call,) = (await site.json("GET", f"threads/{thread}/", owner=owner))["calls"]
        given = {"approved": True, "digest": call["digest"]}
        response = await site.request("POST", f"threads/{thread}/calls/c/", given, owner=owner)
        if response.status_code != status:
            wrong[thread] = response.content
    assert wrong == {}
    session = site.session("others", owner)
    states = ("waiting", "received")
    (post,) = (await sync_to_async(site.store.sessions.list_posts)(session.id, states=states)).items
    call = (await sync_to_async(session.load)()).pending_client_tool_calls["c"]
    actor = "owner:user:7" if owner == "user:7" else owner
    assert (post.author, call["actors"]) == (actor, [actor])


async def test_a_thread_that_has_ended_is_gone(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            step.finish({"answer": 42})

    site = chatting(answer=answer)
    await site.post("t", "u1")
    await _drive(site)
    response = await site.request("POST", "agui/", run_input("t", "u2"))
    assert (response.status_code, json.loads(response.content)["code"]) == (410, "session_ended")
    assert (await site.events("GET", "agui/t/"))[-1]["result"] == {"answer": 42}


@pytest.mark.parametrize("status", ["completed", "failed"])
@pytest.mark.parametrize("is_approval", [True, False], ids=["approval", "result"])
async def test_calls_of_a_thread_that_has_ended_are_gone(
    chatting: Make, is_approval: bool, status: str
) -> None:
    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            step.say({"role": "assistant", "content": "May I?"})
            if is_approval:
                step.ask_approval("c", "refund", {})
            else:
                step.wait_for({"c": {"tool_name": "refund"}})

    site = chatting(answer=answer)
    await site.post("t", "u1")
    await _drive(site)
    (call,) = (await site.json("GET", "threads/t/"))["calls"]
    messages = (await site.json("GET", "threads/t/?format=ai"))["messages"]
    (part,) = (part for part in messages[-1]["parts"] if "toolCallId" in part)
    decision = {"approved": True, "digest": call["digest"]}
    run: dict[str, Any] = {"threadId": "t", "runId": "r", "messages": []}
    if is_approval:
        part |= {"state": "approval-responded", "approval": {**part["approval"], "approved": True}}
        run["resume"] = [{"interruptId": "c", "status": "resolved", "payload": decision}]
    else:
        part |= {"state": "output-available", "output": 4}
        run["messages"] = [{"id": "r", "role": "tool", "toolCallId": "c", "content": "4"}]
    session = site.session("t")
    before = await sync_to_async(session.load)()
    await sync_to_async(site.store.sessions.update_status)(session.id, status)
    for address, body in (
        ("threads/t/calls/c/", decision if is_approval else {"result": 4}),
        ("agui/", run),
        ("ai/", {"id": "t", "messages": messages}),
    ):
        response = await site.request("POST", address, body)
        assert (response.status_code, json.loads(response.content)["code"]) == (410, "session_ended"), address
    thread = await site.json("GET", "threads/t/")
    assert (thread["status"], thread["calls"]) == (status, [])
    shown = (await site.json("GET", "threads/t/?format=ai"))["messages"][-1]["parts"]
    assert [part["state"] for part in shown if "toolCallId" in part] == ["input-available"]
    end = (await site.events("GET", "agui/t/"))[-1]
    assert end["type"] == ("RUN_ERROR" if status == "failed" else "RUN_FINISHED")
    assert not end.get("outcome", {}).get("interrupts")
    # The session may end after a request has loaded it.
    answered = Answered(call_id="c", path="", id_path="", **(decision if is_approval else {"result": 4}))
    with pytest.raises(SessionEnded):
        await sync_to_async(give_answers)(
            site.store, before, [answered], calls=before.pending_client_tool_calls, actor="ann"
        )


async def test_an_answer_that_is_repeated_after_the_end_joins(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            if turn.results:
                step.finish({"answer": 42})
            else:
                step.ask_approval("c", "refund", {})

    site = chatting(answer=answer)
    await site.post("t", "u1")
    await _drive(site)
    (call,) = (await site.json("GET", "threads/t/"))["calls"]
    decision = {"approved": True, "digest": call["digest"]}
    resume = [{"interruptId": "c", "status": "resolved", "payload": decision}]
    body = {"threadId": "t", "runId": "r", "messages": [], "resume": resume}
    response = await site.request("POST", "agui/", body)
    await _drive(site)
    await response.streaming_content.aclose()
    assert (await site.events("POST", "agui/", body))[-1]["result"] == {"answer": 42}


@pytest.mark.parametrize("function", ["owner", "tenant", "may_run"])
async def test_a_project_whose_database_is_down_is_unavailable(chatting: Make, function: str) -> None:
    async def asks(request: Any) -> Any:
        raise OperationalError("connection refused")

    site = chatting(**{function: asks})
    response = await site.request("POST", "threads/t/posts/", {"id": "u1", "content": "Hi"})
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert json.loads(response.content)["code"] == "store_unavailable"


async def test_a_signed_in_user_whose_database_is_down_is_unavailable(chatting: Make) -> None:
    def user() -> Any:
        raise OperationalError("connection refused")

    site = chatting(owner=None)
    request: Any = AsyncRequestFactory().get("/")
    request.user = SimpleLazyObject(user)
    view = next(each.callback for each in site.chat.urls[0] if each.name == "threads")
    response = await view(request)
    assert (response.status_code, json.loads(response.content)["code"]) == (503, "store_unavailable")


async def test_a_missing_table_of_a_project_is_a_fault_to_report(chatting: Make) -> None:
    def owner(request: Any) -> Any:
        with connections[site.database.alias].cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table")

    site = chatting(owner=owner)
    with pytest.raises(DatabaseError):
        await site.request("GET", "threads/")


def test_errors_that_a_repeated_request_survives_ask_for_one() -> None:
    of_status: dict[int, list[HelixStoreError]] = {
        409: [IdempotencyConflict("a"), ApprovalUsed("c"), StreamClosed(), StreamTruncated(3)],
        410: [SessionEnded("s", "failed")],
        500: [IntegrityFault(), NotSupportedOnBackend(), UnsupportedIsolation()],
        503: [
            *(StoreBusy(), StoreFull(), StoreTimeout(), StoreUnavailable(), TenantMoved()),
            *(OutcomeUnknown("o"), StaleStateError(1, 2), LockLostError(), FencedOutError(1, 2)),
        ],
    }
    told = {
        status: {(response.status_code, "Retry-After" in response.headers) for response in responses}
        for status, responses in ((key, map(error_response, errors)) for key, errors in of_status.items())
    }
    assert told == {status: {(status, status == 503)} for status in of_status}


def test_a_stream_needs_asgi(chatting: Make) -> None:
    site = chatting()
    with override_settings(ROOT_URLCONF=site.urls):
        client, headers = Client(), {"X-Owner": "ann"}
        for address, body in (("agui/", run_input("t")), ("ai/", {})):
            response = client.post(f"/chat/{address}", body, content_type="application/json", headers=headers)
            assert (response.status_code, response.json()["code"]) == (501, "needs_asgi")
        assert client.get("/chat/threads/", headers=headers).json() == {"threads": [], "cursor": None}


async def test_a_session_authenticated_request_needs_a_csrf_token(chatting: Make) -> None:
    site = chatting()
    with override_settings(ROOT_URLCONF=site.urls):
        client = AsyncClient(enforce_csrf_checks=True)
        response = await client.post(
            "/chat/agui/", run_input("t"), content_type="application/json", headers={"X-Owner": "ann"}
        )
    assert response.status_code == 403


async def test_a_large_request_is_refused(chatting: Make) -> None:
    site = chatting()
    with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=100):
        response = await site.request("POST", "agui/", run_input("t", content="x" * 200))
    assert (response.status_code, json.loads(response.content)["code"]) == (413, "too_large")


def _statements(site: Chatting, address: str, body: Any) -> list[str]:
    """The statements of a request, which docs/chat-reference.md counts."""
    with CaptureQueriesContext(connections[site.database.alias]) as queries:
        response = async_to_sync(site.request)("POST", address, body)
    assert response.status_code == 200, response.content
    transactions = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE")
    return [query["sql"] for query in queries if not query["sql"].startswith(transactions)]


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("history", [[], ["tool"]], ids=["", "results"])
def test_the_statements_of_a_message(chatting: Make, begins: bool, history: list[str]) -> None:
    site = chatting()
    if not begins:
        async_to_sync(site.post)("t", "u0")
        site.drive("t")
    body = run_input("t")
    body["messages"] = [
        *({"id": "r", "role": role, "toolCallId": "c"} for role in history),
        *body["messages"],
    ]
    sent = _statements(site, "agui/", body)
    assert len(sent) <= (11 if begins else 6), "\n".join(sql[:150] for sql in sent)


@pytest.mark.parametrize(
    ("address", "client", "expected"),
    [
        ("agui/", {}, 6),
        ("agui/", {"tools": [{"name": "x"}]}, 9),
        ("ai/", {}, 6),
        ("threads/t/calls/c/", {}, 4),
    ],
)
def test_the_statements_of_an_answer(chatting: Make, address: str, client: Any, expected: int) -> None:
    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            step.say({"role": "assistant", "content": "May I?"})
            step.ask_approval("c", "refund", {})

    site = chatting(answer=answer)
    async_to_sync(site.post)("t", "u1")
    site.drive("t")
    (call,) = async_to_sync(site.json)("GET", "threads/t/")["calls"]
    messages = async_to_sync(site.json)("GET", "threads/t/?format=ai")["messages"]
    (part,) = (part for part in messages[-1]["parts"] if "toolCallId" in part)
    part |= {"state": "approval-responded", "approval": {**part["approval"], "approved": True}}
    decision = {"approved": True, "digest": call["digest"]}
    resume = [{"interruptId": "c", "status": "resolved", "payload": decision}]
    body = {
        "agui/": {"threadId": "t", "runId": "r", "messages": [], "resume": resume, **client},
        "ai/": {"id": "t", "messages": messages},
    }.get(address, decision)
    sent = _statements(site, address, body)
    assert len(sent) <= expected, "\n".join(sql[:150] for sql in sent)


@pytest.mark.parametrize(
    "more", [{"trigger": "regenerate-message"}, {"messageId": "u1"}], ids=["made-anew", "edited"]
)
def test_the_statements_of_an_answer_that_is_made_anew(chatting: Make, more: dict[str, str]) -> None:
    site = chatting()
    async_to_sync(site.post)("t", "u1")
    site.drive("t")
    user = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Anew"}]}
    messages = [user] if "messageId" in more else []
    sent = _statements(site, "ai/", {"id": "t", "messages": messages, **more})
    expected = 49 if site.database.vendor == "sqlite" else 46
    assert len(sent) <= expected, "\n".join(sql[:150] for sql in sent)


def test_a_store_of_the_chat_has_its_database_and_tenant(chatting: Make) -> None:
    site = chatting()
    assert site.chat.store(site.database.tenant) == Store(site.database.alias, tenant=site.database.tenant)


def _talkative(turn: Any, out: Any) -> None:
    for number in range(5):
        out.reasoning(f"{number} ")
    out.text("One ")
    out.text("two.")
    with turn.step() as step:
        step.say({"role": "assistant", "content": "One two."})
        step.end_turn()


async def _events_with_ids(
    site: Chatting, address: str, **headers: str
) -> list[tuple[int | None, dict[str, Any]]]:
    response = await site.request("GET", address, **headers)
    text = b"".join([part async for part in response.streaming_content]).decode()
    found, own_id = [], None
    for line in text.split("\n"):
        if line.startswith("id: "):
            own_id = int(line[4:])
        elif line.startswith("data: {"):
            found.append((own_id, json.loads(line[6:])))
            own_id = None
    return found


@pytest.mark.thorough
async def test_a_client_goes_on_after_any_chunk(chatting: Make) -> None:
    site = chatting(answer=_talkative)
    await site.post("t", "u1")
    await _drive(site)
    session_id = site.chat.session_id("ann", "t")
    chunks = await sync_to_async(site.store.streams.read_after)(session_id, 0)
    wrong = {}
    for seen in range(1, len(chunks) + 1):
        followed = await _events_with_ids(site, "agui/t/", **{"Last-Event-ID": str(seen)})
        deltas = "".join(event["delta"] for _, event in followed if event["type"].endswith("_CONTENT"))
        expected = "".join(each.chunk["d"] for each in chunks if each.sequence > seen and "d" in each.chunk)
        types = [event["type"] for _, event in followed]
        is_framed = types[0] == "RUN_STARTED" and types[-1] == "RUN_FINISHED"
        if deltas != expected or not is_framed or "MESSAGES_SNAPSHOT" in types:
            wrong[seen] = (types, deltas, expected)
    assert not wrong


async def test_a_response_that_waits_gets_every_chunk_of_a_long_write(chatting: Make) -> None:
    """The process keeps fewer of the newest chunks than one write may have."""
    site = chatting()
    await site.post("t", "u1")
    await _drive(site)
    session_id, streams = site.session("t").id, site.store.streams
    position, _ = await sync_to_async(newest_chunk)(site.store, session_id)
    feed = open_feed(site.store, session_id, position)
    try:
        waiting = asyncio.create_task(feed.after(position, 30))
        await asyncio.sleep(0)  # it waits
        chunks = [{"type": "text", "d": f"{number}"} for number in range(600)]
        last = await sync_to_async(streams.write_sync)(session_id, chunks)
        found = list(await waiting)
        while found[-1].sequence < last:
            found += await feed.after(found[-1].sequence, 30)
    finally:
        await feed.close()
    assert [seen.chunk for seen in found] == chunks


async def test_data_reaches_a_response_that_is_behind_the_turn(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.data("lasting", 1)
        out.data("transient", 2, transient=True)
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Yes."})
            step.end_turn()

    site = chatting(answer=answer)
    message = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Hello"}]}
    for address, thread, body in (
        ("agui/", "t", run_input("t")),
        ("ai/", "other", {"id": "other", "messages": [message]}),
    ):
        response = await site.request("POST", address, body)
        await _drive(site, thread)  # the response reads nothing before the end of the turn
        events = events_of(b"".join([part async for part in response.streaming_content]))
        told = [(event["name"], event["value"]) for event in events if event["type"] == "CUSTOM"]
        told += [(event["type"][5:], event["data"]) for event in events if event["type"].startswith("data-")]
        assert sorted(told) == [("lasting", 1), ("transient", 2)], address


async def test_a_client_that_comes_back_drops_reasoning_that_was_not_stored(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.reasoning("Well")
        raise ValueError

    site = chatting(answer=answer)
    await site.post("t", "u1")
    await _drive(site)
    events = await site.events("GET", "agui/t/")
    shown = [event["messages"] for event in events if event["type"] == "MESSAGES_SNAPSHOT"]
    assert [[message["role"] for message in each] for each in shown] == [[], ["assistant"], [], ["user"]]
    assert events[-1]["type"] == "RUN_ERROR"


def test_a_client_that_comes_to_a_step_whose_first_chunks_were_pruned_begins_with_the_others(
    chatting: Make,
) -> None:
    found: list[list[str]] = []

    def answer(turn: Any, out: Any) -> None:
        for number in range(5):
            out.reasoning(f"{number} ")
            turn.writer.flush()
        store = site.chat.store(site.database.tenant)
        joined = join(store, turn.session.id)
        async_to_sync(store.streams.prune)(older_than=timedelta(0), keep_chunks=2)
        with pytest.raises(StreamTruncated):
            store.streams.read_after(turn.session.id, joined.start)
        found.append(open_reasoning(store, turn.session.id, joined))
        with turn.step() as step:
            step.end_turn()

    site = chatting(answer=answer)
    async_to_sync(site.post)("t", "u1")
    site.drive("t")
    assert [len(each) for each in found] == [1]


@pytest.mark.parametrize("joins", ["with its message", "with a reload"])
async def test_an_answer_that_is_stored_before_it_is_read_is_streamed(
    chatting: Make, monkeypatch: pytest.MonkeyPatch, joins: str
) -> None:
    """A snapshot holds no message that is streamed after it, although the turn is over when it is made."""

    def answer(turn: Any, out: Any) -> None:
        while turn.is_active:
            call_id = f"call-{turn.state.step_count}"
            call = {"name": "look", "arguments": '{"a": 1}'}
            out.reasoning("Hm")
            out.tool_call(call_id, "look", {"a": 1})
            with turn.step() as step:
                calls = [{"id": call_id, "type": "function", "function": call}]
                step.say({"role": "assistant", "content": "", "tool_calls": calls})
                step.say({"role": "tool", "tool_call_id": call_id, "content": "found"})
            out.text("Done.")
            with turn.step() as step:
                step.say({"role": "assistant", "content": "Done."})
                step.end_turn()

    def post_and_answer(*args: Any, **options: Any) -> Any:
        posted = threads.post_message(*args, **options)
        assert site.drive("t") is True
        return posted

    def load_late(*args: Any, **options: Any) -> Any:
        site.drive("t")
        return threads.load_thread(*args, **{**options, "activity": Activity.DUE})

    site = chatting(answer=answer)
    await site.post("t", "u1")
    await sync_to_async(site.drive)("t")
    if joins == "with its message":
        monkeypatch.setattr(views, "post_message", post_and_answer)
        events = await site.events("POST", "agui/", run_input("t", "u2"))
    else:
        await site.post("t", "u2")
        monkeypatch.setattr(reading, "load_thread", load_late)
        events = await site.events("GET", "agui/t/")
    stored = await sync_to_async(threads.load_thread)(site.store, site.session("t").id)
    types = [event["type"] for event in events]
    for each in ("REASONING_MESSAGE_CONTENT", "TOOL_CALL_START", "TOOL_CALL_RESULT", "TEXT_MESSAGE_CONTENT"):
        assert types.count(each) == 1, types
    assert types.index("MESSAGES_SNAPSHOT") < types.index("REASONING_MESSAGE_CONTENT")
    assert held_by_ag_ui(events) == agui.messages_of(entries(stored.messages))
