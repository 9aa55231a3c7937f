"""The thread that Django's ASGI handler keeps for the synchronous code of one request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from asgiref.sync import SyncToAsync, sync_to_async
from django.db import connections

__all__ = ["run_in_request", "without_request_thread"]


async def run_in_request(call: Callable[..., Any], *arguments: Any) -> Any:
    """Run synchronous code of the request where its middleware runs."""
    return await sync_to_async(call, thread_sensitive=True)(*arguments)


async def without_request_thread(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """A response's body that first ends the request's thread and its connections.

    Otherwise every reader of a response that lasts for hours would keep a thread, and the connection with
    which its session was loaded. Not before the body begins: middleware runs in that thread until then.
    Synchronous code that runs later in the request gets another thread.
    """
    async with aclosing(body):
        await _end_request_thread()
        async for part in body:
            yield part


async def _end_request_thread() -> None:
    await sync_to_async(_close_connections, thread_sensitive=True)()
    context = SyncToAsync.thread_sensitive_context.get(None)
    if context is not None:
        executor = SyncToAsync.context_to_thread_executor.pop(context, None)
        if executor is not None:
            executor.shutdown(wait=False)


def _close_connections() -> None:
    for connection in connections.all(initialized_only=True):
        # The caller's transaction is open where a test runs the view in it.
        if not connection.in_atomic_block:
            connection.close()
