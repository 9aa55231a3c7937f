"""The waiting posts of a session, in the order in which it will receive them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet

from helix_store.core.serialization import Serializable
from helix_store.models import Post
from helix_store.models.posts import PostState
from helix_store.reports.previews import payload_start, said_at_start


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPost(Serializable):
    """A post that waits. ``text`` is the start of its content, or ``None`` if it cannot be read."""

    post_id: str
    sequence: int
    author: str | None
    key: str | None
    posted_at: datetime
    due_at: datetime
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPosts(Serializable):
    items: list[WaitingPost]
    total: int


def waiting_posts(posts: QuerySet[Post], *, first: int = 0, limit: int) -> WaitingPosts:
    """Return a page of the waiting ones among the posts of a session, from the index ``first``."""
    waiting = posts.filter(state=PostState.WAITING)
    columns = ("post_id", "sequence", "author", "key", "posted_at", "due_at")
    rows = waiting.order_by("due_at", "sequence").values(*columns, start=payload_start())
    page = rows[first : first + limit]
    items = [WaitingPost(text=said_at_start(row.pop("start") or ""), **row) for row in page]
    return WaitingPosts(items=items, total=waiting.count())
