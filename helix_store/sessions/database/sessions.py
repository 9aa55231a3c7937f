"""Sessions in the database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final

from django.db import IntegrityError, transaction
from django.db.models import F, QuerySet

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.merging import merge_changes
from helix_store.core.types import (
    SessionHead,
    SessionState,
    SessionStatus,
    StatusChange,
    StatusConflict,
    Unset,
)
from helix_store.engine.commits import recorded_value
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    reads,
    writes,
)
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.expressions import NoIndexHint, after_keyset, has_metadata, has_tag, tenant_parameter
from helix_store.engine.moved_tenants import refuse_moved
from helix_store.exceptions import ConflictError, SessionExists
from helix_store.models import Session, UsageEntry
from helix_store.sessions.database.current_state import read_current, write_current
from helix_store.sessions.database.locking import advance, lock_known_session, lock_session
from helix_store.sessions.database.rows import session_with_id
from helix_store.sessions.database.trees import delete_tree
from helix_store.sessions.layout import HEAD_FIELDS, STATE_COLUMNS, EncodedState, encode_custom_state
from helix_store.sessions.reading import current_state, listed_head, stored_interrupt, stored_state
from helix_store.sessions.requests import Counter, NewSession, OpenedStep, SessionQuery
from helix_store.sessions.rules import written_columns
from helix_store.sessions.sql import (
    COMPARE_AND_SET_STATUS,
    CURRENT_COLUMNS,
    INTERRUPT_COLUMNS,
    LOAD_CAPPED_STEP,
    LOAD_STATE,
    LOAD_STEP,
)
from helix_store.signals import announce, signals_of_status

_ATTEMPTS_TO_INSERT: Final = 5
"""The limit exists because isolation above READ COMMITTED never sees the session that caused the conflict."""


class DatabaseSessions(DatabaseOperations):
    @writes
    def create(self, new: NewSession) -> SessionState:
        parent_id = new.encoded.columns["parent_session_id"]
        root_id = new.session_id
        if parent_id is not None:
            root_id = lock_session(self.db, parent_id).root_session_id or parent_id
        _, state = insert_session(self.db, new, root_session_id=root_id, at=moments.now())
        return state

    @reads
    def exists(self, session_id: str) -> bool:
        return session_with_id(self.db, session_id).exists()

    def load(self, session_id: str) -> SessionState | None:
        for *current, has_budgets in self.db.read(
            LOAD_STATE, {"tenant": self.db.tenant, "session_id": session_id}
        ):
            state = stored_state(CURRENT_COLUMNS, current)
            state._is_capped = bool(has_budgets)
            return state
        refuse_moved(self.db)
        return None

    def open_step(
        self, session_id: str, step_id: str | None, run_id: str | None, *, is_capped: bool
    ) -> OpenedStep | None:
        """Read the data with which a step begins, in one statement."""
        step = {"tenant": self.db.tenant, "session_id": session_id, "step_id": step_id, "run_id": run_id}
        for row in self.db.read(LOAD_CAPPED_STEP if is_capped else LOAD_STEP, step):
            current = row[: len(CURRENT_COLUMNS)]
            has_staged, *interrupt, may_be_stopped = row[len(CURRENT_COLUMNS) :]
            is_interrupted = interrupt[0] is not None
            return OpenedStep(
                stored_state(CURRENT_COLUMNS, current),
                bool(has_staged),
                stored_interrupt(session_id, INTERRUPT_COLUMNS, interrupt) if is_interrupted else None,
                bool(may_be_stopped),
            )
        refuse_moved(self.db)
        return None

    @writes
    def save(self, session_id: str, encoded: EncodedState, guard: Guard) -> int:
        head = lock_session(self.db, session_id, guard, "client_tool_call_ownership")
        at = moments.now()
        columns = written_columns(encoded, vars(head))
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
        def compare() -> StatusChange | StatusConflict:
            head = lock_session(self.db, session_id, guard)
            if head.status not in expected:
                current = SessionStatus(head.status)
                return StatusConflict(current_status=current, current_version=head.version)
            version = advance(self.db, head, status=status.value, failure_reason=failure_reason)
            return StatusChange(new_version=version)

        locked = partial(self.db.transaction, compare)

        def changed(row: Sequence[Any]) -> StatusChange | StatusConflict:
            announce(self.db, session_id, signals_of_status("", status, failure_reason))
            return StatusChange(new_version=int(row[0]))

        def look_first(call_id: str) -> StatusChange | StatusConflict:
            call_ids = lock_session(self.db, session_id, None, "call_ids").call_ids
            version = recorded_value(call_ids, call_id)
            return locked() if version is None else changed([version])

        # Otherwise the status before the write must be read, to find out if the session becomes terminal.
        changes_if_written = not status.is_terminal or status not in expected
        if guard != Guard() or not changes_if_written:
            return locked()
        parameters = {
            "tenant": self.db.tenant,
            "session_id": session_id,
            "expected": [member.value for member in expected],
            "status": status.value,
            "failure_reason": failure_reason,
            "at": moments.now(),
        }
        return self.db.write_once(
            COMPARE_AND_SET_STATUS,
            parameters,
            changed,
            otherwise=locked,
            look_first=look_first,
            operation_id=session_id,
        )

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
        """Return the page, the total if the query counts, and whether more sessions follow."""
        found, total, has_more = select_sessions(self.db, query)
        return [head for _, head in found], total, has_more


def insert_session(
    db: Database, new: NewSession, *, root_session_id: str, at: datetime
) -> tuple[int, SessionState]:
    """Insert a session, and return its key and its first state. Raises `SessionExists`."""
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
    return head.pk, current_state(stored, new.encoded.payload, new.encoded.envelope)


def lock_or_insert_session(
    db: Database, session_id: str, new: Callable[[], NewSession], guard: Guard, *more_columns: str
) -> tuple[Session, bool]:
    """Lock a session, or insert the one that ``new`` returns; return the head and whether it was inserted.

    Also reads ``more_columns``.
    """
    is_new = False
    for _ in range(_ATTEMPTS_TO_INSERT):
        head = lock_known_session(db, session_id, guard, *more_columns)
        if head is not None:
            return head, is_new
        # Another writer may insert the session in the meantime; both then use it, unless it is deleted.
        with suppress(SessionExists), transaction.atomic(using=db.alias):
            insert_session(db, new(), root_session_id=session_id, at=moments.now())
            is_new = True
    return lock_session(db, session_id, guard, *more_columns), is_new


def user_columns(user_id: str | None) -> tuple[str, ...]:
    """Return the columns of the locked session that `name_user` needs."""
    return () if user_id is None else ("user_id",)


def name_user(db: Database, head: Session, user_id: str | None) -> None:
    """Set the user of a locked session, unless ``user_id`` is ``None`` or already the session's user.

    Usage that was recorded earlier also gets the user. Raises `ConflictError` if the session belongs to
    another user.
    """
    if user_id is None or head.user_id == user_id:
        return
    if head.user_id is not None:
        raise ConflictError("The session belongs to another user, and the user of a session cannot change.")
    head.version = advance(db, head, user_id=user_id)
    UsageEntry.objects.using(db.alias).filter(session_id=head.pk, user_id=None).update(user_id=user_id)


def replace_custom_state(db: Database, head: Session, custom_state: dict[str, Any], envelope: str) -> int:
    """Write a locked session's changed custom state without a checkpoint, and return the new version."""
    at = moments.now()
    payload = encode_custom_state(custom_state, envelope, db.limits)
    pointer = write_current(db, head, payload=payload, envelope=envelope, version=head.version + 1, at=at)
    return advance(db, head, at=at, **pointer)


# --- Lists ------------------------------------------------------------------------------------------


def select_sessions(
    db: Database, query: SessionQuery, *, of_all_tenants: bool = False
) -> tuple[list[tuple[str, SessionHead]], int | None, bool]:
    """Return the page with its tenants, the total if requested, and whether more sessions follow."""
    sessions = Session.objects.using(db.alias).all() if of_all_tenants else _of_tenant(db, query)
    matching = _filtered(sessions, query)
    total = matching.count() if query.count else None
    names = (query.order_by, "session_id", *(["tenant"] if of_all_tenants else []))
    prefix = "-" if query.descending else ""
    page = matching.order_by(*(f"{prefix}{name}" for name in names))
    if query.after is not None:
        last = dict(zip(names, query.after, strict=True))
        page = page.filter(after_keyset(Session, last, descending=query.descending))
    rows = list(page.values("tenant", *HEAD_FIELDS)[query.offset : query.offset + query.limit + 1])
    found = [(row["tenant"], listed_head(row)) for row in rows[: query.limit]]
    return found, total, len(rows) > query.limit


def _of_tenant(db: Database, query: SessionQuery) -> QuerySet[Session]:
    # An index over all tenants finds the documents. PostgreSQL must therefore know the size of this tenant:
    # if it assumes a small tenant, it also reads all of the tenant's sessions to intersect the two sets.
    is_by_document = query.tags or query.metadata
    tenant = db.tenant if is_by_document else tenant_parameter(db.tenant)
    return Session.objects.using(db.alias).filter(tenant=tenant)


def _filtered(sessions: QuerySet[Session], query: SessionQuery) -> QuerySet[Session]:
    """Return the sessions that match every filter of a query."""
    # An agent works for many users, so there are fewer sessions for a user or a workspace than for an agent.
    is_of_few = query.user_id is not None or query.workspace_id is not None
    sessions = sessions.alias(agent=NoIndexHint("agent_type") if is_of_few else F("agent_type"))
    equal: dict[str, Any] = {
        "agent": query.agent_type,
        "user_id": query.user_id,
        "root_session_id": query.root_session_id,
        "workspace_id": query.workspace_id,
        "created_at__gte": query.created_from,
        "created_at__lt": query.created_to,
    }
    sessions = sessions.filter(**{name: value for name, value in equal.items() if value is not None})
    if query.statuses is not None:
        sessions = sessions.filter(status__in=sorted(query.statuses))
    if query.parent_session_id is None:
        sessions = sessions.filter(parent_session_id__isnull=True)
    elif not isinstance(query.parent_session_id, Unset):
        sessions = sessions.filter(parent_session_id=query.parent_session_id)
    for tag in query.tags:
        sessions = sessions.filter(has_tag(tag))
    for key, value in query.metadata.items():
        sessions = sessions.filter(has_metadata(key, value))
    return sessions
