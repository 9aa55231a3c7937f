"""Permissions: a visitor's Django session contains the answers and chats that the visitor began."""

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
    """Permit visitors to read only their own answers, and staff all, for
    ``HELIX_STORE["STREAM_PERMISSION"]``. The stream of a chat has the id of the chat.
    """
    return is_own(request, stream_id) or request.user.has_perm("helix_store.view_stream")
