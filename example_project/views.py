"""The page with a live answer of an agent."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from example_project.command_lines import server_line
from example_project.live import STREAMS_KEY, start_answering

__all__ = ["ask", "ask_page", "live_page"]

# No inline scripts and no other hosts: stored text cannot run, even if it were read as markup.
_CONTENT_SECURITY_POLICY = "default-src 'self'"


@require_GET
def ask_page(request: HttpRequest) -> HttpResponse:
    return _page(request, None)


@require_POST
def ask(request: HttpRequest) -> HttpResponse:
    stream_id = start_answering()
    request.session[STREAMS_KEY] = [*request.session.get(STREAMS_KEY, []), stream_id]
    return redirect("live", stream_id=stream_id)


@require_GET
def live_page(request: HttpRequest, stream_id: str) -> HttpResponse:
    """The answer while it is written. A reload continues after the last word that was shown."""
    return _page(request, stream_id)


def _page(request: HttpRequest, stream_id: str | None) -> HttpResponse:
    # Paths of the machine are for its developer only.
    server = server_line() if settings.DEBUG else "python -m uvicorn example_project.asgi:application"
    response = render(request, "example/live.html", {"stream_id": stream_id, "server": server})
    response["Content-Security-Policy"] = _CONTENT_SECURITY_POLICY
    return response
