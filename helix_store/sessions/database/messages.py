"""The message history in the database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from django.db.models import F, QuerySet

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.types import Message
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    reads,
    writes,
)
from helix_store.engine.rows import (
    insert_rows,
)
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Session,
)
from helix_store.models import Message as MessageRow
from helix_store.sessions.database.current_state import drop_checkpoints
from helix_store.sessions.database.locking import advance, lock_session, missing_session
from helix_store.sessions.database.rows import first_row, pk_of, session_with_id
from helix_store.sessions.requests import EncodedMessage, decode_messages
from helix_store.sessions.sql import MESSAGE_PAGE

_ROWS_PER_STATEMENT = 1_000
_LOOK_BACK = 20
_COLUMNS = ("session_id", "sequence", "role", "payload", "created_at")


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
        """Return the texts of the page, and the number of messages of the session."""
        if not descending:
            last = None if limit is None else offset + limit
            parameters = {"tenant": self.db.tenant, "session_id": session_id, "offset": offset, "last": last}
            rows = self.db.read_if_fast(MESSAGE_PAGE, parameters)
            if rows:
                return [payload for payload, _ in rows], rows[0][1]
        return self._page(session_id, offset, limit, descending)

    @reads
    def _page(
        self, session_id: str, offset: int, limit: int | None, descending: bool
    ) -> tuple[list[str], int]:
        messages = self._of(session_id)
        if descending:
            last = F("session__message_count") - offset
            messages = messages.filter(sequence__lte=last).order_by("-sequence")
            if limit is not None:
                messages = messages.filter(sequence__gt=last - limit)
        else:
            messages = messages.filter(sequence__gt=offset).order_by("sequence")
            if limit is not None:
                messages = messages.filter(sequence__lte=offset + limit)
        rows = list(messages.values_list("payload", "session__message_count"))
        if not rows:
            return [], self._count(session_id)
        return [payload for payload, _ in rows], rows[0][1]

    @reads
    def after(self, session_id: str, sequence: int, limit: int) -> list[str]:
        """Return the texts of at most ``limit`` messages after a sequence."""
        following = self._of(session_id).filter(sequence__gt=sequence, sequence__lte=sequence + limit)
        return list(following.order_by("sequence").values_list("payload", flat=True))

    @reads
    def count(self, session_id: str) -> int:
        return self._count(session_id)

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
        return advance(self.db, head, message_count=keep)

    def _of(self, session_id: str) -> QuerySet[MessageRow]:
        return MessageRow.objects.using(self.db.alias).filter(session_id=pk_of(self.db, session_id))

    def _count(self, session_id: str) -> int:
        count = first_row(session_with_id(self.db, session_id).values_list("message_count", flat=True))
        if count is None:
            raise missing_session(self.db, session_id)
        return count


def insert_messages(db: Database, head: Session, messages: Sequence[EncodedMessage], *, at: datetime) -> int:
    """Append to a locked session and return the new message count, which the caller writes to the head."""
    rows = [
        (head.pk, sequence, message.role, message.text, at)
        for sequence, message in enumerate(messages, head.message_count + 1)
    ]
    for start in range(0, len(rows), _ROWS_PER_STATEMENT):
        insert_rows(db, MessageRow, _COLUMNS, rows[start : start + _ROWS_PER_STATEMENT])
    return head.message_count + len(messages)


def history_backwards(db: Database, head: Session) -> Iterator[Message]:
    """The messages of a locked session, newest first, read in pages as they are needed."""
    before = head.message_count + 1
    while before > 1:
        rows = MessageRow.objects.using(db.alias).filter(session_id=head.pk, sequence__lt=before)
        texts = list(rows.order_by("-sequence").values_list("payload", flat=True)[:_LOOK_BACK])
        if not texts:
            return
        yield from decode_messages(texts)
        before -= len(texts)


def cut_history(db: Database, head: Session, keep: int) -> None:
    """Delete a locked session's messages beyond the first ``keep``."""
    MessageRow.objects.using(db.alias).filter(session_id=head.pk, sequence__gt=keep).delete()
