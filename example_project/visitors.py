"""Permissions: a visitor's Django session contains the visitor's id, and the answers of the visitor."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest

from helix_store.core.ids import new_id

__all__ = ["may_watch", "remember", "visitor_of", "welcome"]

_KEY: Final = "own_ids"
_VISITOR: Final = "visitor"


def welcome(request: HttpRequest) -> None:
    """Give a new visitor an id, which owns the visitor's chats."""
    request.session.setdefault(_VISITOR, new_id())


def visitor_of(request: HttpRequest) -> str | None:
    """Return the id of a visitor who has seen a page of the chat, for ``Chat(owner=…)``."""
    visitor: str | None = request.session.get(_VISITOR)
    return visitor


def remember(request: HttpRequest, own_id: str) -> None:
    request.session[_KEY] = [*request.session.get(_KEY, []), own_id]


def may_watch(request: HttpRequest, stream_id: str) -> bool:
    """Permit visitors to read only their own answers, and staff all, for
    ``HELIX_STORE["STREAM_PERMISSION"]``.
    """
    own_ids = request.session.get(_KEY, [])
    return stream_id in own_ids or request.user.has_perm("helix_store.view_stream")
