"""Posts in the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from django.db.models import F

from helix_store.core import moments, validation
from helix_store.core.guards import Guard
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.moments import as_utc
from helix_store.core.payloads import decode, decode_optional
from helix_store.core.posts import DuePost, PostState
from helix_store.core.posts import Post as PostValue
from helix_store.core.types import TERMINAL_STATUSES, Message
from helix_store.engine.database import Database, DatabaseOperations, reads, writes
from helix_store.engine.expressions import list_parameter
from helix_store.exceptions import IdempotencyConflict, LimitExceeded
from helix_store.models import Message as MessageRow
from helix_store.models import Post, Session
from helix_store.models.sessions import OneOf
from helix_store.sessions import post_sql
from helix_store.sessions.database.locking import advance, lock_session, session_key
from helix_store.sessions.database.messages import insert_messages
from helix_store.sessions.database.rows import first_row, pk_of
from helix_store.sessions.posts import (
    MOST_DUE_POSTS,
    NewPost,
    received_message,
    require_not_ended,
    waits_for_answer,
)
from helix_store.sessions.requests import EncodedMessage, decode_messages
from helix_store.signals import announce, session_posted

__all__ = ["announce_due_posts"]

_FIELDS: Final = tuple(
    field.name for field in fields(PostValue) if field.name not in ("session_id", "message")
)
_COLUMNS: Final = (*_FIELDS, "payload")
_FIRST: Final = (datetime.min.replace(tzinfo=UTC), 0)


class DatabasePosts(DatabaseOperations):
    @writes
    def post(self, session_id: str, new: NewPost, most: int) -> PostValue:
        """Store a post if fewer than ``most`` are waiting, or return the existing one with its key."""
        head = lock_session(self.db, session_id, None, "next_post_at")
        added = None if head.status in TERMINAL_STATUSES else self._added(head, new, most)
        if added is not None:
            return added
        posts = Post.objects.using(self.db.alias).filter(session_id=head.pk, key=new.key)
        earlier = None if new.key is None else first_row(posts.values(*_COLUMNS, "digest"))
        if earlier is not None:
            if earlier["digest"] != new.digest:
                raise IdempotencyConflict(str(new.key))
            return _value_of(earlier, session_id)
        require_not_ended(session_id, head.status)
        raise LimitExceeded(name="max_waiting_posts", limit=most, actual=most + 1)

    def _added(self, head: Session, new: NewPost, most: int) -> PostValue | None:
        parameters = {
            "key": head.pk,
            "post_id": new.post_id,
            "payload": new.text,
            "author": new.author,
            "post_key": new.key,
            "digest": new.digest,
            "not_before": new.not_before,
            "most": most,
        }
        rows = self.db.execute(post_sql.ADD_POST, parameters)
        if not rows:
            return None
        sequence, posted_at, due_at, is_due, has_set_next = rows[0]
        is_next = head.next_post_at is None or as_utc(due_at) < as_utc(head.next_post_at)
        if is_next and not has_set_next:
            self.db.execute(post_sql.SET_NEXT_POST, {"key": head.pk})
        if is_due:
            announce(self.db, head.session_id, [session_posted], post_id=new.post_id, author=new.author)
        return new.waiting(head.session_id, sequence, as_utc(posted_at), decode(new.text))

    @reads
    def select(
        self, session_id: str, *, states: Sequence[PostState], after: int, limit: int
    ) -> list[PostValue]:
        """Return the posts after a sequence."""
        posts = Post.objects.using(self.db.alias).filter(
            session_id=pk_of(self.db, session_id), sequence__gt=after
        )
        chosen = posts.filter(OneOf(F("state"), states)) if states else posts.none()
        found = list(chosen.order_by("sequence").values(*_COLUMNS)[:limit])
        if not found:
            session_key(self.db, session_id)
        return [_value_of(row, session_id) for row in found]

    @writes
    def withdraw(self, session_id: str, post_id: str) -> bool:
        head = lock_session(self.db, session_id)
        withdrawn = self.db.execute(post_sql.WITHDRAW_POST, {"key": head.pk, "post_id": post_id})
        if withdrawn:
            self.db.execute(post_sql.SET_NEXT_POST, {"key": head.pk})
        return bool(withdrawn)

    @writes
    def receive(self, session_id: str, limit: int | None, guard: Guard) -> list[str]:
        """Return the payloads of the received messages as text."""
        head = lock_session(self.db, session_id, guard, "next_post_at")
        require_not_ended(session_id, head.status)
        if head.next_post_at is None:
            return []
        at = moments.now()
        received = receive_due(self.db, head, position=head.message_count, at=at, limit=limit)
        if received:
            count = insert_messages(self.db, head, received, at=at)
            advance(self.db, head, at=at, message_count=count)
        return [message.text for message in received]

    def due(self, limit: int) -> list[DuePost]:
        return [
            DuePost(session_id=due.session_id, due_at=as_utc(due.due_at), count=due.posts)
            for due in find_due_sessions(self.db, limit)
        ]


def receive_due(
    db: Database, head: Session, *, position: int, at: datetime, limit: int | None = None
) -> list[EncodedMessage]:
    """Mark due posts of a locked session as received, and return their messages for the caller to insert.

    ``position`` is that of the first message.
    """
    most = MAX_BIGINT if limit is None else limit
    rows = db.execute(post_sql.DUE_POSTS, {"key": head.pk, "limit": most})
    if not rows:
        return []
    received = {
        "key": head.pk,
        "keys": list_parameter(db, [key for key, _ in rows]),
        "first": position,
        "version": head.version + 1,
        "at": at,
    }
    db.execute(post_sql.MARK_RECEIVED, received)
    db.execute(post_sql.SET_NEXT_POST, {"key": head.pk})
    return [received_message(text) for _, text in rows]


def received_at(db: Database, head: Session, version: int) -> list[Message]:
    """Return the messages that a commit of a locked session received and that are still in the history."""
    posts = Post.objects.using(db.alias).filter(session_id=head.pk, received_version=version)
    times = dict(posts.values_list("position", "received_at"))
    rows = MessageRow.objects.using(db.alias).filter(
        session_id=head.pk, sequence__in=[position + 1 for position in times if position is not None]
    )
    found = rows.order_by("sequence").values_list("sequence", "created_at", "payload")
    return decode_messages([text for sequence, at, text in found if times[sequence - 1] == at])


def announce_due_posts(*, using: str | None = None, tenant: str | None = None, limit: int = 200) -> int:
    """Send `session_posted` for the first due post of each session that `find_due_posts` finds.

    Returns the number of sessions. ``tenant=None`` means all tenants of the database ``using``.
    """
    limit = validation.page_limit(limit, maximum=MOST_DUE_POSTS)
    db = Database(using, "" if tenant is None else validation.tenant(tenant))
    found = find_due_sessions(db, limit, of_all=tenant is None)
    for due in found:
        announce(
            db, due.session_id, [session_posted], tenant=due.tenant, post_id=due.post_id, author=due.author
        )
    return len(found)


class DueSession(NamedTuple):
    """A session that a worker could drive now to receive its due posts. ``post_id`` is the first due post."""

    key: int
    due_at: datetime
    tenant: str
    session_id: str
    status: str
    suspension_kind: str | None
    pending: str | None
    post_id: str
    author: str | None
    posts: int


def find_due_sessions(db: Database, limit: int, *, of_all: bool = False) -> list[DueSession]:
    """Return the sessions of `find_due_posts`, of the tenant or of all tenants."""
    statement = post_sql.FIND_DUE_POSTS_OF_ALL if of_all else post_sql.FIND_DUE_POSTS
    found: list[DueSession] = []
    due_at, key = _FIRST
    while len(found) < limit:
        # One page is read, unless it contains sessions in which only some of the calls are answered.
        size = limit - len(found)
        page = {"tenant": db.tenant, "due_at": due_at, "key": key, "limit": size}
        rows = [DueSession(*row) for row in db.read(statement, page)]
        found += (row for row in rows if not waits_for_answer(row.status, row.suspension_kind, row.pending))
        if len(rows) < size:
            break
        due_at, key = rows[-1].due_at, rows[-1].key
    return found


def _value_of(row: Mapping[str, Any], session_id: str) -> PostValue:
    values = {name: row[name] for name in _FIELDS}
    return PostValue(session_id=session_id, message=decode_optional(row["payload"]), **values)
