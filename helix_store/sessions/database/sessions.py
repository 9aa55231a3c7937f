"""Sessions in the database."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final

from django.db import IntegrityError, transaction

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.merging import merge_changes
from helix_store.core.types import (
    SessionHead,
    SessionState,
    SessionStatus,
    StatusChange,
    StatusConflict,
)
from helix_store.engine.clocks import as_utc
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    reads,
    writes,
)
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.outcomes import committed_once
from helix_store.exceptions import OutcomeUnknown, SessionExists, SessionNotFound
from helix_store.models import Session
from helix_store.sessions.announcements import signals_of_status
from helix_store.sessions.backend import Counter
from helix_store.sessions.database.announcing import announce
from helix_store.sessions.database.current_state import read_current, write_current
from helix_store.sessions.database.listing import select_sessions
from helix_store.sessions.database.locking import advance, lock_session
from helix_store.sessions.database.rows import (
    current_from,
    first_row,
    session_with_id,
)
from helix_store.sessions.database.trees import delete_tree
from helix_store.sessions.layout import STATE_COLUMNS, EncodedState, encode_custom_state, settled_mode
from helix_store.sessions.reading import current_state
from helix_store.sessions.requests import (
    NewSession,
    SessionQuery,
)
from helix_store.sessions.sql import COMPARE_AND_SET_STATUS, CURRENT_COLUMNS, LOAD_STATE

__all__ = ["DatabaseSessions", "insert_session", "lock_or_insert_session", "replace_custom_state"]

_ATTEMPTS_TO_INSERT: Final = 5
"""An isolation stricter than READ COMMITTED never sees the session that was in the way: it must end."""


class DatabaseSessions(DatabaseOperations):
    @writes
    def create(self, new: NewSession) -> SessionState:
        parent_id = new.encoded.columns["parent_session_id"]
        root_id = new.session_id
        if parent_id is not None:
            root_id = lock_session(self.db, parent_id).root_session_id or parent_id
        return insert_session(self.db, new, root_session_id=root_id, at=moments.now())

    @reads
    def exists(self, session_id: str) -> bool:
        return session_with_id(self.db, session_id).exists()

    def load(self, session_id: str) -> SessionState | None:
        if not self.db.has_fast_reads:
            return self._load(session_id)
        rows = self.db.read(LOAD_STATE, {"tenant": self.db.tenant, "session_id": session_id})
        if not rows:
            return None
        row = dict(zip(CURRENT_COLUMNS, rows[0], strict=True))
        row["tags"], row["metadata"] = _from_jsonb(row["tags"]), _from_jsonb(row["metadata"])
        return current_from(row)

    @reads
    def _load(self, session_id: str) -> SessionState | None:
        row = first_row(session_with_id(self.db, session_id).values(*CURRENT_COLUMNS))
        return None if row is None else current_from(row)

    @writes
    def save(self, session_id: str, encoded: EncodedState, guard: Guard) -> int:
        head = lock_session(self.db, session_id, guard)
        at = moments.now()
        columns = {**encoded.columns, "mode": settled_mode(head.mode, encoded.columns["mode"])}
        pointer = write_current(
            self.db,
            head,
            payload=encoded.payload,
            envelope=encoded.envelope,
            version=head.version + 1,
            at=at,
        )
        return advance(self.db, head, at=at, **columns, **pointer)

    @writes
    def delete(self, session_id: str, *, keep_usage: bool) -> int:
        return delete_tree(self.db, session_id, keep_usage=keep_usage)

    @writes
    def update_status(self, session_id: str, status: SessionStatus, failure_reason: str | None) -> int:
        head = lock_session(self.db, session_id)
        return advance(self.db, head, status=status.value, failure_reason=failure_reason)

    def compare_and_set_status(
        self,
        session_id: str,
        expected: frozenset[SessionStatus],
        status: SessionStatus,
        failure_reason: str | None,
        guard: Guard,
    ) -> StatusChange | StatusConflict:
        at = moments.now()
        compare = partial(self._compare_and_set_locked, session_id, expected, status, failure_reason, guard)

        def compare_in_one_statement() -> StatusChange | StatusConflict:
            parameters = {
                "tenant": self.db.tenant,
                "session_id": session_id,
                "expected": [member.value for member in expected],
                "status": status.value,
                "failure_reason": failure_reason,
                "at": at,
            }
            for (version,) in self.db.try_write(COMPARE_AND_SET_STATUS, parameters):
                announce(self.db, session_id, signals_of_status("", status, failure_reason))
                return StatusChange(new_version=version)
            return compare()

        def look_first() -> StatusChange | StatusConflict:
            head = lock_session(self.db, session_id, None, "updated_at")
            written_at = as_utc(head.updated_at)
            if written_at > at:
                # By another write, which may have come after this one.
                raise OutcomeUnknown(session_id)
            if written_at < at or head.status != status:
                return compare()
            announce(self.db, session_id, signals_of_status("", status, failure_reason))
            return StatusChange(new_version=head.version)

        # Else the status before the write must be read, to know whether it becomes terminal.
        changes_if_written = not status.is_terminal or status not in expected
        if guard == Guard() and changes_if_written and self.db.has_fast_writes:
            return committed_once(
                self.db, compare_in_one_statement, look_first, operation_id=lambda: session_id
            )
        return compare()

    @writes
    def _compare_and_set_locked(
        self,
        session_id: str,
        expected: frozenset[SessionStatus],
        status: SessionStatus,
        failure_reason: str | None,
        guard: Guard,
    ) -> StatusChange | StatusConflict:
        head = lock_session(self.db, session_id, guard)
        if head.status not in expected:
            return StatusConflict(current_status=SessionStatus(head.status), current_version=head.version)
        version = advance(self.db, head, status=status.value, failure_reason=failure_reason)
        return StatusChange(new_version=version)

    @writes
    def increment(self, session_id: str, counter: Counter) -> int:
        head = lock_session(self.db, session_id)
        value: int = getattr(head, counter) + 1
        columns: dict[str, Any] = {counter: value}
        advance(self.db, head, **columns)
        return value

    @writes
    def merge_custom_state(
        self, session_id: str, changes: Mapping[str, Any], array_replacements: frozenset[str], guard: Guard
    ) -> list[str]:
        head = lock_session(self.db, session_id, guard)
        if not changes:
            return []
        custom_state, envelope = read_current(self.db, head)
        merged, warnings = merge_changes(custom_state, dict(changes), array_replacements)
        replace_custom_state(self.db, head, merged, envelope)
        return warnings

    @reads
    def select(self, query: SessionQuery) -> tuple[list[SessionHead], int | None, bool]:
        return select_sessions(self.db, query)


def _from_jsonb(text: str) -> Any:
    # Most are empty, and the decoder takes longer to begin than to read.
    return [] if text == "[]" else {} if text == "{}" else json.loads(text)


def insert_session(db: Database, new: NewSession, *, root_session_id: str, at: datetime) -> SessionState:
    """Insert a session with its first state and return it. Raises `SessionExists`."""
    columns = {**new.encoded.columns, "root_session_id": root_session_id}
    head = Session(
        tenant=db.tenant, session_id=new.session_id, version=1, created_at=at, updated_at=at, **columns
    )
    try:
        head.save(using=db.alias, force_insert=True)
    except IntegrityError as exc:
        if is_unique_violation(exc):
            raise SessionExists(new.session_id) from exc
        raise
    pointer = write_current(
        db, head, payload=new.encoded.payload, envelope=new.encoded.envelope, version=1, at=at
    )
    Session.objects.using(db.alias).filter(pk=head.pk).update(**pointer)
    stored = {name: getattr(head, name) for name in STATE_COLUMNS}
    return current_state(stored, new.encoded.payload, new.encoded.envelope)


def lock_or_insert_session(
    db: Database, session_id: str, new: Callable[[], NewSession], guard: Guard
) -> tuple[Session, bool]:
    """The locked head of a session, and whether it was inserted: ``new`` makes it for an unknown id."""
    is_new = False
    for _ in range(_ATTEMPTS_TO_INSERT):
        with suppress(SessionNotFound):
            return lock_session(db, session_id, guard), is_new
        # Another writer may insert the session in the meantime: both go on with it, unless it is deleted.
        with suppress(SessionExists), transaction.atomic(using=db.alias):
            insert_session(db, new(), root_session_id=session_id, at=moments.now())
            is_new = True
    return lock_session(db, session_id, guard), is_new


def replace_custom_state(db: Database, head: Session, custom_state: dict[str, Any], envelope: str) -> int:
    """Write a changed custom state of a locked session between checkpoints, and return the new version."""
    at = moments.now()
    payload = encode_custom_state(custom_state, envelope, db.limits)
    pointer = write_current(db, head, payload=payload, envelope=envelope, version=head.version + 1, at=at)
    return advance(db, head, at=at, **pointer)
