"""A chat in this process, on each database in turn."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.http import HttpRequest
from django.test import AsyncClient
from django.test.client import AsyncClientHandler
from django.urls import path, set_urlconf

from helix_store import SessionHandle, Store
from helix_store.contrib.chat import Chat, agui
from helix_store.contrib.chat.requests import NewMessage
from helix_store.contrib.chat.threads import post_message
from helix_store.contrib.chat.views import _actor
from tests.databases import CommittedDatabase

__all__ = ["Chatting", "chatting"]


class _Handler(AsyncClientHandler):
    """Its requests have addresses of their own.

    `override_settings` is of the whole process: requests that overlap would leave it changed. Django forgets
    the addresses at the end of a response, which a test may not wait for.
    """

    def __init__(self, urls: tuple[Any, ...]) -> None:
        super().__init__(enforce_csrf_checks=False)
        self.urls = urls

    async def get_response_async(self, request: Any) -> Any:
        request.urlconf = self.urls
        try:
            return await super().get_response_async(request)
        finally:
            set_urlconf(None)


class Chatting:
    """A chat of one test, and requests to its addresses. Nothing runs until `drive` is called."""

    def __init__(self, database: CommittedDatabase, **options: Any) -> None:
        self.database = database
        self.runs: list[str] = []
        given = {
            "owner": lambda request: request.headers.get("X-Owner"),
            "tenant": database.tenant,
            **options,
        }
        answer = given.pop("answer", _echo)
        self.chat = Chat(
            f"agent-{uuid.uuid4().hex}",
            answer,
            name="test",
            using=database.alias,
            **{"runner": lambda session_id, using, tenant: self.runs.append(session_id), **given},
        )
        self.urls = (path("chat/", self.chat.urls),)
        self.client = AsyncClient()
        self.client.handler = _Handler(self.urls)

    @property
    def store(self) -> Store:
        return Store(self.database.alias, tenant=self.database.tenant)

    def session(self, thread: str, owner: str = "ann") -> SessionHandle:
        return self.store.session(self.chat.session_id(owner, thread))

    def drive(self, thread: str, owner: str = "ann") -> bool:
        session_id = self.chat.session_id(owner, thread)
        return self.chat.drive(session_id, tenant=self.database.tenant)

    async def request(
        self, method: str, address: str, body: Any = None, *, owner: str | None = "ann", **headers: str
    ) -> Any:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        own = {} if owner is None else {"X-Owner": owner}
        return await self.client.generic(
            method, f"/chat/{address}", data, content_type="application/json", headers={**own, **headers}
        )

    async def events(
        self, method: str, address: str, body: Any = None, **options: str
    ) -> list[dict[str, Any]]:
        """The events of a response until its end."""
        response = await self.request(method, address, body, **options)
        assert response.status_code == 200, response.content
        return events_of(b"".join([part async for part in response.streaming_content]))

    async def post(self, thread: str, message_id: str, content: Any = "Hello", owner: str = "ann") -> None:
        """Post a message as a request of the owner does, which may begin the thread. Nobody follows it."""
        await sync_to_async(post_message)(
            self.chat,
            self.chat.store(self.database.tenant),
            self.chat.session_id(owner, thread),
            thread,
            NewMessage(id=message_id, content=agui.posted(content)),
            owner=owner,
            actor=_actor(owner),
            client={},
        )

    async def json(self, method: str, address: str, body: Any = None, **options: str) -> Any:
        response = await self.request(method, address, body, **options)
        return json.loads(response.content)


def _owner(request: HttpRequest) -> str | None:
    return request.headers.get("X-Owner")


def events_of(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.decode().split("\n") if line.startswith("data: {")]


def run_input(thread: str, message_id: str = "u1", content: Any = "Hello", **more: Any) -> dict[str, Any]:
    """A `RunAgentInput` with one new message."""
    messages = [{"id": message_id, "role": "user", "content": content}]
    return {"threadId": thread, "runId": "run-1", "messages": messages, **more}


def _echo(turn: Any, out: Any) -> None:
    while turn.is_active:
        text = f"You said {turn.messages()[-1]['content']}."
        out.text(text)
        with turn.step() as step:
            step.say({"role": "assistant", "content": text})
            step.end_turn()


@pytest.fixture
def chatting(committed_db: CommittedDatabase) -> Callable[..., Chatting]:
    return lambda **options: Chatting(committed_db, **options)
