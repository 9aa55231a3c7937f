"""Posts in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.posts import DuePost, Post, PostState
from helix_store.core.types import TERMINAL_STATUSES
from helix_store.exceptions import IdempotencyConflict, LimitExceeded
from helix_store.sessions.memory.records import SessionRecord, StoredPost, stored_messages
from helix_store.sessions.memory.scope import MemoryOperations
from helix_store.sessions.posts import NewPost, received_message, require_not_ended, waits_for_answer
from helix_store.sessions.requests import EncodedMessage
from helix_store.signals import session_posted


class MemoryPosts(MemoryOperations):
    def post(self, session_id: str, new: NewPost, most: int) -> Post:
        with self._scope.writing(session_id) as draft:
            earlier = _with_key(draft, new.key)
            if earlier is not None:
                if earlier.digest != new.digest:
                    raise IdempotencyConflict(str(new.key))
                return earlier.value()
            require_not_ended(session_id, draft.columns["status"])
            if len(_waiting(draft)) >= most:
                raise LimitExceeded(name="max_waiting_posts", limit=most, actual=most + 1)
            post = new.waiting(session_id, len(draft.posts) + 1, moments.now())
            stored = draft.posts[post.post_id] = StoredPost(post, new.text, new.digest)
            _set_next(draft)
        if stored.due_at <= post.posted_at:
            self._scope.announce(session_id, [session_posted], post_id=post.post_id, author=post.author)
        return stored.value()

    def select(self, session_id: str, *, states: Sequence[PostState], after: int, limit: int) -> list[Post]:
        posts = self._scope.require(session_id).posts.values()
        found = (each for each in posts if each.post.state in states and each.post.sequence > after)
        return [each.value() for each in islice(found, limit)]

    def withdraw(self, session_id: str, post_id: str) -> bool:
        with self._scope.writing(session_id) as draft:
            stored = draft.posts.get(post_id)
            if stored is None or stored.post.state != "waiting":
                return False
            draft.posts[post_id] = replace(stored, post=replace(stored.post, state="withdrawn"), text=None)
            _set_next(draft)
            return True

    def receive(self, session_id: str, limit: int | None, guard: Guard) -> list[str]:
        with self._scope.writing(session_id, guard) as draft:
            require_not_ended(session_id, draft.columns["status"])
            received = receive_due(draft, limit=limit)
            if received:
                draft.write()
            return [message.text for message in received]

    def due(self, limit: int) -> list[DuePost]:
        now = moments.now()
        found = []
        with self._scope.lock:
            for record in self._scope.sessions.values():
                due = [each for each in _waiting(record) if each.due_at <= now]
                if due and not self._is_busy(record):
                    found.append(DuePost(session_id=record.session_id, due_at=due[0].due_at, count=len(due)))
        return sorted(found, key=attrgetter("due_at", "session_id"))[:limit]

    def _is_busy(self, record: SessionRecord) -> bool:
        columns = record.columns
        return (
            columns["status"] in TERMINAL_STATUSES
            or waits_for_answer(
                columns["status"], columns["suspension_kind"], columns["pending_client_tool_calls"]
            )
            or self._scope.is_locked(record.session_id)
        )


def receive_due(draft: SessionRecord, *, limit: int | None = None) -> list[EncodedMessage]:
    """Append the messages of due posts to a draft, mark these as received, and return the messages."""
    now = moments.now()
    due = [each for each in _waiting(draft) if each.due_at <= now][:limit]
    for position, each in enumerate(due, len(draft.messages)):
        post = replace(each.post, state="received", received_at=now, position=position)
        draft.posts[post.post_id] = replace(each, post=post, text=None)
    received = [received_message(each.text) for each in due if each.text is not None]
    draft.messages.extend(stored_messages(received, now))
    _set_next(draft)
    return received


def _waiting(record: SessionRecord) -> list[StoredPost]:
    """The waiting posts, in the order in which they are received."""
    waiting = [each for each in record.posts.values() if each.post.state == "waiting"]
    return sorted(waiting, key=lambda each: (each.due_at, each.post.sequence))


def _set_next(draft: SessionRecord) -> None:
    waiting = _waiting(draft)
    draft.columns["next_post_at"] = waiting[0].due_at if waiting else None


def _with_key(record: SessionRecord, key: str | None) -> StoredPost | None:
    if key is None:
        return None
    return next((each for each in record.posts.values() if each.post.key == key), None)
