"""Messages: append, read, truncate; and posts, which arrive while another worker drives the session."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from helix_store.core import validation
from helix_store.core.dicts import AnyMessage
from helix_store.core.guards import guard
from helix_store.core.posts import DuePost, Post, PostPage
from helix_store.core.types import Message, MessagePage, Timestamp, UserId
from helix_store.engine.async_twins import async_iterator_twin, async_twin
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.exceptions import InvalidQuery
from helix_store.sessions.backend import StoreCalls
from helix_store.sessions.posts import MOST_DUE_POSTS, checked_post, checked_states
from helix_store.sessions.requests import decode_messages, encode_messages, without_thinking


class MessageCalls(StoreCalls):
    def append_messages(
        self,
        session_id: str,
        messages: Sequence[AnyMessage],
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Append messages in order, all or nothing, and return the new message count.

        Runs in one transaction under the session's lock: parallel appends lose no message and do not
        interleave. Raises `StaleStateError` if ``expected_version`` is not current. A repeat appends again.
        """
        validation.identifier(session_id, "session_id")
        encoded = encode_messages(messages, self.limits)
        return self._backend.messages.append(session_id, encoded, guard(expected_version, fencing_token))

    def get_messages(
        self,
        session_id: str,
        *,
        offset: int = 0,
        limit: int | None = None,
        include_thinking: bool = True,
        order: str = "asc",
    ) -> MessagePage:
        """Return a page of the history; ``limit=None`` reads to the end.

        With ``order="desc"``, the newest message comes first and ``offset`` counts from the end. If thinking
        is not included, the returned messages omit the key ``thinking`` and content parts of type thinking or
        reasoning. Raises `SessionNotFound`.
        """
        validation.identifier(session_id, "session_id")
        if order not in ("asc", "desc"):
            raise InvalidQuery("order must be asc or desc.", path="order")
        if limit is not None:
            validation.query_number(limit, "limit", minimum=1)
        texts, total = self._backend.messages.page(
            session_id, offset=validation.page_offset(offset), limit=limit, descending=order == "desc"
        )
        messages = decode_messages(texts)
        if not include_thinking:
            messages = [without_thinking(message) for message in messages]
        return MessagePage(messages=messages, total=total, has_more=offset + len(messages) < total)

    def iter_messages(self, session_id: str, *, chunk_size: int = 500) -> Iterator[Message]:
        """Iterate over all messages in order, in constant memory: one query per ``chunk_size`` messages.

        Messages appended during the iteration are included. Raises `SessionNotFound` immediately when called.
        """
        validation.identifier(session_id, "session_id")
        validation.query_number(chunk_size, "chunk_size", minimum=1)
        self._backend.messages.count(session_id)
        return self._iterate(session_id, chunk_size)

    def _iterate(self, session_id: str, chunk_size: int) -> Iterator[Message]:
        sequence = 0
        while texts := self._backend.messages.after(session_id, sequence, chunk_size):
            sequence += len(texts)
            yield from decode_messages(texts)

    def get_message_count(self, session_id: str) -> int:
        """Return the number of messages. Raises `SessionNotFound`."""
        return self._backend.messages.count(validation.identifier(session_id, "session_id"))

    def truncate_messages(self, session_id: str, keep: int, *, expected_version: int | None = None) -> int:
        """Keep the first ``keep`` messages, delete the others and return the version.

        Runs in one transaction that also deletes the checkpoints of deleted messages. The state does not
        change, and neither does the version if there is no message to delete.
        """
        validation.identifier(session_id, "session_id")
        validation.query_number(keep, "keep")
        return self._backend.messages.truncate(session_id, keep, guard(expected_version))

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

        One transaction under the session's lock, which does not change the history, the state or the version.
        The post is due at ``not_before`` (an aware datetime or epoch milliseconds), or at once. With a
        ``key``, a repeat returns the first post; a different message, author or time under the same key
        raises `IdempotencyConflict`. Raises `SessionEnded` for a session that has ended, and `LimitExceeded`
        if ``max_waiting_posts`` are already waiting.
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

        ``states`` contains any of ``waiting``, ``received`` and ``withdrawn``; ``limit`` is 1 to 200 (larger
        values mean 200). Raises `SessionNotFound`, `InvalidCursor` and `InvalidQuery`.
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

        Runs in one transaction and writes one version; if no posts are due, nothing is written. Open tool
        calls do not prevent this. Raises `StaleStateError`, and `SessionEnded` for a session that has ended.
        """
        validation.identifier(session_id, "session_id")
        if limit is not None:
            validation.query_number(limit, "limit", minimum=1)
        fence = guard(expected_version, fencing_token)
        return decode_messages(self._backend.posts.receive(session_id, limit, fence))

    def find_due_posts(self, *, limit: int = 200) -> list[DuePost]:
        """Return the sessions with due posts that a turn could receive now, the longest due first.

        Sessions that have ended, that are waiting for an answer, or that are locked are left out. The
        database's clock decides. ``limit`` is 1 to 1,000 (larger values mean 1,000).
        """
        return self._backend.posts.due(validation.page_limit(limit, maximum=MOST_DUE_POSTS))

    aappend_messages = async_twin(append_messages)
    aget_messages = async_twin(get_messages)
    aiter_messages = async_iterator_twin(iter_messages)
    aget_message_count = async_twin(get_message_count)
    atruncate_messages = async_twin(truncate_messages)
    apost_message = async_twin(post_message)
    alist_posts = async_twin(list_posts)
    awithdraw_post = async_twin(withdraw_post)
    areceive_posts = async_twin(receive_posts)
    afind_due_posts = async_twin(find_due_posts)
