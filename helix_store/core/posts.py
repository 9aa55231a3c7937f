"""Posts, which are messages on their way into a session, and the protocol of a store with posts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, TypeAlias

from helix_store.core.approvals import ActingUser
from helix_store.core.contracts import StateStore
from helix_store.core.dicts import AnyMessage
from helix_store.core.payloads import Page, Serializable
from helix_store.core.types import Message, Timestamp, UserId

__all__ = ["DuePost", "Post", "PostPage", "PostState", "PostStore"]

PostState: TypeAlias = Literal["waiting", "received", "withdrawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Post(Serializable):
    """A message on its way into a session; ``message`` is ``None`` once it has been received or withdrawn.

    ``position`` is the index, counted from 0, that the message got in the history when it was received.

    Example::

        post = session.post({"role": "user", "content": "By train, please."}, key="form-7", author="ada")
        print(post.state, post.sequence, post.author)
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
    """A session with due posts: their number, and the time at which the first of them became due.

    Example::

        session.post({"role": "user", "content": "By train, please."})
        for due in store.sessions.find_due_posts():
            print(due.session_id, due.count, due.due_at)
    """

    session_id: str
    due_at: datetime
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PostPage(Serializable, Page[Post]):
    """One page of a session's posts, by sequence.

    Example::

        session.post({"role": "user", "content": "By train, please."})
        for post in session.posts():
            print(post.post_id, post.message)
    """

    items: list[Post]
    next_cursor: str | None


class PostStore(StateStore, Protocol):
    """A state store with posts. `helix_store.testing.PostContract` tests them.

    Each method has an async counterpart with the prefix ``a``. A turn on a store without these methods
    receives no posts.
    """

    def post_message(
        self,
        session_id: str,
        message: AnyMessage,
        *,
        key: str | None = None,
        author: UserId | ActingUser | None = None,
        not_before: Timestamp | None = None,
    ) -> Post: ...

    def list_posts(
        self,
        session_id: str,
        *,
        states: Collection[str] = ("waiting",),
        limit: int = 50,
        cursor: str | None = None,
    ) -> PostPage: ...

    def withdraw_post(self, session_id: str, post_id: str) -> bool: ...

    def receive_posts(
        self,
        session_id: str,
        *,
        limit: int | None = None,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> list[Message]: ...

    def find_due_posts(self, *, limit: int = 200) -> list[DuePost]: ...
