"""Posts: messages that arrive while another worker drives the session."""

from __future__ import annotations

from collections.abc import Collection

from helix_store.core import validation
from helix_store.core.dicts import AnyMessage
from helix_store.core.guards import guard
from helix_store.core.posts import DuePost, Post, PostPage
from helix_store.core.types import Message, Timestamp, UserId
from helix_store.engine.async_twins import async_twin
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.sessions.backend import StoreCalls
from helix_store.sessions.posts import MOST_DUE_POSTS, checked_post, checked_states
from helix_store.sessions.requests import decode_messages


class PostCalls(StoreCalls):
    def post_message(
        self,
        session_id: str,
        message: AnyMessage,
        *,
        key: str | None = None,
        author: UserId | None = None,
        not_before: Timestamp | None = None,
    ) -> Post:
        """Store a message that the next commit of a turn receives, and return the post.

        One transaction under the session's lock, which changes no history, state or version. The post is due
        at ``not_before`` (an aware datetime or epoch milliseconds), or at once. With a ``key`` a repeat
        returns the first post; another message, author or time under the key raises `IdempotencyConflict`.
        Raises `SessionEnded` for a session that has ended, and `LimitExceeded` while ``max_waiting_posts``
        wait.
        """
        validation.identifier(session_id, "session_id")
        limits = self.limits
        new = checked_post(message, key=key, author=author, not_before=not_before, limits=limits)
        return self._backend.posts.post(session_id, new, limits.max_waiting_posts)

    def list_posts(
        self,
        session_id: str,
        *,
        states: Collection[str] = ("waiting",),
        limit: int = 50,
        cursor: str | None = None,
    ) -> PostPage:
        """Return a page of the posts in these states, in the order in which they were posted.

        ``states`` are any of ``waiting``, ``received`` and ``withdrawn``; ``limit`` is 1 to 200 (above means
        200). Raises `SessionNotFound`, `InvalidCursor` and `InvalidQuery`.
        """
        validation.identifier(session_id, "session_id")
        chosen, size = checked_states(states), validation.page_limit(limit)
        binding = ["posts", self.tenant, session_id, chosen]
        after = 0 if cursor is None else read_cursor(cursor, query=binding)[0]
        items = self._backend.posts.select(session_id, states=chosen, after=after, limit=size + 1)
        has_more = len(items) > size
        items = items[:size]
        next_cursor = write_cursor([items[-1].sequence], query=binding) if has_more else None
        return PostPage(items=items, next_cursor=next_cursor)

    def withdraw_post(self, session_id: str, post_id: str) -> bool:
        """Withdraw a waiting post, and return whether it was waiting.

        One transaction under the session's lock: if a withdrawal and a reception compete, one of them wins.
        """
        validation.identifier(session_id, "session_id")
        return self._backend.posts.withdraw(session_id, validation.identifier(post_id, "post_id"))

    def receive_posts(
        self,
        session_id: str,
        *,
        limit: int | None = None,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> list[Message]:
        """Move due posts into the history, and return their messages in order of due time and sequence.

        One transaction and one version; without due posts, nothing is written. Open tool calls do not prevent
        this. Raises `StaleStateError`, and `SessionEnded` for a session that has ended.
        """
        validation.identifier(session_id, "session_id")
        if limit is not None:
            validation.query_number(limit, "limit", minimum=1)
        fence = guard(expected_version, fencing_token)
        return decode_messages(self._backend.posts.receive(session_id, limit, fence))

    def find_due_posts(self, *, limit: int = 200) -> list[DuePost]:
        """Return the sessions with due posts that a turn could receive now, the longest due first.

        Sessions that have ended, that wait for an answer, or that are locked are left out. The database's
        clock decides. ``limit`` is 1 to 1,000 (above means 1,000).
        """
        return self._backend.posts.due(validation.page_limit(limit, maximum=MOST_DUE_POSTS))

    apost_message = async_twin(post_message)
    alist_posts = async_twin(list_posts)
    awithdraw_post = async_twin(withdraw_post)
    areceive_posts = async_twin(receive_posts)
    afind_due_posts = async_twin(find_due_posts)
