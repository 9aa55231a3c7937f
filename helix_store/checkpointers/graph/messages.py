"""Messages of graph sessions. Each caller gets back the rows that it wrote, and paging skips no message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from django.db.models import QuerySet, Subquery
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce

from helix_store import conf
from helix_store.checkpointers.graph.payloads import encode_message, encode_messages, read_message
from helix_store.checkpointers.graph.types import StoredMessage
from helix_store.checkpointers.snapshots.rules import optional_count
from helix_store.core import moments, validation
from helix_store.core.guards import Guard, guard
from helix_store.core.limits import MAX_BIGINT
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database, DatabaseOperations, writes
from helix_store.exceptions import InvalidQuery
from helix_store.models import Message, Session
from helix_store.sessions.database.locking import advance, lock_session, session_key
from helix_store.sessions.database.rows import first_row, pk_of, session_with_id
from helix_store.sessions.requests import EncodedMessage

MESSAGE_COLUMNS: Final = ("id", "role", "payload", "created_at")

_ROWS_PER_STATEMENT: Final = 1_000
_TICK: Final = timedelta(microseconds=1)


class GraphMessages(DatabaseOperations):
    """The calls for messages."""

    def add_message(
        self,
        session_id: str,
        *,
        role: str,
        content: str | None = None,
        tool_calls: Any = None,
        tool_results: Any = None,
        tokens_in: int | None = None,
        tokens_out: int | None = None,
        fencing_token: int | None = None,
    ) -> StoredMessage:
        """Append a message and return the stored one.

        One transaction under the session's lock: ids and times increase in append order. Tool calls and
        results may contain typed values. Raises `SessionNotFound`, `InvalidPayload`, `LimitExceeded` beyond
        ``max_message_bytes``, and `FencedOutError`. A repeat appends a second message.
        """
        validation.identifier(session_id, "session_id")
        message = {
            "role": role,
            "content": content,
            "tool_calls": tool_calls,
            "tool_results": tool_results,
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
        }
        encoded = encode_message(message, conf.limits())
        return self._add(session_id, [encoded], guard(fencing_token=fencing_token))[0]

    def add_messages(
        self, session_id: str, messages: Sequence[Mapping[str, Any]], *, fencing_token: int | None = None
    ) -> list[StoredMessage]:
        """Append messages in order, all or none; each is a dict of the arguments of `add_message`.

        One transaction; errors and repeats are the same as for `add_message`.
        """
        validation.identifier(session_id, "session_id")
        encoded = encode_messages(messages, conf.limits())
        return self._add(session_id, encoded, guard(fencing_token=fencing_token))

    def get_messages(
        self, session_id: str, *, before: int | datetime | None = None, limit: int | None = None
    ) -> list[StoredMessage]:
        """Return the newest ``limit`` messages before a message id or a time, oldest first; by default, all.

        For the next page, pass the id of the first message of this page as ``before``. A message that cannot
        be read is in the list, and raises `IntegrityFault` when its content is read. Raises `SessionNotFound`
        and `InvalidQuery`.
        """
        validation.identifier(session_id, "session_id")
        position, count = _checked_before(before), optional_count(limit, "limit")

        def read() -> list[StoredMessage]:
            messages = newest_messages(self.db, session_id, before=position, limit=count)
            if not messages:
                session_key(self.db, session_id)
            return messages

        return self.db.query(read)

    aadd_message = async_twin(add_message)
    aadd_messages = async_twin(add_messages)
    aget_messages = async_twin(get_messages)

    @writes
    def _add(self, session_id: str, messages: Sequence[EncodedMessage], guard: Guard) -> list[StoredMessage]:
        head = lock_session(self.db, session_id, guard)
        if not messages:
            return []
        first = self._next_time(head)
        rows = Message.objects.using(self.db.alias).bulk_create(
            [
                Message(
                    session_id=head.pk,
                    sequence=head.message_count + 1 + index,
                    role=message.role,
                    payload=message.text,
                    created_at=first + index * _TICK,
                )
                for index, message in enumerate(messages)
            ],
            batch_size=_ROWS_PER_STATEMENT,
        )
        advance(self.db, head, at=rows[-1].created_at, message_count=rows[-1].sequence)
        return [
            read_message({name: getattr(row, name) for name in MESSAGE_COLUMNS}, session_id) for row in rows
        ]

    def _next_time(self, head: Session) -> datetime:
        """Return a time later than every message's, because a page must not end between two equal times."""
        last = first_row(
            Message.objects.using(self.db.alias)
            .filter(session_id=head.pk, sequence=head.message_count)
            .values_list("created_at", flat=True)
        )
        now = moments.now()
        return now if last is None else max(now, last + _TICK)


def newest_messages(
    db: Database, session_id: str, *, before: int | datetime | None = None, limit: int | None = None
) -> list[StoredMessage]:
    """Return the newest messages before an id or a time, oldest first. One query."""
    rows: QuerySet[Message] = Message.objects.using(db.alias).filter(session_id=pk_of(db, session_id))
    if limit is not None:
        # Numbers have no gaps, so a page is a range of numbers, which every query plan finds by an index.
        last = _last_number(db, session_id, rows, before)
        rows = rows.filter(sequence__lte=last, sequence__gt=last - limit)
    elif isinstance(before, datetime):
        rows = rows.filter(created_at__lt=before)
    elif before is not None:
        rows = rows.filter(pk__lt=before)
    newest = rows.order_by("-sequence").values(*MESSAGE_COLUMNS)
    return [read_message(row, session_id) for row in reversed(newest)]


def _last_number(
    db: Database, session_id: str, rows: QuerySet[Message], before: int | datetime | None
) -> Combinable:
    """Return the number of the newest message before a message id or a time."""
    if before is None:
        return Subquery(session_with_id(db, session_id).values("message_count"))
    newest_first = rows.order_by("-sequence").values("sequence")
    if isinstance(before, datetime):
        return Subquery(newest_first.filter(created_at__lt=before)[:1])
    # The id of a message of another session is also a position, but takes longer to find.
    own = Subquery(rows.filter(pk=before).values("sequence"))
    return Coalesce(own - 1, Subquery(newest_first.filter(pk__lt=before)[:1]))


def _checked_before(before: int | datetime | None) -> int | datetime | None:
    if isinstance(before, datetime):
        return validation.aware_datetime(before, "before")
    if before is None:
        return None
    if type(before) is not int or not 0 <= before <= MAX_BIGINT:
        raise InvalidQuery("before must be a message id or an aware datetime.", path="before")
    return before
