"""The message history in the database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.types import Message
from helix_store.engine.database import Database, DatabaseOperations, Rows, reads, writes
from helix_store.engine.rows import insert_rows
from helix_store.engine.statement import Statement
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Session,
)
from helix_store.models import Message as MessageRow
from helix_store.sessions.database.current_state import drop_checkpoints
from helix_store.sessions.database.locking import advance, lock_session, missing_session
from helix_store.sessions.database.rows import first_row, session_with_id
from helix_store.sessions.requests import EncodedMessage, decode_messages
from helix_store.sessions.sql import MESSAGES, NEWEST_MESSAGES

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
        """Return the payloads of the page as text, and the number of messages of the session."""
        rows = self._read(NEWEST_MESSAGES if descending else MESSAGES, session_id, offset, limit)
        if not rows:
            return [], self.count(session_id)
        texts = [text for text, _ in rows]
        return texts[::-1] if descending else texts, rows[0][1]

    def after(self, session_id: str, sequence: int, limit: int) -> list[str]:
        """Return the payloads of at most ``limit`` messages after a sequence, as text."""
        return [text for text, _ in self._read(MESSAGES, session_id, sequence, limit)]

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
        return advance(self.db, head, message_count=keep)


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
    for offset in range(0, head.message_count, _LOOK_BACK):
        page = {"tenant": db.tenant, "session_id": head.session_id, "offset": offset, "limit": _LOOK_BACK}
        yield from decode_messages([text for text, _ in reversed(db.execute(NEWEST_MESSAGES, page))])


def cut_history(db: Database, head: Session, keep: int) -> None:
    """Delete a locked session's messages beyond the first ``keep``."""
    MessageRow.objects.using(db.alias).filter(session_id=head.pk, sequence__gt=keep).delete()
