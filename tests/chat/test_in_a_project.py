"""A chat among the settings and the middleware that projects have."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.conf import settings
from django.contrib.auth.models import AnonymousUser, User
from django.db import connections
from django.http import HttpRequest, HttpResponseBase
from django.template.loader import render_to_string
from django.test import AsyncClient, override_settings
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from django.urls import path
from django.utils.functional import SimpleLazyObject

from helix_store.contrib.chat import Chat
from tests.chat.conftest import Chatting, events_of, run_input

Make = Callable[..., Chatting]

_SIGNED_IN = "django.contrib.auth.middleware.AuthenticationMiddleware"


def _with_middleware(name: str) -> list[str]:
    """The middleware of the project, with another one after the one that sets the user."""
    at = settings.MIDDLEWARE.index(_SIGNED_IN) + 1
    return [*settings.MIDDLEWARE[:at], name, *settings.MIDDLEWARE[at:]]


async def test_no_database_wraps_the_requests_of_a_chat_in_a_transaction(
    chatting: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for alias in connections:
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)
    # A database that no test uses.
    monkeypatch.setitem(connections.settings, "another", dict(connections.settings["default"]))
    assert (await chatting().request("GET", "threads/")).status_code == 200


async def test_who_has_not_signed_in_gets_401_and_no_redirect(chatting: Make) -> None:
    required = _with_middleware("django.contrib.auth.middleware.LoginRequiredMiddleware")
    with override_settings(MIDDLEWARE=required):
        site = chatting(owner=None)
        response = await site.request("GET", "threads/", owner=None)
        assert (response.status_code, json.loads(response.content)["code"]) == (401, "unauthorized")
        # A chat that lets others in by a function has not asked for an exception.
        response = await chatting().request("GET", "threads/")
        assert response.status_code == 302


def token_middleware(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Any:
    """Set ``request.user`` from a token, as packages for token authentication and impersonation do."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        token = request.headers.get("X-Token")
        if token is not None:
            user = User(pk=int(token), username=token) if token != "0" else AnonymousUser()
            request.user = SimpleLazyObject(lambda: user)  # type: ignore[assignment]
        return get_response(request)

    return middleware


async def test_the_user_of_a_request_is_the_one_that_middleware_has_set(chatting: Make) -> None:
    site = chatting(owner=None)
    with override_settings(MIDDLEWARE=_with_middleware(f"{__name__}.token_middleware")):
        response = await site.request("POST", "agui/", run_input("t"), owner=None, **{"X-Token": "417"})
        assert response.status_code == 200
        await response.streaming_content.aclose()
        (post,) = await sync_to_async(lambda: site.session("t", "417").posts().items)()
        assert post.author == "user:417"
        response = await site.request("GET", "threads/", owner=None, **{"X-Token": "0"})
        assert response.status_code == 401


@pytest.mark.parametrize("owner", ["417@example.com", "417", "ann"])
async def test_a_requester_who_is_the_owner_does_not_answer(chatting: Make, owner: str) -> None:
    """A requester given as text answers as a Django user, and the other way round."""
    text = owner if "@" in owner else None

    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            requester = text or User(pk=417, username="ann")
            step.ask_approval("c", "refund", {}, requester=requester)

    site = chatting(answer=answer, owner=lambda request: owner)
    token = {"X-Token": "417" if text else "9"}
    with override_settings(MIDDLEWARE=_with_middleware(f"{__name__}.token_middleware")):
        response = await site.request("POST", "agui/", run_input("t"), **token)
        await response.streaming_content.aclose()
        await sync_to_async(site.drive)("t", owner)
        (call,) = (await site.json("GET", "threads/t/", **token))["calls"]
        given = {"approved": True, "digest": call["digest"]}
        response = await site.request("POST", "threads/t/calls/c/", given, **token)
        assert (response.status_code, json.loads(response.content)["code"]) == (403, "not_permitted")


async def test_an_owner_is_nobody_else(chatting: Make) -> None:
    async def ann(request: HttpRequest) -> str:
        return "ann"

    class Owner:
        async def __call__(self, request: HttpRequest) -> str:
            return "ann"

    for owner in (lambda request: request.user.is_authenticated and request.user.pk, lambda request: ""):
        assert (await chatting(owner=owner).request("GET", "threads/")).status_code == 401
    for owner in (ann, Owner(), lambda request: ann(request)):
        site = chatting(owner=owner)
        await site.post("t", "u1")
        assert len((await site.json("GET", "threads/"))["threads"]) == 1
        session_id = site.session("t", "ann").id
        assert await sync_to_async(site.store.sessions.session_exists)(session_id)
    # True would be one owner for everybody who has signed in.
    for owner in (lambda request: request.user, lambda request: True):
        with pytest.raises(TypeError, match="owner of a chat"):
            await chatting(owner=owner).request("GET", "threads/")


async def test_a_form_is_no_json(chatting: Make) -> None:
    site = chatting()
    token = "a" * 32
    client = AsyncClient(enforce_csrf_checks=True)
    client.cookies["csrftoken"] = token
    body = encode_multipart(BOUNDARY, {"csrfmiddlewaretoken": token, "id": "u1", "content": "Hello"})
    with override_settings(ROOT_URLCONF=site.urls):
        response = await client.generic(
            "POST", "/chat/threads/t/posts/", body, content_type=MULTIPART_CONTENT, headers={"X-Owner": "ann"}
        )
    assert (response.status_code, json.loads(response.content)["message"]) == (400, "The body is not JSON.")


def test_a_database_that_cannot_be_reached_is_503(chatting: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = {
        **connections.settings["default"],
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "nowhere",
        "HOST": "127.0.0.1",
        "PORT": "1",
        "OPTIONS": {},
    }
    monkeypatch.setitem(connections.settings, "nowhere", nowhere)
    _require_503("nowhere")


def test_a_database_that_is_not_configured_is_503(chatting: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The client cannot correct the alias, and is not told which databases there are."""
    _require_503("missing")
    assert "There is no database 'missing'" in caplog.text


def _require_503(alias: str) -> None:
    """Send every kind of request to a chat in a database that no request reaches."""
    chat = Chat(f"agent-{uuid4().hex}", lambda turn, out: None, name="down", using=alias, owner="ann")
    requests: list[tuple[str, str, Any]] = [
        ("GET", "threads/", {}),
        ("GET", "threads/t/", {}),
        ("GET", "agui/t/", {}),
        ("GET", "ai/t/stream", {}),
        ("POST", "agui/", run_input("t")),
        ("POST", "threads/t/posts/", {"id": "u1", "content": "Hello"}),
        ("POST", "threads/t/stop/", {}),
        ("PATCH", "threads/t/", {"title": "A"}),
        ("DELETE", "threads/t/", {}),
    ]

    async def ask(method: str, address: str, body: Any) -> Any:
        return await AsyncClient().generic(method, f"/chat/{address}", json.dumps(body))

    told = {}
    with override_settings(ROOT_URLCONF=(path("chat/", chat.urls),)):
        for request in requests:
            response = async_to_sync(ask)(*request)
            is_told = b"DATABASES" in response.content or response.status_code != 503
            if is_told or json.loads(response.content)["code"] != "store_unavailable":
                told[request[:2]] = (response.status_code, response.content[:200])
    assert told == {}


async def test_a_list_cannot_be_asked_for_what_the_database_refuses(chatting: Make) -> None:
    def cursor(text: str) -> str:
        return base64.urlsafe_b64encode(text.encode()).decode()

    site = chatting()
    await site.post("t", "u1")
    wrong = {}
    forged = (
        "[" * 50_000,
        '["2020-01-01T00:00:00+00:00", 1e999]',
        '["0001-01-01T00:00:00+23:59", 5]',
        '["2020-01-01T00:00:00", 5]',
    )
    for query in ("q=%00", f"limit={'9' * 5_000}", *(f"cursor={cursor(text)}" for text in forged)):
        response = await site.request("GET", f"threads/?{query}")
        if response.status_code != 400:
            wrong[query[:40]] = response.status_code
    assert wrong == {}


@pytest.mark.thorough
async def test_a_runner_that_fails_breaks_no_response(chatting: Make) -> None:
    def broken(session_id: str, using: str, tenant: str) -> None:
        raise ConnectionError("no broker")

    site = chatting(runner=broken)
    await site.post("t", "u1")
    response = await site.request("GET", "agui/t/")
    body = response.streaming_content
    text = b"".join([await anext(body), await anext(body), await anext(body)])
    await body.aclose()
    assert events_of(text)[0]["type"] == "RUN_STARTED"


async def test_a_runner_that_hangs_keeps_no_response_from_its_thread(chatting: Make) -> None:
    def run(session_id: str, using: str, tenant: str) -> None:
        if hangs.is_set():
            has_begun.set()
            may_end.wait(30)

    hangs, has_begun, may_end = threading.Event(), threading.Event(), threading.Event()
    site = chatting(runner=run)
    threads = ["a", "b", "c", "d"]
    for thread in threads:
        await site.post(thread, "u1")
    hangs.set()
    responses = [asyncio.ensure_future(site.events("GET", f"agui/{thread}/")) for thread in threads]
    try:
        assert await asyncio.to_thread(has_begun.wait, 30)
        for thread in threads:
            await sync_to_async(site.drive)(thread)
        found = await asyncio.wait_for(asyncio.gather(*responses), 15)
    finally:
        may_end.set()
    assert [events[-1]["type"] for events in found] == ["RUN_FINISHED"] * len(threads)


def test_the_page_may_have_a_content_security_policy(rf: Any) -> None:
    page = render_to_string("helix_store/chat.html", {"csp_nonce": "r4nd0m"}, request=rf.get("/"))
    assert page.count('<style nonce="r4nd0m">') == page.count("<style") == 1
    assert page.count('<script nonce="r4nd0m">') == page.count("<script") == 1
