"""The page with a live answer of an agent."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_GET, require_POST

from example_project.live import start_answering
from example_project.pages import page
from example_project.visitors import remember

__all__ = ["ask", "ask_page", "live_page"]


@require_GET
def ask_page(request: HttpRequest) -> HttpResponse:
    return page(request, "example/live.html", {})


@require_POST
def ask(request: HttpRequest) -> HttpResponse:
    stream_id = start_answering()
    remember(request, stream_id)
    return redirect("live", stream_id=stream_id)


@require_GET
def live_page(request: HttpRequest, stream_id: str) -> HttpResponse:
    """Return the page of an answer while it is written. A reload continues after the last word shown."""
    return page(request, "example/live.html", {"stream_id": stream_id})
