"""The messages of a session, and posts, which others send to it."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from django.db.models import F

from helix_store.core import moments, validation
from helix_store.core.approvals import ActingUser, actor_text, is_user, user_text
from helix_store.core.dicts import AnyMessage
from helix_store.core.ids import new_id
from helix_store.core.limits import MAX_BIGINT, Limits
from helix_store.core.moments import as_utc
from helix_store.core.payloads import decode, decode_all, decode_optional
from helix_store.core.posts import DuePost, Post, PostState
from helix_store.core.posts import Post as PostValue
from helix_store.core.types import TERMINAL_STATUSES, Message, SessionStatus, UserId
from helix_store.core.validation import Guard
from helix_store.engine.async_twins import in_thread_to_the_end
from helix_store.engine.database import Database, DatabaseOperations, Rows, reads, writes
from helix_store.engine.expressions import for_keys, insert_rows, is_in_list, list_parameter
from helix_store.engine.statement import CITUS, POSTGRESQL, SQLITE, Clock, Statement, table, with_clock
from helix_store.exceptions import (
    IdempotencyConflict,
    IntegrityFault,
    LimitExceeded,
    SessionEnded,
    TenantMoved,
)
from helix_store.models import Checkpoint, CheckpointKind, Lock, Session
from helix_store.models import Message as MessageRow
from helix_store.models import Post as PostRow
from helix_store.models.sessions import NON_TERMINAL, OneOf
from helix_store.sessions.locking import (
    advance,
    first_row,
    lock_session,
    missing_session,
    pk_of,
    session_key,
    session_with_id,
    touch,
)
from helix_store.sessions.state import (
    EncodedMessage,
    drop_checkpoints,
    encode_messages,
    stand_for_no_step,
)
from helix_store.sessions.statements import MESSAGES, NEWEST_MESSAGES
from helix_store.sessions.waiting import readable_open_calls
from helix_store.signals import announce, session_posted

__all__ = ["aannounce_due_posts", "announce_due_posts"]


_ROWS_PER_STATEMENT = 1_000
_LOOK_BACK = 20
_MESSAGE_COLUMNS = ("session_id", "sequence", "role", "payload", "created_at")


class DatabaseMessages(DatabaseOperations):
    @writes
    def append(self, session_id: str, messages: Sequence[EncodedMessage], guard: Guard) -> int:
        """Append messages and return the new message count."""
        head = lock_session(self.db, session_id, guard)
        if not messages:
            return head.message_count
        at = moments.now()
        count = insert_messages(self.db, head, messages, at=at)
        advance(self.db, head, at=at, message_count=count)
        return count

    def page(
        self, session_id: str, *, offset: int, limit: int | None, descending: bool
    ) -> tuple[list[str], int]:
        """Return the payloads of the page as text, and the number of messages of the session.

        Raises `IntegrityFault` if a message of the page is missing, or if the session's number is wrong.
        """
        statement = NEWEST_MESSAGES if descending else MESSAGES
        rows = self._read(statement, session_id, offset, limit)
        if not rows:
            total = self.count(session_id)
            if offset >= total:
                return [], total
            # Either these messages have just arrived, or they are missing.
            rows = self._read(statement, session_id, offset, limit)
            if not rows:
                raise _are_missing()
        texts, total = [text for text, _ in rows], rows[0][1]
        _require_all(texts, total - offset, limit)
        return texts[::-1] if descending else texts, total

    def pages(self, session_id: str, size: int) -> Iterator[list[str]]:
        """Return the payloads of all messages as text, ``size`` at a time. Raises as `page` does."""
        sequence = expected = 0
        while rows := self._read(MESSAGES, session_id, sequence, size):
            expected = rows[0][1]
            _require_all(rows, expected - sequence, size)
            sequence += len(rows)
            yield [text for text, _ in rows]
        # After a truncation in the meantime, nothing is missing.
        if sequence < expected and sequence < self.count(session_id):
            raise _are_missing()

    def _read(self, statement: Statement, session_id: str, offset: int, limit: int | None) -> Rows:
        # A larger limit would exceed a bigint in the statement.
        most = None if limit is None else min(limit, MAX_BIGINT - offset)
        page = {"tenant": self.db.tenant, "session_id": session_id, "offset": offset, "limit": most}
        return self.db.read(statement, page)

    @reads
    def count(self, session_id: str) -> int:
        count = first_row(session_with_id(self.db, session_id).values_list("message_count", flat=True))
        if count is None:
            raise missing_session(self.db, session_id)
        return count

    @writes
    def truncate(self, session_id: str, keep: int, guard: Guard) -> int:
        """Truncate the history and return the version, unchanged if ``keep`` reaches the end."""
        head = lock_session(self.db, session_id, guard)
        if keep >= head.message_count:
            return head.version
        cut_history(self.db, head, keep)
        beyond = Checkpoint.objects.using(self.db.alias).filter(
            session_id=head.pk, kind=CheckpointKind.STEP, message_count__gt=keep
        )
        drop_checkpoints(self.db, head, beyond)
        stand_for_no_step(self.db, head, keep)
        return advance(self.db, head, message_count=keep)


def _require_all(found: Sequence[Any], expected: int, limit: int | None) -> None:
    """Raise `IntegrityFault` unless a page has as many messages as the session's number promises."""
    if len(found) != (expected if limit is None else min(expected, limit)):
        raise _are_missing()


def _are_missing() -> IntegrityFault:
    return IntegrityFault(
        "Messages of this session are missing, or their number is wrong; other sessions are not affected. "
        "Run helix_doctor."
    )


def insert_messages(db: Database, head: Session, messages: Sequence[EncodedMessage], *, at: datetime) -> int:
    """Append to a locked session and return the new message count, which the caller writes to the head."""
    rows = [
        (head.pk, sequence, message.role, message.text, at)
        for sequence, message in enumerate(messages, head.message_count + 1)
    ]
    for start in range(0, len(rows), _ROWS_PER_STATEMENT):
        insert_rows(db, MessageRow, _MESSAGE_COLUMNS, rows[start : start + _ROWS_PER_STATEMENT])
    return head.message_count + len(messages)


def history_backwards(db: Database, head: Session) -> Iterator[Message]:
    """The messages of a locked session, newest first, read in pages as they are needed."""
    for offset in range(0, head.message_count, _LOOK_BACK):
        page = {"tenant": db.tenant, "session_id": head.session_id, "offset": offset, "limit": _LOOK_BACK}
        yield from decode_messages([text for text, _ in reversed(db.execute(NEWEST_MESSAGES, page))])


def cut_history(db: Database, head: Session, keep: int) -> None:
    """Delete a locked session's messages beyond the first ``keep``."""
    MessageRow.objects.using(db.alias).filter(session_id=head.pk, sequence__gt=keep).delete()


MOST_DUE_POSTS: Final = 1_000
"""The maximum size of a page of sessions with due posts."""

_STATES: Final[tuple[PostState, ...]] = ("waiting", "received", "withdrawn")


@dataclass(frozen=True, slots=True)
class NewPost:
    """A checked post. A repeat under the same key must have the same digest."""

    post_id: str
    text: str
    author: str | None
    key: str | None
    not_before: datetime | None
    digest: str

    def waiting(
        self, session_id: str, sequence: int, posted_at: datetime, message: Message | None = None
    ) -> Post:
        """Return the post in the form in which it waits to be received."""
        return Post(
            post_id=self.post_id,
            session_id=session_id,
            sequence=sequence,
            message=message,
            author=self.author,
            key=self.key,
            not_before=self.not_before,
            posted_at=posted_at,
            state="waiting",
            received_at=None,
            position=None,
        )


def checked_post(
    message: AnyMessage, *, key: Any, author: UserId | ActingUser | None, not_before: Any, limits: Limits
) -> NewPost:
    """Check the arguments of a post. Raises `InvalidPayload` and `LimitExceeded`."""
    validation.optional_identifier(key, "key")
    author_id = _author(author)
    at = None if not_before is None else _moment(not_before)
    ((_, text),) = encode_messages([message], limits)
    parts = [decode(text), author_id, None if at is None else at.isoformat()]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return NewPost(new_id(), text, author_id, key, at, digest)


def _author(author: Any) -> str | None:
    """Return the stored author. A Django user has the form that no text may have."""
    if is_user(author):
        return user_text(author, "author")
    author_id = validation.user_id(author, "author")
    return None if author_id is None else actor_text(author_id, "author")


def _moment(value: Any) -> datetime:
    milliseconds = validation.epoch_milliseconds(value, "not_before")
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    return validation.milliseconds_to_datetime(milliseconds)


def checked_states(states: Any) -> tuple[PostState, ...]:
    """The states to list, in a fixed order. Raises `InvalidQuery`."""
    return validation.some_of(states, _STATES, "states")


def require_not_ended(session_id: str, status: str) -> None:
    """Raise `SessionEnded` for a status in which a session accepts no posts."""
    if status in TERMINAL_STATUSES:
        raise SessionEnded(session_id, SessionStatus(status).value)


def received_message(text: str) -> EncodedMessage:
    """The stored text that a post has as a message in the history. Raises `IntegrityFault`."""
    message = decode(text)
    if type(message) is not dict or type(message.get("role")) is not str:
        raise IntegrityFault("A stored post is not a message; other rows are not affected.")
    return EncodedMessage(message["role"], text)


def has_open_calls(newest_first: Iterable[Message]) -> bool:
    """Return whether tool calls of the newest assistant message, or of several in a row, have no result."""
    answered: set[Any] = set()
    is_calling = False
    for message in newest_first:
        calls = message.get("tool_calls") if message["role"] == "assistant" else None
        if isinstance(calls, list) and calls:
            is_calling = True
            ids = [call.get("id") for call in calls if isinstance(call, dict)]
            if any(isinstance(call_id, str) and call_id not in answered for call_id in ids):
                return True
        elif is_calling or message["role"] == "assistant":
            return False
        elif message["role"] == "tool" and isinstance(message.get("tool_call_id"), str):
            answered.add(message["tool_call_id"])
    return False


def waits_for_answer(
    status: str, suspension_kind: str | None, open_calls: Mapping[str, object] | None
) -> bool:
    """Return whether a session waits for an answer or was paused, so that no turn can continue it.

    ``open_calls`` are the calls that somebody still has to answer, or ``None`` if they cannot be read.
    """
    if status not in (SessionStatus.PAUSED, SessionStatus.INTERRUPTED):
        return False
    if suspension_kind is None:
        return status == SessionStatus.PAUSED
    return open_calls is None or bool(open_calls)


_SESSION: Final = table(Session)
_POST: Final = table(PostRow)
_WAITING: Final = "session_id = %(key)s AND state = 'waiting'"
# In a prepared statement a parameter has a single type, but this one would have two.
_KEY: Final = "CAST(%(post_key)s AS varchar)"


def _add(now: str, source: str = "") -> str:
    return f"""
        INSERT INTO {_POST} (session_id, post_id, sequence, payload, author, key, digest, not_before, due_at,
            posted_at, state)
        SELECT %(key)s, %(post_id)s,
            (SELECT coalesce(max(sequence), 0) + 1 FROM {_POST} WHERE session_id = %(key)s),
            %(payload)s, %(author)s, {_KEY}, %(digest)s, %(not_before)s,
            coalesce(%(not_before)s, {now}), {now}, 'waiting'
        {source}
        WHERE NOT EXISTS (SELECT 1 FROM {_POST} AS p WHERE p.session_id = %(key)s AND p.key = {_KEY})
            AND (SELECT count(*) FROM {_POST} WHERE {_WAITING}) < %(most)s
        RETURNING sequence, posted_at, due_at, due_at <= posted_at, false"""


def _add_at(clock: Clock) -> str:
    # PostgreSQL's clock advances within a statement.
    return _add("given.at", f"FROM (SELECT {clock.now} AS at) AS given")


ADD_POST: Final = Statement(
    postgresql=f"""
        WITH added AS ({_add_at(POSTGRESQL)}), next AS (
            UPDATE {_SESSION} AS s SET next_post_at = LEAST(s.next_post_at, added.due_at) FROM added
            WHERE s.id = %(key)s)
        SELECT sequence, posted_at, due_at, due_at <= posted_at, true FROM added""",
    sqlite=_add(SQLITE.now),
    citus=(_add_at(CITUS),),
)
"""Adds no row for a key that exists, and none beyond the maximum. The last column is true if the session's
``next_post_at`` is up to date; otherwise the caller sets it.
"""

DUE_POSTS: Final = with_clock(
    lambda clock: (
        f"""
        SELECT id, payload FROM {_POST} WHERE {_WAITING} AND due_at <= {clock.now}
        ORDER BY due_at, sequence LIMIT %(limit)s"""
    )
)


def _mark_received(offset: str, is_listed: str) -> str:
    return f"""
        UPDATE {_POST} SET state = 'received', payload = NULL, received_at = %(at)s,
            received_version = %(version)s, position = %(first)s + {offset}
        WHERE {is_listed}"""


# SQLite would read all posts of the session.
MARK_RECEIVED: Final = Statement(
    postgresql=_mark_received(
        "array_position(%(keys)s::bigint[], id) - 1",
        "session_id = %(key)s AND id = ANY(%(keys)s::bigint[])",
    ),
    sqlite=_mark_received(
        f"(SELECT key FROM json_each(%(keys)s) WHERE value = {_POST}.id)",
        "+session_id = %(key)s AND id IN (SELECT value FROM json_each(%(keys)s))",
    ),
)

WITHDRAW_POST: Final = Statement(
    f"""UPDATE {_POST} SET state = 'withdrawn', payload = NULL
        WHERE {_WAITING} AND post_id = %(post_id)s RETURNING id"""
)

SET_NEXT_POST: Final = Statement(
    f"""UPDATE {_SESSION} SET next_post_at = (SELECT min(due_at) FROM {_POST} WHERE {_WAITING})
        WHERE id = %(key)s"""
)


def _contains(vendor_form: str, word: str) -> str:
    return vendor_form.format("s.pending_client_tool_calls", f"""'"{word}":'""") + " > 0"


def is_driven(clock: Clock, session: str = "s") -> str:
    """Return the condition that a worker holds the lock of a session."""
    return f"""EXISTS (SELECT 1 FROM {table(Lock)} AS l
                WHERE l.tenant = {session}.tenant AND l.name = {session}.session_id
                    AND l.expires_at > {clock.now})"""


def is_unanswered(clock: Clock, due: str) -> str:
    """Return the condition that a post of the session ``s`` was due at a time, and that a worker could
    receive it.

    A suspended session waits if none of its calls is answered. If only some of the calls are answered, the
    caller must read them.
    """
    position = "instr({}, {})" if clock is SQLITE else "pg_catalog.strpos({}, {})"
    return f"""s.next_post_at <= {due}
            AND s.status IN ({", ".join(f"'{status}'" for status in NON_TERMINAL)})
            AND (s.status <> 'paused' OR s.suspension_kind IS NOT NULL)
            AND (s.suspension_kind IS NULL OR s.status NOT IN ('paused', 'interrupted')
                OR s.pending_client_tool_calls IS NULL OR {_contains(position, "submitted_at")}
                OR NOT {_contains(position, "tool_name")})
            AND NOT {is_driven(clock)}"""


def _find_due(clock: Clock, of_tenant: str, page: str) -> str:
    first = f"""(SELECT p.{{}} FROM {_POST} AS p WHERE p.session_id = s.id AND p.state = 'waiting'
                ORDER BY p.due_at, p.sequence LIMIT 1)"""
    return f"""
        SELECT s.id, s.next_post_at, s.tenant, s.session_id, s.status, s.suspension_kind,
            s.pending_client_tool_calls, s.live_decisions,
            {first.format("post_id")}, {first.format("author")},
            (SELECT count(*) FROM {_POST} AS p
             WHERE p.session_id = s.id AND p.state = 'waiting' AND p.due_at <= {clock.now})
        FROM {_SESSION} AS s
        WHERE {of_tenant} {is_unanswered(clock, clock.now)}
            {page}"""


def _find_due_statement(page: str, postgresql: str = "", sqlite: str = "") -> Statement:
    return Statement(
        _find_due(POSTGRESQL, postgresql, page),
        _find_due(SQLITE, sqlite, page),
        citus=(_find_due(CITUS, postgresql, page),),
    )


_LONGEST_DUE_FIRST: Final = """AND (s.next_post_at, s.id) > (%(due_at)s, %(key)s)
        ORDER BY s.next_post_at, s.id LIMIT %(limit)s"""
_IN_TURN: Final = """ORDER BY s.announced_at NULLS FIRST, s.next_post_at, s.id
        LIMIT %(limit)s OFFSET %(offset)s"""
# SQLite would prefer an index that begins with the tenant, and sort the rows afterwards.
OF_TENANT: Final = ("s.tenant = (SELECT %(tenant)s) AND", "+s.tenant = %(tenant)s AND")
FIND_DUE_POSTS: Final = _find_due_statement(_LONGEST_DUE_FIRST, *OF_TENANT)
FIND_DUE_POSTS_OF_ALL: Final = _find_due_statement(_LONGEST_DUE_FIRST)
_IS_OF_SOME: Final = is_in_list("s.tenant", "tenants", "text")
FIND_DUE_POSTS_OF_SOME: Final = _find_due_statement(
    _LONGEST_DUE_FIRST, f"{_IS_OF_SOME[0]} AND", f"+{_IS_OF_SOME[1]} AND"
)
DUE_POSTS_IN_TURN: Final = _find_due_statement(_IN_TURN, *OF_TENANT)
DUE_POSTS_IN_TURN_OF_ALL: Final = _find_due_statement(_IN_TURN)
"""The sessions that no wake-up has announced come first, and those announced last come last."""


def _mark_announced(lock: str) -> str:
    return f"""
        UPDATE {_SESSION} SET announced_at = %(at)s WHERE id IN (
            SELECT id FROM {_SESSION} WHERE id IN %(keys)s {lock})"""


# A session that is being written need not be marked.
MARK_ANNOUNCED: Final = for_keys(
    Statement(_mark_announced("ORDER BY id FOR NO KEY UPDATE SKIP LOCKED"), _mark_announced(""))
)


_FIELDS: Final = tuple(
    field.name for field in fields(PostValue) if field.name not in ("session_id", "message")
)
_POST_COLUMNS: Final = (*_FIELDS, "payload")
_FIRST: Final = (datetime.min.replace(tzinfo=UTC), 0)


def posts_of(
    db: Database, session_id: str, *, states: Sequence[PostState], after: int, limit: int
) -> list[PostValue]:
    """Return the posts of a session after a sequence: none if there is no such session. One statement."""
    posts = PostRow.objects.using(db.alias).filter(session_id=pk_of(db, session_id), sequence__gt=after)
    chosen = posts.filter(OneOf(F("state"), states)) if states else posts.none()
    return [_value_of(row, session_id) for row in chosen.order_by("sequence").values(*_POST_COLUMNS)[:limit]]


class DatabasePosts(DatabaseOperations):
    @writes
    def post(self, session_id: str, new: NewPost, most: int) -> PostValue:
        """Store a post if fewer than ``most`` are waiting, or return the existing one with its key."""
        head = lock_session(self.db, session_id, None, "next_post_at")
        added = None if head.status in TERMINAL_STATUSES else self._added(head, new, most)
        if added is not None:
            return added
        posts = PostRow.objects.using(self.db.alias).filter(session_id=head.pk, key=new.key)
        earlier = None if new.key is None else first_row(posts.values(*_POST_COLUMNS, "digest"))
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
        rows = self.db.execute(ADD_POST, parameters)
        if not rows:
            return None
        sequence, posted_at, due_at, is_due, has_set_next = rows[0]
        is_next = head.next_post_at is None or as_utc(due_at) < as_utc(head.next_post_at)
        if is_next and not has_set_next:
            self.db.execute(SET_NEXT_POST, {"key": head.pk})
        elif not has_set_next:
            touch(self.db, head)
        if is_due:
            announce(self.db, head.session_id, [session_posted], post_id=new.post_id, author=new.author)
        return new.waiting(head.session_id, sequence, as_utc(posted_at), decode(new.text))

    @reads
    def select(
        self, session_id: str, *, states: Sequence[PostState], after: int, limit: int
    ) -> list[PostValue]:
        """Return the posts after a sequence."""
        found = posts_of(self.db, session_id, states=states, after=after, limit=limit)
        if not found:
            session_key(self.db, session_id)
        return found

    @writes
    def withdraw(self, session_id: str, post_id: str) -> bool:
        head = lock_session(self.db, session_id)
        withdrawn = self.db.execute(WITHDRAW_POST, {"key": head.pk, "post_id": post_id})
        if withdrawn:
            self.db.execute(SET_NEXT_POST, {"key": head.pk})
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
    rows = db.execute(DUE_POSTS, {"key": head.pk, "limit": most})
    if not rows:
        return []
    received = {
        "key": head.pk,
        "keys": list_parameter(db, [key for key, _ in rows]),
        "first": position,
        "version": head.version + 1,
        "at": at,
    }
    db.execute(MARK_RECEIVED, received)
    db.execute(SET_NEXT_POST, {"key": head.pk})
    return [received_message(text) for _, text in rows]


def received_at(db: Database, head: Session, version: int) -> list[Message]:
    """Return the messages that a commit of a locked session received and that are still in the history."""
    posts = PostRow.objects.using(db.alias).filter(session_id=head.pk, received_version=version)
    times = dict(posts.values_list("position", "received_at"))
    rows = MessageRow.objects.using(db.alias).filter(
        session_id=head.pk, sequence__in=[position + 1 for position in times if position is not None]
    )
    found = rows.order_by("sequence").values_list("sequence", "created_at", "payload")
    return decode_messages([text for sequence, at, text in found if times[sequence - 1] == at])


def announce_due_posts(*, using: str | None = None, tenant: str | None = None, limit: int = 200) -> int:
    """Send `session_posted` for the first due post of each session that `find_due_posts` finds.

    Returns the number of sessions. ``tenant=None`` means all tenants of the database ``using``. If there are
    more sessions than ``limit``, those that were announced last come last.
    """
    limit = validation.page_limit(limit, maximum=MOST_DUE_POSTS)
    db = Database(using, "" if tenant is None else validation.tenant(tenant))
    found = _due_in_turn(db, limit, of_all=tenant is None)
    if len(found) == limit:
        mark_announced(using, [(due.tenant, due.key) for due in found])
    for due in found:
        announce(
            db, due.session_id, [session_posted], tenant=due.tenant, post_id=due.post_id, author=due.author
        )
    return len(found)


async def aannounce_due_posts(
    *, using: str | None = None, tenant: str | None = None, limit: int = 200
) -> int:
    """Async version of `announce_due_posts`."""
    return await in_thread_to_the_end(lambda: announce_due_posts(using=using, tenant=tenant, limit=limit))


def mark_announced(using: str | None, sessions: Iterable[tuple[str, int]]) -> None:
    """Record that sessions, given by tenant and key, were announced now. One statement for each tenant."""
    at = moments.now()
    keys = defaultdict(list)
    for tenant, key in sessions:
        keys[tenant].append(key)
    for tenant, of_tenant in keys.items():
        db = Database(using, tenant)
        # Nobody can write to a tenant that was moved, and there is nothing to continue here.
        with suppress(TenantMoved):
            db.write(MARK_ANNOUNCED, {"tenant": tenant, "keys": list_parameter(db, of_tenant), "at": at})


class DueSession(NamedTuple):
    """A session that a worker could drive now to receive its due posts. ``post_id`` is the first due post."""

    key: int
    due_at: datetime
    tenant: str
    session_id: str
    status: str
    suspension_kind: str | None
    pending: str | None
    live: Any
    post_id: str
    author: str | None
    posts: int


def growing_pages(first: int) -> Iterator[int]:
    """Yield the sizes of the pages of a search that may have to read past many sessions."""
    size = first
    while True:
        yield size
        size = max(size, min(2 * size, MOST_DUE_POSTS))


def find_due_sessions(
    db: Database, limit: int, *, of_all: bool = False, tenants: Sequence[str] | None = None
) -> list[DueSession]:
    """Return the sessions of `find_due_posts`, of the tenant, of these tenants or of all tenants."""
    statement = FIND_DUE_POSTS_OF_ALL if of_all else FIND_DUE_POSTS
    of_some: dict[str, Any] = {}
    if tenants is not None:
        statement, of_some = FIND_DUE_POSTS_OF_SOME, {"tenants": list_parameter(db, list(tenants))}
    found: list[DueSession] = []
    due_at, key = _FIRST
    # One page is read, unless it contains sessions in which only some of the calls are answered.
    for size in growing_pages(limit):
        page = {"tenant": db.tenant, "due_at": due_at, "key": key, "limit": size, **of_some}
        rows = [DueSession(*row) for row in db.read(statement, page)]
        found += _drivable(db, rows)
        if len(rows) < size or len(found) >= limit:
            break
        due_at, key = rows[-1].due_at, rows[-1].key
    return found[:limit]


def _due_in_turn(db: Database, limit: int, *, of_all: bool) -> list[DueSession]:
    """Return the due sessions of the tenant or of all tenants, those that were announced last at the end."""
    statement = DUE_POSTS_IN_TURN_OF_ALL if of_all else DUE_POSTS_IN_TURN
    found: list[DueSession] = []
    offset = 0
    for size in growing_pages(limit):
        page = {"tenant": db.tenant, "limit": size, "offset": offset}
        rows = [DueSession(*row) for row in db.read(statement, page)]
        found += _drivable(db, rows)
        if len(rows) < size or len(found) >= limit:
            break
        offset += size
    return found[:limit]


def _drivable(db: Database, rows: Sequence[DueSession]) -> list[DueSession]:
    """Return the sessions that do not wait for an answer.

    This takes one statement if a state holds an answer that may be the agent's own, otherwise none.
    """
    # Nobody reads the calls of a session that is not suspended.
    suspended = {row.key: (row.pending, row.live) for row in rows if row.suspension_kind is not None}
    calls = readable_open_calls(db, suspended)
    return [row for row in rows if not waits_for_answer(row.status, row.suspension_kind, calls.get(row.key))]


def _value_of(row: Mapping[str, Any], session_id: str) -> PostValue:
    values = {name: row[name] for name in _FIELDS}
    return PostValue(session_id=session_id, message=decode_optional(row["payload"]), **values)


_THINKING_PARTS: Final = frozenset({"thinking", "reasoning"})


def decode_messages(texts: Sequence[str]) -> list[Message]:
    """Read stored messages. Raises `IntegrityFault`."""
    messages: list[Message] = decode_all(texts)
    for message in messages:
        if type(message) is not dict:
            raise IntegrityFault("A stored message is not a JSON object; other rows are not affected.")
    return messages


def without_thinking(message: Message) -> Message:
    """Return the message without its ``thinking`` key and content parts of type thinking or reasoning."""
    kept = {key: value for key, value in message.items() if key != "thinking"}
    if isinstance(kept.get("content"), list):
        kept["content"] = [part for part in kept["content"] if not _is_thinking(part)]
    return kept


def _is_thinking(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _THINKING_PARTS
