"""The stream view: server-sent events for ASGI, with one asynchronous generator and no thread per reader."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIRequest
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.module_loading import import_string
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
from helix_store.streams.rules import position
from helix_store.streams.sse import events_of, run_in_request, truncated_event, without_request_thread

__all__ = ["stream_events"]

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Without it, nginx buffers the events.
    "X-Accel-Buffering": "no",
}

_logger = logging.getLogger(__name__)


@transaction.non_atomic_requests
@require_GET
async def stream_events(request: HttpRequest, stream_id: str) -> HttpResponseBase:
    """The chunks of a stream as they are written: ``id`` is the sequence and ``data`` the chunk.

    Starts after ``Last-Event-ID`` or, without it, after ``?from=``. The last event is ``end``, ``fail``,
    ``paused`` or ``truncated``. Responds 403 unless ``HELIX_STORE["STREAM_PERMISSION"]`` allows access, 404
    for an unknown stream, 400 for an invalid position, 503 if the database cannot be read, and 501 under
    WSGI, where every reader would hold a worker.
    """
    tenant = await _permitted_tenant(request, stream_id)
    if tenant is None:
        return _refusal(HTTPStatus.FORBIDDEN)
    if not isinstance(request, ASGIRequest):
        return _refusal(HTTPStatus.NOT_IMPLEMENTED)
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
            "A stream could not be opened (%s); the browser connects again. If this repeats, check that the "
            "database is reachable.",
            exc.code,
        )
        return _refusal(HTTPStatus.SERVICE_UNAVAILABLE)
    if reader is None:
        return _refusal(HTTPStatus.NOT_FOUND)
    events = events_of(reader, heartbeat=options.heartbeat)
    return StreamingHttpResponse(without_request_thread(events), headers=_HEADERS)


async def _permitted_tenant(request: HttpRequest, stream_id: str) -> str | None:
    """The tenant whose stream the request may read; ``None`` if access is denied, the default."""
    dotted_path = conf.stream_permission()
    if dotted_path is None:
        return None
    permission = import_string(dotted_path)
    if iscoroutinefunction(permission):
        answer = await permission(request, stream_id)
    else:
        answer = await run_in_request(permission, request, stream_id)
    if isinstance(answer, str):
        return answer
    if answer is True:
        return ""
    if answer is False or answer is None:
        return None
    raise ImproperlyConfigured(
        f'HELIX_STORE["STREAM_PERMISSION"] must return True, False or a tenant, not {type(answer).__name__}.'
    )


def _position(request: HttpRequest) -> int:
    """The position of the request. Raises `InvalidQuery`."""
    # A browser that connects again sends the header with the first address, so the header is newer.
    text = request.headers.get("Last-Event-ID") or request.GET.get("from") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidQuery("A position must be a whole number.", path="from")
    return position(int(text))


def _refusal(status: HTTPStatus) -> HttpResponse:
    response = HttpResponse(f"{status.phrase}\n", status=status, content_type="text/plain; charset=utf-8")
    response["Cache-Control"] = "no-store"
    return response
