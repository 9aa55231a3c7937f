"""What the pages of the example have in common."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from example_project.command_lines import server_line

__all__ = ["page"]

# No inline scripts and no other hosts: stored text cannot run, even if it were read as markup.
_CONTENT_SECURITY_POLICY: Final = "default-src 'self'"


def page(
    request: HttpRequest, template: str, context: dict[str, Any], *, status: int = HTTPStatus.OK
) -> HttpResponse:
    """A page that can follow a stream, and say which server to start where none can be followed."""
    # Paths of the machine are for its developer only.
    server = server_line() if settings.DEBUG else "python -m uvicorn example_project.asgi:application"
    response = render(request, template, {"server": server, **context}, status=status)
    response["Content-Security-Policy"] = _CONTENT_SECURITY_POLICY
    return response
