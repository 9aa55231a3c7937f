"""Places that make async calls and block meanwhile. Each test runs one of them in a process of its own."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from linecache import getline
from threading import Barrier
from typing import Any, Final

from asgiref.sync import SyncToAsync, async_to_sync, sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.asgi import get_asgi_application
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.test import override_settings
from django.urls import path

from helix_store.stores import DatabaseStateStore

__all__ = [
    "BRIDGES",
    "PLACES",
    "append_from",
    "append_from_loops",
    "append_from_new_thread",
    "append_in_block",
    "append_in_cell",
    "collections_while_frames_are_made",
    "run_agent_in_sync_view",
    "run_graph_in_sync_view",
    "save_conversation_in_sync_view",
]

Body = Callable[[], Any]

# asgiref has no types for it.
communicator: Any = ApplicationCommunicator


def sync_view(body: Body) -> Any:
    """Call ``body`` in a synchronous view under ASGI."""
    answers: list[Future[Any]] = []

    def view(request: HttpRequest) -> HttpResponse:
        answers.append(Future())
        try:
            answers[0].set_result(body())
        except Exception as exc:  # noqa: BLE001  raised below
            answers[0].set_exception(exc)
        return HttpResponse()

    async def serve() -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
        client: Any = communicator(get_asgi_application(), scope)
        await client.send_input({"type": "http.request"})
        await client.receive_output(60)
        await client.receive_output(60)
        await client.wait(60)

    urls = type("Urls", (), {"urlpatterns": [path("", view)]})
    with override_settings(ROOT_URLCONF=urls, MIDDLEWARE=[]):
        asyncio.run(serve())
    return answers[0].result()


def thread(body: Body) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(body).result()


def thread_with_context(body: Body) -> Any:
    """As executors of agent frameworks do."""
    context = contextvars.copy_context()
    return thread(lambda: context.run(body))


async def awaited(body: Body) -> Any:
    return await sync_to_async(body)()


def djangos_thread(body: Body) -> Any:
    """As synchronous code that an event loop outside of a request waits for."""
    return asyncio.run(awaited(body))


def parked_thread(body: Body) -> Any:
    """In the thread that waits in ``async_to_sync``, for code that needs this thread."""
    return async_to_sync(awaited)(body)


def celery_task(body: Body) -> Any:
    celery: Any = import_module("celery")
    app = celery.Celery("tests", broker="memory://", backend="cache+memory://")
    app.conf.task_always_eager = app.conf.task_eager_propagates = True

    def run() -> Any:
        return body()

    return app.task(run).delay().get()


def notebook(body: Body) -> Any:
    """The event loop of the kernel runs in the main thread, and runs the cell."""

    async def cell() -> Any:
        return body()

    return asyncio.run(cell())


PLACES: Final[dict[str, list[Callable[[Body], Any]]]] = {
    "sync view": [sync_view],
    "thread of a sync view": [sync_view, thread],
    "thread of a sync view, with its context": [sync_view, thread_with_context],
    "sync code below async_to_sync in a sync view": [sync_view, parked_thread],
    "sync code below async_to_sync": [parked_thread],
    "thread below async_to_sync, with its context": [parked_thread, thread_with_context],
    "Django's thread": [djangos_thread],
    "thread of Django's thread": [djangos_thread, thread],
    "thread of Django's thread, with its context": [djangos_thread, thread_with_context],
    "Celery task": [celery_task],
    "Celery task in a sync view": [sync_view, celery_task],
    "thread of a notebook": [notebook, thread],
    "main thread": [],
}


def append_from(place: str, alias: str, tenant: str) -> Any:
    """By each bridge, append one message, then two at once, and return the last counts."""
    store = DatabaseStateStore(alias, tenant=tenant)

    async def append() -> int:
        await store.aappend_messages("s", [{"role": "user"}])
        return max(await asyncio.gather(*(store.aappend_messages("s", [{"role": "tool"}]) for _ in "ab")))

    def by_each_bridge() -> dict[str, int]:
        return {name: bridge(append) for name, bridge in BRIDGES.items()}

    return _called_in(PLACES[place], by_each_bridge)


class _LateThreads(set[threading.Thread]):
    """The threads of a pool that is slow to note the one it has started."""

    def __init__(self, answered: threading.Event) -> None:
        super().__init__()
        self._answered = answered

    def add(self, thread: threading.Thread) -> None:
        self._answered.wait(0.5)
        super().add(thread)


def append_from_new_thread(alias: str, tenant: str) -> Any:
    """Append from Django's thread while its pool has started it, but not noted it yet."""
    store, answered = DatabaseStateStore(alias, tenant=tenant), threading.Event()
    pool: Any = SyncToAsync.single_thread_executor
    pool._threads = _LateThreads(answered)

    def append() -> Any:
        try:
            return asyncio.run(store.aappend_messages("s", [{"role": "user"}]))
        finally:
            answered.set()

    return djangos_thread(append)


def append_in_block(place: str, bridge: str, alias: str, tenant: str) -> Any:
    """Append in an ``atomic()`` block that is rolled back, and return the count that the append returned."""
    store = DatabaseStateStore(alias, tenant=tenant)

    async def append() -> int:
        return await store.aappend_messages("s", [{"role": "user"}])

    def body() -> Any:
        with transaction.atomic(using=alias):
            count = BRIDGES[bridge](append)
            transaction.set_rollback(True, using=alias)
            return count

    return _called_in(PLACES[place], body)


Call = Callable[[], Coroutine[Any, Any, Any]]

BRIDGES: Final[dict[str, Callable[[Call], Any]]] = {
    "asyncio.run": lambda call: asyncio.run(call()),
    "async_to_sync": lambda call: async_to_sync(call)(),
    "asyncio.run in a thread": lambda call: thread_with_context(lambda: asyncio.run(call())),
}


def _called_in(places: list[Callable[[Body], Any]], body: Body) -> Any:
    for place in reversed(places):
        body = partial(place, body)
    return body()


def append_in_cell(bridge: str, alias: str, tenant: str) -> Any:
    """Append in the cell of a notebook itself, below the event loop of its kernel."""
    store = DatabaseStateStore(alias, tenant=tenant)

    async def append() -> int:
        return await store.aappend_messages("s", [{"role": "user"}])

    return notebook(lambda: BRIDGES[bridge](append))


def append_from_loops(loops: int, alias: str, tenant: str) -> list[int]:
    """Append at once from several threads, each of which runs an event loop of its own."""
    store = DatabaseStateStore(alias, tenant=tenant)
    start = Barrier(loops)

    async def append() -> list[int]:
        start.wait()
        return [await store.aappend_messages("s", [{"role": "user"}]) for _ in range(10)]

    with ThreadPoolExecutor(loops) as threads:
        runs = [threads.submit(asyncio.run, append()) for _ in range(loops)]
    return sorted(count for run in runs for count in run.result())


def run_agent_in_sync_view(alias: str, tenant: str) -> Any:
    from agents import Runner

    from helix_store.contrib.openai_agents import DjangoSession
    from tests.frameworks.openai_agents.models import talking_agent

    def body() -> Any:
        session = DjangoSession("chat", using=alias, tenant=tenant)
        return Runner.run_sync(talking_agent("Paris."), "Capital of France?", session=session).final_output

    return sync_view(body)


def run_graph_in_sync_view(alias: str, tenant: str) -> Any:
    from example_project.frameworks.langgraph import travel_agent
    from helix_store.contrib.langgraph import DjangoSaver

    def body() -> Any:
        graph = travel_agent(DjangoSaver(alias, tenant=tenant), "The train costs 90 euros.")
        config = {"configurable": {"thread_id": "trip"}}
        return asyncio.run(graph.ainvoke({"messages": [("user", "To Kyoto")]}, config))

    return sync_view(body)["messages"][-1].content


def save_conversation_in_sync_view(alias: str, tenant: str) -> Any:
    from pydantic_ai.conversation import Conversation

    from helix_store.contrib.pydantic_ai import DjangoConversationStore
    from tests.frameworks.pydantic_ai.conversations import say

    store = DjangoConversationStore(alias, tenant=tenant)
    conversation = Conversation(conversation_id="chat", messages=[say("Hello")])
    return len(sync_view(lambda: asyncio.run(store.save(conversation))))


def collections_while_frames_are_made(alias: str, tenant: str) -> int:
    """Count the collections of garbage that begin while an async call asks for the frames of all threads."""
    store = DatabaseStateStore(alias, tenant=tenant)
    counted = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal counted
        frame = sys._getframe(1)
        counted += "_current_frames()" in getline(frame.f_code.co_filename, frame.f_lineno)

    async def load() -> None:
        for _ in range(20):
            await store.aload_state("s")

    gc.callbacks.append(count)
    gc.set_threshold(1)
    asyncio.run(load())
    return counted
