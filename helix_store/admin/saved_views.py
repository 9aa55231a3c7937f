"""Named filters of the list of sessions, as links above it.

Those of the setting ``ADMIN_VIEWS`` are everybody's. Those that a person keeps are in a signed cookie of the
browser, so they need no table, and neither another person nor another browser sees them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode

from django.core import signing
from django.http import HttpRequest, HttpResponse

from helix_store import conf
from helix_store.admin.elements import one_line

COOKIE: Final = "helix_views"
MOST_VIEWS: Final = 12
LONGEST_NAME: Final = 40

_LONGEST_QUERY: Final = 500
_LONGEST_COOKIE: Final = 3_800
"""Browsers keep cookies of up to 4,096 bytes, with their name and attributes."""

_SECONDS: Final = 365 * 86_400
_PAGE: Final = frozenset({"p", "e", "all"})
"""Parameters that say which part of the list is shown, and are not part of a view."""


class View(NamedTuple):
    """A filter with a name. ``query`` is the part of the address that begins after the question mark."""

    name: str
    query: str


def shown_views(request: HttpRequest) -> dict[str, Any]:
    """Return the views of the settings and those of this person, for the template of the list."""
    current = _normal(request.GET.urlencode())
    found = [
        {"name": name, "query": query, "is_own": is_own, "is_current": bool(current) and query == current}
        for is_own, views in ((False, _of_settings()), (True, kept_views(request)))
        for name, query in views
    ]
    return {"views": found, "query": "" if any(each["is_current"] for each in found) else current}


def _of_settings() -> list[View]:
    return [View(name, _normal(query)) for name, query in conf.admin_views().items()]


def kept_views(request: HttpRequest) -> list[View]:
    """Return the views that this person has kept in this browser, the oldest first."""
    try:
        stored = signing.loads(request.COOKIES.get(COOKIE, ""), salt=_salt(request))
        return [View(str(name), str(query)) for name, query in stored]
    except (signing.BadSignature, TypeError, ValueError):
        return []


def keep_views(request: HttpRequest, response: HttpResponse, views: list[View]) -> None:
    """Store a person's views, without the oldest ones if they are too many or too long."""
    kept = views[-MOST_VIEWS:]
    while len(text := signing.dumps(kept, salt=_salt(request), compress=True)) > _LONGEST_COOKIE:
        kept = kept[1:]
    response.set_cookie(
        COOKIE,
        text,
        max_age=_SECONDS,
        path=request.path.rpartition("views/")[0],
        secure=request.is_secure(),
        httponly=True,
        samesite="Lax",
    )


def view_of(name: str, query: str, known: Collection[str]) -> View | None:
    """Return a view, or ``None`` if it has no name, or no filter of the parameters that the list knows."""
    name = one_line(name, LONGEST_NAME + 1)
    if not name or len(name) > LONGEST_NAME or len(query) > _LONGEST_QUERY:
        return None
    normal = _normal(query)
    names = {parameter for parameter, _value in parse_qsl(normal, keep_blank_values=True)}
    return View(name, normal) if names and names <= set(known) else None


def _normal(query: str) -> str:
    """Return the filters of a query in one order, without the page."""
    pairs = parse_qsl(query, keep_blank_values=True)
    return urlencode(sorted(pair for pair in pairs if pair[0] not in _PAGE), errors="replace")


def _salt(request: HttpRequest) -> str:
    return f"helix_store.views.{request.user.pk}"
