"""Server-sent events, and the release of the request's thread while they are sent."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from asgiref.sync import SyncToAsync, sync_to_async
from django.db import connections

from helix_store.core.payloads import decode
from helix_store.core.types import StreamStatus
from helix_store.exceptions import (
    HelixStoreError,
    StreamNotFound,
    StreamTruncated,
)
from helix_store.streams.reader import ResumableReader, StoredText

__all__ = ["events_of", "run_in_request", "truncated_event", "without_request_thread"]


async def run_in_request(call: Callable[..., Any], *arguments: Any) -> Any:
    """Run synchronous code in the thread of the request's middleware."""
    return await sync_to_async(call, thread_sensitive=True)(*arguments)


async def without_request_thread(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Release the thread and the connections of the request, then send the body.

    A response can last for hours. Until its end, Django keeps a thread for the request, with the connection
    that loaded the session. Middleware uses that thread until the body starts. Synchronous code that runs
    later in the request gets another thread.
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
        # A test may run the view inside a transaction.
        if not connection.in_atomic_block:
            connection.close()


_LONGEST_RESPONSE: Final = 4 * 1024 * 1024
"""After this many bytes a response ends, and the browser connects again.

A server without back-pressure, such as Daphne, keeps everything that a client does not read. 20 clients that
read none of 60 MB cost it 1,190 MiB without this limit.
"""
# An immediate first line shows proxies and browsers that the connection works. It also sets the pause before
# the browser reconnects, in milliseconds, which the end of a long response shortens.
_BEGINNING: Final = b": stream\nretry: 3000\n\n"
_CONTINUE: Final = b"retry: 500\n\n"
_HEARTBEAT: Final = b": heartbeat\n\n"
_DELETED: Final = {"code": StreamNotFound.code, "message": "The stream was deleted."}

_logger = logging.getLogger(__name__)


async def events_of(reader: ResumableReader, *, heartbeat: float) -> AsyncGenerator[bytes, None]:
    """Yield an event per chunk, a comment after every ``heartbeat`` seconds without one, and the last event.
    A response that reaches its longest duration, or cannot read the database, ends without a last event, so
    the browser reconnects and resumes.
    """
    yield _BEGINNING
    length = 0
    try:
        async with aclosing(reader.texts(heartbeat=heartbeat)) as texts:
            async for stored in texts:
                part = _HEARTBEAT if stored is None else _chunk_event(stored)
                yield part
                length += len(part)
                if length >= _LONGEST_RESPONSE:
                    yield _CONTINUE
                    return
        yield await _last_event(reader)
    except StreamTruncated as exc:
        yield truncated_event(exc.oldest)
    except StreamNotFound:
        yield _event("fail", {"status": StreamStatus.FAILED.value, "error": _DELETED})
    except HelixStoreError as exc:
        _logger.warning(
            "The response of a stream was cut off (%s); the browser connects again. If this repeats, check "
            "that the database is reachable.",
            exc.code,
        )


async def _last_event(reader: ResumableReader) -> bytes:
    if reader.status is StreamStatus.PAUSED:
        return _event("paused", {"status": StreamStatus.PAUSED.value})
    info = await reader.info()
    if reader.status is StreamStatus.FAILED:
        return _event("fail", {"status": "failed", "error": None if info is None else info.error})
    return _event("end", {"status": "ended", "output": None if info is None else info.output})


def truncated_event(oldest: int) -> bytes:
    """Return the event for a position below the floor; ``oldest`` is the first sequence that is stored."""
    return _event("truncated", {"oldest": oldest})


def _chunk_event(stored: StoredText) -> bytes:
    text = stored.text
    if text.startswith("~"):
        # UTF-8 cannot represent the stored form of such a chunk, but JSON escapes can.
        text = json.dumps(decode(text), separators=(",", ":"))
    return f"id: {stored.sequence}\ndata: {text}\n\n".encode()


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
