"""The common parts of the example's pages."""

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
    """Return a page that can follow a stream, or tells which server to start if streams do not work."""
    # Only the developer should see paths of the machine.
    server = server_line() if settings.DEBUG else "python -m uvicorn example_project.asgi:application"
    response = render(request, template, {"server": server, **context}, status=status)
    response["Content-Security-Policy"] = _CONTENT_SECURITY_POLICY
    return response
