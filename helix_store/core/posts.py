"""Posts: messages on their way into a session."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from helix_store.core.serialization import Page, Serializable
from helix_store.core.types import Message

__all__ = ["DuePost", "Post", "PostPage", "PostState"]

PostState: TypeAlias = Literal["waiting", "received", "withdrawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Post(Serializable):
    """A message on its way into a session; ``message`` is ``None`` once it was received or withdrawn.

    ``position`` is the index that the message had in the history when it was received, from 0.
    """

    post_id: str
    session_id: str
    sequence: int
    message: Message | None
    author: str | None
    key: str | None
    not_before: datetime | None
    posted_at: datetime
    state: PostState
    received_at: datetime | None
    position: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DuePost(Serializable):
    """A session with due posts: their number, and the time since when they are due."""

    session_id: str
    due_at: datetime
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PostPage(Serializable, Page[Post]):
    items: list[Post]
    next_cursor: str | None
