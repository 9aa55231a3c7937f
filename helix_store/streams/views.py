"""The stream view: server-sent events for ASGI, with one asynchronous generator and no thread per reader."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

from django.core.handlers.asgi import ASGIRequest
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.views.decorators.http import require_GET

from helix_store import conf
from helix_store.core import validation
from helix_store.exceptions import (
    HelixStoreError,
    InvalidPayload,
    InvalidQuery,
    StreamTruncated,
)
from helix_store.streams.database import DatabaseStreamManager
from helix_store.streams.permission import NO_PERMISSION, configured_permission, permitted_tenant
from helix_store.streams.rules import position
from helix_store.streams.sse import events_of, truncated_event, without_request_thread

__all__ = ["stream_events"]

_NOT_CACHED: Final = "private, no-store"
"""Only the users whom the project allows may read a stream, so shared caches must not store it."""

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": _NOT_CACHED,
    # Without this header, nginx buffers the events.
    "X-Accel-Buffering": "no",
}
_NEEDS_ASGI: Final = "Streams need an ASGI server, such as uvicorn. This server uses WSGI."

_logger = logging.getLogger(__name__)


@transaction.non_atomic_requests
@require_GET
async def stream_events(request: HttpRequest, stream_id: str) -> HttpResponseBase:
    """Return the chunks of a stream as events: ``id`` is the sequence and ``data`` the chunk.

    Starts after ``Last-Event-ID`` or, without it, after ``?from=``. The last event is ``end``, ``fail``,
    ``paused`` or ``truncated``. A response that ends without a last event is continued by the next request.

    Responds 403 unless ``HELIX_STORE["STREAM_PERMISSION"]`` allows access, 404 for an unknown stream, 400 for
    an invalid position, 503 if the database cannot be read, and 501 under WSGI, where every reader would hold
    a worker.
    """
    permission = configured_permission()
    if permission is None:
        return _refusal(HTTPStatus.FORBIDDEN, NO_PERMISSION)
    tenant = await permitted_tenant(request, stream_id, permission=permission)
    if tenant is None:
        return _refusal(HTTPStatus.FORBIDDEN)
    if not isinstance(request, ASGIRequest):
        return _refusal(HTTPStatus.NOT_IMPLEMENTED, _NEEDS_ASGI)
    options = conf.stream_options()
    try:
        after = _position(request)
        validation.identifier(stream_id, "stream_id")
        manager = DatabaseStreamManager(options.using, tenant=validation.tenant(tenant))
        reader = await manager.create_resumable_reader(stream_id, from_sequence=after)
    except (InvalidQuery, InvalidPayload):
        return _refusal(HTTPStatus.BAD_REQUEST)
    except StreamTruncated as exc:
        return HttpResponse(truncated_event(exc.oldest), headers=_HEADERS)
    except HelixStoreError as exc:
        _logger.warning(
            "A stream could not be opened (%s), and the request was refused with 503. If this repeats, check "
            "that the database is reachable.",
            exc.code,
        )
        return _refusal(HTTPStatus.SERVICE_UNAVAILABLE)
    if reader is None:
        return _refusal(HTTPStatus.NOT_FOUND)
    events = events_of(reader, heartbeat=options.heartbeat)
    return StreamingHttpResponse(without_request_thread(events), headers=_HEADERS)


def _position(request: HttpRequest) -> int:
    """Return the position of the request. Raises `InvalidQuery`."""
    # A browser that reconnects sends the header with the first address, so the header is newer.
    text = request.headers.get("Last-Event-ID") or request.GET.get("from") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidQuery("A position must be a whole number.", path="from")
    return position(int(text))


def _refusal(status: HTTPStatus, reason: str = "") -> HttpResponse:
    text = f"{status.phrase}: {reason}" if reason else status.phrase
    response = HttpResponse(f"{text}\n", status=status, content_type="text/plain; charset=utf-8")
    response["Cache-Control"] = _NOT_CACHED
    return response
