"""The example project with a strict content security policy on every page, for tests in a browser."""

from __future__ import annotations

from collections.abc import Callable

import django
from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponse
from django.utils.decorators import sync_and_async_middleware

from example_project.settings import *  # noqa: F403  the same project
from example_project.settings import HELIX_STORE as _HELIX_STORE
from example_project.settings import MIDDLEWARE as _MIDDLEWARE

POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'"


@sync_and_async_middleware
def with_policy(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[..., object]:
    async def answer_async(request: HttpRequest) -> HttpResponse:
        response: HttpResponse = await get_response(request)  # type: ignore[misc]  # an async one
        response.setdefault("Content-Security-Policy", POLICY)
        return response

    def answer(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response.setdefault("Content-Security-Policy", POLICY)
        return response

    return answer_async if iscoroutinefunction(get_response) else answer


_policy = "tests.strict_settings.with_policy"
if django.VERSION >= (6, 0):
    _policy = "django.middleware.csp.ContentSecurityPolicyMiddleware"
    SECURE_CSP = {"default-src": ["'self'"], "base-uri": ["'none'"], "form-action": ["'self'"]}
MIDDLEWARE = [_policy, *_MIDDLEWARE]
HELIX_STORE = {**_HELIX_STORE, "ANSWER_PAGES": True}
