"""Who may see what: a visitor's Django session knows the answers and chats that the visitor began."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest

__all__ = ["is_own", "may_watch", "remember"]

_KEY: Final = "own_ids"


def remember(request: HttpRequest, own_id: str) -> None:
    request.session[_KEY] = [*request.session.get(_KEY, []), own_id]


def is_own(request: HttpRequest, own_id: str) -> bool:
    return own_id in request.session.get(_KEY, [])


def may_watch(request: HttpRequest, stream_id: str) -> bool:
    """For ``HELIX_STORE["STREAM_PERMISSION"]``: a visitor reads only their own answers, staff all of them.

    The stream of a chat's turn is named after the chat and the run: ``<session id>/<run id>``.
    """
    return is_own(request, stream_id.partition("/")[0]) or request.user.has_perm("helix_store.view_stream")
