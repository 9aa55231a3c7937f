"""The lock order, defined in one place: session row, then lock row, then stream row, then children.

A step in one statement takes its share lock on the lock row first. Nothing waits for that share lock: it
conflicts only with an acquisition, which skips a locked row.

A separate statement reads the values that guard a write after the session's row is locked. A row joined into
the locking statement would be as old as the start of that statement, even after a wait for the lock.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, Final

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.types import TERMINAL_STATUSES
from helix_store.engine.database import Database
from helix_store.engine.moved_tenants import refuse_moved
from helix_store.engine.rows import (
    lock_row,
    update_row,
)
from helix_store.exceptions import SessionNotFound
from helix_store.locks.database import hold_fence
from helix_store.models import Session
from helix_store.sessions.database.rows import first_row, session_with_id, sessions_with_ids
from helix_store.sessions.sql import SESSION_BY_ID, TOUCH_SESSION
from helix_store.signals import announce, signals_of_status

_LOCKED_COLUMNS = (
    "id",
    "session_id",
    "status",
    "version",
    "step_count",
    "resume_count",
    "message_count",
    "mode",
    "root_session_id",
    "current_id",
    "current_is_checkpoint",
    "base_key",
)
_JSON_TYPES: Final = frozenset({list, dict})


def lock_session(db: Database, session_id: str, guard: Guard | None = None, *more_columns: str) -> Session:
    """Lock the session's narrow head until the transaction ends, and return it ready for a guarded write.

    Also reads ``more_columns``. SQLite has no row locks: its immediate write transaction serves as the lock.
    Raises `SessionNotFound` and `TenantMoved`.
    """
    head = lock_known_session(db, session_id, guard, *more_columns)
    if head is None:
        raise missing_session(db, session_id)
    return head


def missing_session(db: Database, session_id: str) -> SessionNotFound:
    """Return the error for a session that was not found, or raise `TenantMoved` if it may be elsewhere."""
    refuse_moved(db)
    return SessionNotFound(session_id)


def lock_known_session(
    db: Database, session_id: str, guard: Guard | None = None, *more_columns: str
) -> Session | None:
    """Lock a session as `lock_session` does, or return ``None`` if the caller may have to insert it."""
    names = _in_order(_LOCKED_COLUMNS + more_columns)
    parameters = {"tenant": db.tenant, "session_id": session_id}
    row = lock_row(db, Session, names, SESSION_BY_ID, parameters)
    if row is None:
        return None
    head = Session.from_db(db.alias, names, row)
    # SQLite has no booleans.
    head.current_is_checkpoint = bool(head.current_is_checkpoint)
    if guard is not None:
        check_guard(db, head, guard)
    return head


@cache
def _in_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns in the order in which a model takes its values."""
    return tuple(field.attname for field in Session._meta.concrete_fields if field.attname in names)


def check_guard(db: Database, head: Session, guard: Guard) -> None:
    """Check a write's conditions on a locked session. Raises `FencedOutError` and `StaleStateError`."""
    if guard.fencing_token is not None:
        hold_fence(db, head.session_id, guard)
    guard.check_version(head.version)


def lock_sessions(db: Database, keys: Iterable[int], *, wait: bool = True) -> list[Session]:
    """Lock whole sessions exclusively, lowest key first, so that two trees cannot deadlock.

    With ``wait=False``, sessions that another transaction has locked are left out.
    """
    return list(
        Session.objects.using(db.alias)
        .select_for_update(skip_locked=not wait)
        .only("id", "session_id")
        .filter(pk__in=list(keys))
        .order_by("pk")
    )


def lock_sessions_of_tree(
    db: Database, session_ids: Collection[str], *more_columns: str
) -> dict[str, Session]:
    """Return narrow heads of sessions that are written together, lowest key first, without unknown ones."""
    heads = (
        sessions_with_ids(db, session_ids)
        .select_for_update(no_key=True)
        .only(*_LOCKED_COLUMNS, *more_columns)
        .order_by("pk")
    )
    return {head.session_id: head for head in heads}


def root_of(db: Database, session_id: str) -> str:
    """Return the id of the session at the top of the tree. Raises `SessionNotFound`."""
    head = first_row(session_with_id(db, session_id).only("root_session_id"))
    if head is None:
        raise missing_session(db, session_id)
    return head.root_session_id or session_id


def session_key(db: Database, session_id: str) -> int:
    """Return a session's surrogate key, for reads that need no lock. Raises `SessionNotFound`."""
    key = first_row(session_with_id(db, session_id).values_list("pk", flat=True))
    if key is None:
        raise missing_session(db, session_id)
    return key


def changed_columns(head: Session, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns whose new value differs from the locked row, which was read with all of them.

    Writing a column costs more than reading it, and SQLite rewrites every index that contains it.
    """
    return {
        name: value
        for name, value in columns.items()
        if getattr(head, name) != (json.dumps(value) if type(value) in _JSON_TYPES else value)
    }


def advance(db: Database, head: Session, *, at: datetime | None = None, **columns: Any) -> int:
    """Write columns of a locked head together with its next version, and return that version.

    Every status change of a locked session goes through this function, which also announces it.
    """
    version = head.version + 1
    update_row(db, Session, head.pk, {"version": version, "updated_at": at or moments.now(), **columns})
    if columns.get("status") in TERMINAL_STATUSES:
        written = columns if "failure_reason" in columns else vars(head)
        signals = signals_of_status(head.status, columns["status"], written.get("failure_reason"))
        announce(db, head.session_id, signals)
    return version


def touch(db: Database, head: Session) -> None:
    """Make single statements that wait for this locked row reread the data that depends on it."""
    if db.has_row_locks:
        db.execute(TOUCH_SESSION, {"key": head.pk})
