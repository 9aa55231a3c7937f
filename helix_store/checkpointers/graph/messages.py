"""Messages of graph sessions in the database. Each caller gets the rows it wrote; pages lose no message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from django.db.models import QuerySet, Subquery
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce

from helix_store.checkpointers.graph.payloads import read_message
from helix_store.checkpointers.graph.types import StoredMessage
from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.engine.database import Database, DatabaseOperations, reads, writes
from helix_store.models import Message, Session
from helix_store.sessions.database.locking import advance, lock_session, session_key
from helix_store.sessions.database.rows import first_row, pk_of, session_with_id
from helix_store.sessions.requests import EncodedMessage

__all__ = ["MESSAGE_COLUMNS", "GraphMessages", "message_from", "newest_messages"]

MESSAGE_COLUMNS: Final = ("id", "role", "payload", "created_at")

_ROWS_PER_STATEMENT: Final = 1_000
_TICK: Final = timedelta(microseconds=1)


class GraphMessages(DatabaseOperations):
    @writes
    def add(self, session_id: str, messages: Sequence[EncodedMessage], guard: Guard) -> list[StoredMessage]:
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
            read_message(
                row.payload, id=row.pk, session_id=session_id, role=row.role, created_at=row.created_at
            )
            for row in rows
        ]

    @reads
    def page(
        self, session_id: str, *, before: int | datetime | None, limit: int | None
    ) -> list[StoredMessage]:
        messages = newest_messages(self.db, session_id, before=before, limit=limit)
        if not messages:
            session_key(self.db, session_id)
        return messages

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
        # Numbers have no gaps, so a page is a range of numbers, which every plan finds by an index.
        last = _last_number(db, session_id, rows, before)
        rows = rows.filter(sequence__lte=last, sequence__gt=last - limit)
    elif isinstance(before, datetime):
        rows = rows.filter(created_at__lt=before)
    elif before is not None:
        rows = rows.filter(pk__lt=before)
    newest = rows.order_by("-sequence").values(*MESSAGE_COLUMNS)
    return [message_from(row, session_id) for row in reversed(newest)]


def _last_number(
    db: Database, session_id: str, rows: QuerySet[Message], before: int | datetime | None
) -> Combinable:
    """Return the number of the newest message before an id or a time."""
    if before is None:
        return Subquery(session_with_id(db, session_id).values("message_count"))
    newest_first = rows.order_by("-sequence").values("sequence")
    if isinstance(before, datetime):
        return Subquery(newest_first.filter(created_at__lt=before)[:1])
    # The id of another session's message is also a position, which takes longer to find.
    own = Subquery(rows.filter(pk=before).values("sequence"))
    return Coalesce(own - 1, Subquery(newest_first.filter(pk__lt=before)[:1]))


def message_from(row: Mapping[str, Any], session_id: str) -> StoredMessage:
    return read_message(
        row["payload"], id=row["id"], session_id=session_id, role=row["role"], created_at=row["created_at"]
    )
