"""The stream view: server-sent events for ASGI, with one asynchronous generator and no thread per reader."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import cache
from http import HTTPStatus
from typing import Any, Final, TypeVar

from asgiref.sync import SyncToAsync, iscoroutinefunction, sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.module_loading import import_string
from django.views.decorators.http import require_GET

from helix_store import conf
from helix_store.core import validation
from helix_store.core.payloads import decode
from helix_store.core.types import StreamStatus
from helix_store.exceptions import (
    HelixStoreError,
    InvalidPayload,
    InvalidQuery,
    StreamNotFound,
    StreamTruncated,
)
from helix_store.streams.chunks import position
from helix_store.streams.manager import DatabaseStreamManager, ResumableReader, StoredText

_NO_PERMISSION: Final = (
    'HELIX_STORE["STREAM_PERMISSION"] is not set. Without a permission no stream can be read.'
)

_NOT_CACHED: Final = "private, no-store"
"""Only users whom the project allows may read a stream, so shared caches must not store the response."""

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": _NOT_CACHED,
    # Without this header, nginx buffers the events.
    "X-Accel-Buffering": "no",
}
_NEEDS_ASGI: Final = "Streams need an ASGI server, such as uvicorn. This server uses WSGI."

_LONGEST_RESPONSE: Final = 4 * 1024 * 1024
"""After this many bytes a response ends, and the browser connects again.

A server without back-pressure, such as Daphne, buffers everything that a client does not read. Without this
limit, it used 1,190 MiB for 20 clients that had asked for 60 MB each and read nothing.
"""
# An immediate first line shows proxies and browsers that the connection works. It also sets the number of
# milliseconds before the browser reconnects, which is shorter after a long response has ended.
_BEGINNING: Final = b": stream\nretry: 3000\n\n"
_CONTINUE: Final = b"retry: 500\n\n"
_HEARTBEAT: Final = b": heartbeat\n\n"
_DELETED: Final = {"code": StreamNotFound.code, "message": "The stream was deleted."}

View = TypeVar("View", bound=Callable[..., Any])

_logger = logging.getLogger(__name__)
_warn_once: Final = cache(_logger.warning)


def outside_of_transactions(view: View) -> View:
    """Make an asynchronous view one that ``ATOMIC_REQUESTS`` of no database applies to."""
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view


@outside_of_transactions
@require_GET
async def stream_events(request: HttpRequest, stream_id: str) -> HttpResponseBase:
    """Return the chunks of a stream as events: ``id`` is the sequence and ``data`` the chunk.

    Starts after ``Last-Event-ID``, or else after ``?from=``. The last event is ``end``, ``fail``,
    ``paused`` or ``truncated``. If a response ends without a last event, the next request continues it.

    Responds 403 unless ``HELIX_STORE["STREAM_PERMISSION"]`` allows access, 404 for an unknown stream, 400 for
    an invalid position or id, 503 if the database cannot be read, and 501 under WSGI, where every reader
    would hold a worker.
    """
    permission = conf.stream_permission()
    if permission is None:
        _warn_once(_NO_PERMISSION)
        return _refusal(HTTPStatus.FORBIDDEN, _NO_PERMISSION)
    tenant = await permitted_tenant(request, stream_id, permission=permission)
    if tenant is None:
        return _refusal(HTTPStatus.FORBIDDEN)
    if not isinstance(request, ASGIRequest):
        return _refusal(HTTPStatus.NOT_IMPLEMENTED, _NEEDS_ASGI)
    options = conf.stream_options()
    try:
        after = _position(request)
        validation.identifier(stream_id, "stream_id")
        validation.tenant(tenant)
    except (InvalidQuery, InvalidPayload):
        return _refusal(HTTPStatus.BAD_REQUEST)
    try:
        manager = DatabaseStreamManager(options.using, tenant=tenant)
        reader = await manager.create_resumable_reader(stream_id, from_sequence=after)
    except StreamTruncated as exc:
        return HttpResponse(_truncated_event(exc.oldest), headers=_HEADERS)
    except HelixStoreError as exc:
        # A setting may be wrong too, such as the alias. The client cannot correct either.
        _logger.warning(
            "A stream could not be opened (%s: %s), and the request was refused with 503. If this repeats, "
            "check that the database is reachable.",
            exc.code,
            exc,
        )
        return _refusal(HTTPStatus.SERVICE_UNAVAILABLE)
    if reader is None:
        return _refusal(HTTPStatus.NOT_FOUND)
    events = _events_of(reader, heartbeat=options.heartbeat)
    return StreamingHttpResponse(_without_request_thread(events), headers=_HEADERS)


def _position(request: HttpRequest) -> int:
    """Return the position of the request. Raises `InvalidQuery`."""
    # A browser that reconnects sends the header with the first URL, so the header is newer.
    text = request.headers.get("Last-Event-ID") or request.GET.get("from") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidQuery("A position must be a whole number.", path="from")
    return position(int(text))


def _refusal(status: HTTPStatus, reason: str = "") -> HttpResponse:
    text = f"{status.phrase}: {reason}" if reason else status.phrase
    response = HttpResponse(f"{text}\n", status=status, content_type="text/plain; charset=utf-8")
    response["Cache-Control"] = _NOT_CACHED
    return response


# --- The permission --------------------------------------------------------------------------------


async def permitted_tenant(request: HttpRequest, stream_id: str, *, permission: str) -> str | None:
    """Return the tenant whose stream the request may read, or ``None`` if access is denied.

    ``True`` allows the tenant ``""``, and a string that is not empty allows the tenant of that name. Any
    other answer denies access. An empty string denies it, because a user without a tenant must not get the
    tenant ``""``.
    """
    function = import_string(permission)
    if iscoroutinefunction(function):
        answer = await function(request, stream_id)
    else:
        # This runs in the thread of the request's middleware.
        answer = await sync_to_async(function, thread_sensitive=True)(request, stream_id)
    if answer is True:
        return ""
    if isinstance(answer, str):
        return answer or None
    if answer:
        _warn_once(
            "The stream permission %s returned a value of type %s, which denies access. It must return True, "
            "False or a tenant (text).",
            permission,
            type(answer).__name__,
        )
    return None


# --- The events ------------------------------------------------------------------------------------


async def _without_request_thread(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Release the thread and the connections of the request, then send the body.

    A response can last for hours. Django keeps a thread for the request until the response ends, with the
    connection that loaded the session. Middleware uses that thread until the body starts. Synchronous code
    that runs later in the request gets another thread.
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


async def _events_of(reader: ResumableReader, *, heartbeat: float) -> AsyncGenerator[bytes, None]:
    """Yield an event for each chunk, a comment after every ``heartbeat`` seconds without one, and the last
    event. A response that reaches its maximum duration, or cannot read the database, ends without a last
    event, so that the browser reconnects and resumes.
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
        yield _truncated_event(exc.oldest)
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


def _truncated_event(oldest: int) -> bytes:
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
