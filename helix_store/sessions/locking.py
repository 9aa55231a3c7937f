"""Locking a session before a write.

The lock order, defined in one place: session row, then lock row, then stream row, then children.

A step in one statement takes its share lock on the lock row first. Nothing waits for that share lock: it
conflicts only with an acquisition, which skips a locked row.

A separate statement reads the values that guard a write after the session's row is locked. A row joined into
the locking statement would be as old as the start of that statement, even after a wait for the lock.

Every write that changes a session or its children also writes the session's row, if only with the same
values (`touch_session`). In a caller's transaction above READ COMMITTED, everything that a write reads may be
older than the lock; but if the row was written since the transaction's snapshot, PostgreSQL refuses to lock
it, with a serialization failure. The ledger is the exception: recording usage only takes a share lock on the
session, so that it does not wait for steps. Writes that depend on the ledger, and deletions of sessions,
therefore refuse such a transaction (`require_read_committed`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final, TypeVar

from django.db.models import QuerySet, Subquery

from helix_store import conf
from helix_store.core import moments
from helix_store.core.ids import tombstone_digest
from helix_store.core.payloads import encode
from helix_store.core.types import TERMINAL_STATUSES
from helix_store.core.validation import Guard
from helix_store.engine.database import Database, refuse_moved
from helix_store.engine.expressions import (
    Isolation,
    lock_row,
    require_read_committed,
    tenant_parameter,
    touch_row,
    update_row,
)
from helix_store.exceptions import SessionNotFound
from helix_store.locks import hold_fence
from helix_store.models import Session, Tombstone
from helix_store.sessions.statements import ROOT_WITH_CALL, SESSION_BY_ID, TOUCH_SESSION
from helix_store.signals import announce, signals_of_status

R = TypeVar("R")


def first_row(rows: QuerySet[Any, R]) -> R | None:
    """Return the first row of a query, or ``None``, without the ordering that ``first()`` adds."""
    return next(iter(rows[:1]), None)


def session_with_id(db: Database, session_id: str) -> QuerySet[Session]:
    """Return the session with this id."""
    return _of_tenant(db).filter(session_id=session_id)


def sessions_with_ids(db: Database, session_ids: Collection[str]) -> QuerySet[Session]:
    """Return the sessions with these ids."""
    return _of_tenant(db).filter(session_id__in=session_ids)


def pk_of(db: Database, session_id: str) -> Subquery:
    """Return a subquery for ``session_id`` of a child's row; it matches no row if the session does not exist.

    With a join, PostgreSQL would expect few rows and sort the whole history to find its newest page.
    """
    return Subquery(session_with_id(db, session_id).values("pk")[:1])


def _of_tenant(db: Database) -> QuerySet[Session]:
    return Session.objects.using(db.alias).filter(tenant=tenant_parameter(db.tenant))


NO_TENANT: Final = ""
"""The tombstones of an erased tenant belong to the default tenant. Their digests still tell them apart."""


def tombstones_of(db: Database, session_ids: Iterable[str]) -> QuerySet[Tombstone]:
    digests = [tombstone_digest(db.tenant, session_id) for session_id in session_ids]
    tenants = sorted({db.tenant, NO_TENANT})
    return Tombstone.objects.using(db.alias).filter(tenant__in=tenants, digest__in=digests)


def set_tombstones(db: Database, session_ids: Iterable[str], *, of_erased_tenant: bool = False) -> None:
    """Mark sessions as erased now, unless ``TOMBSTONE_DAYS`` is 0. Call this in the erasure's transaction.

    The tombstones ``of_erased_tenant`` do not name the tenant. With row-level security there are none,
    because the role of a tenant could neither write nor read them.
    """
    if not conf.tombstone_days() or (of_erased_tenant and conf.row_level_security()):
        return
    tenant = NO_TENANT if of_erased_tenant else db.tenant
    _store(db, tenant, [tombstone_digest(db.tenant, each) for each in session_ids], db.now())


def forget_tenant(db: Database, keys: Collection[int]) -> None:
    """Remove the tenant from tombstones, after the tenant has been erased. Call this in a transaction."""
    rows = Tombstone.objects.using(db.alias).filter(pk__in=keys)
    found = list(rows.order_by("pk").values_list("digest", "erased_at"))
    rows.delete()
    for digest, at in [] if conf.row_level_security() else found:
        _store(db, NO_TENANT, [digest], at)


def _store(db: Database, tenant: str, digests: Iterable[str], at: datetime) -> None:
    Tombstone.objects.using(db.alias).bulk_create(
        [Tombstone(tenant=tenant, digest=digest, erased_at=at) for digest in digests],
        update_conflicts=True,
        unique_fields=["tenant", "digest"],
        update_fields=["erased_at"],
    )


def sweep_tombstones(db: Database, now: datetime) -> int:
    """Delete the tombstones of the tenant that are older than ``TOMBSTONE_DAYS``, and return their number."""
    until = now - timedelta(days=conf.tombstone_days())
    rows = Tombstone.objects.using(db.alias).filter(tenant=db.tenant, erased_at__lte=until)
    return db.transaction(lambda: rows.delete()[0])


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


def touch_session(db: Database, session_id: str, guard: Guard | None = None, *more_columns: str) -> Session:
    """Lock a session as `lock_session` does, for a write that changes its children but no column of its row.

    The same statement writes the row again.
    """
    head = _checked_head(db, touch_row, session_id, guard, more_columns)
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
    return _checked_head(db, lock_row, session_id, guard, more_columns)


def lock_root_with_call(
    db: Database, session_id: str, tool_call_id: str, *more_columns: str
) -> Session | None:
    """Lock a session that is the root of its tree and owns a call, or return ``None`` if it does not."""
    entry = encode({tool_call_id: session_id})[1:-1]
    return _checked_head(db, lock_row, session_id, None, more_columns, is_root_with=entry)


def _checked_head(
    db: Database,
    lock: Callable[..., tuple[Any, ...] | None],
    session_id: str,
    guard: Guard | None,
    more_columns: tuple[str, ...],
    *,
    is_root_with: str | None = None,
) -> Session | None:
    names = _in_order(_LOCKED_COLUMNS + more_columns)
    parameters = {"tenant": db.tenant, "session_id": session_id}
    condition = SESSION_BY_ID
    if is_root_with is not None:
        condition = ROOT_WITH_CALL
        parameters["owned"] = f",{is_root_with}"
    row = lock(db, Session, names, condition, parameters)
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

    With ``wait=False``, sessions that another transaction has locked are left out. Raises
    `UnsupportedIsolation`.
    """
    heads = list(
        Session.objects.using(db.alias)
        .select_for_update(skip_locked=not wait)
        .only("id", "session_id")
        .annotate(isolation=Isolation())
        .filter(pk__in=list(keys))
        .order_by("pk")
    )
    for head in heads[:1]:
        require_read_committed(vars(head)["isolation"])
    return heads


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
    """Write a locked row again, as `touch_session` does, after a write that changed children."""
    if db.has_row_locks:
        db.execute(TOUCH_SESSION, {"key": head.pk})
