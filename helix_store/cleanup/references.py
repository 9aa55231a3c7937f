"""Rows outside of a session tree that name its sessions, or hold a copy of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from django.db.models import Exists, Model, OuterRef, QuerySet

from helix_store.core.types import BRANCHED_FROM
from helix_store.engine.database import Database
from helix_store.engine.expressions import has_metadata
from helix_store.models import Session, SubSessionRef, UsageEntry
from helix_store.sessions.database.locking import advance, lock_session

__all__ = [
    "branches_of",
    "foreign_refs",
    "forget_branching_point",
    "kept_usage",
    "remove_foreign_refs",
    "usage_of_sub_sessions",
]

Rows = Counter[type[Model]]


def branches_of(db: Database, session_ids: Collection[str]) -> list[str]:
    """The sessions that were branched from one of these; each holds a copy of a part of its history."""
    sessions = Session.objects.using(db.alias).filter(tenant=db.tenant)
    found: set[str] = set()
    for session_id in session_ids:
        branched = sessions.filter(has_metadata(BRANCHED_FROM, session_id))
        found.update(branched.values_list("session_id", flat=True))
    return sorted(found.difference(session_ids))


def forget_branching_point(db: Database, session_id: str) -> None:
    """Remove the id of its source from a branch. Call in a transaction."""
    head = lock_session(db, session_id)
    metadata = Session.objects.using(db.alias).values_list("metadata", flat=True).get(pk=head.pk)
    advance(db, head, metadata={key: value for key, value in metadata.items() if key != BRANCHED_FROM})


def foreign_refs(
    db: Database, keys: Collection[int], session_ids: Collection[str]
) -> QuerySet[SubSessionRef]:
    """The refs of other sessions to these; a ref holds the output of its sub-session."""
    refs = SubSessionRef.objects.using(db.alias).filter(sub_session_id__in=session_ids, location="local")
    # Not a join: without statistics SQLite would begin it with all sessions of the tenant.
    of_tenant = Session.objects.using(db.alias).filter(pk=OuterRef("session_id"), tenant=db.tenant)
    return refs.filter(Exists(of_tenant)).exclude(session_id__in=keys)


def remove_foreign_refs(db: Database, keys: Collection[int], session_ids: Collection[str]) -> int:
    """Delete them, each under the lock of its session, which gets a new version. Call in a transaction."""
    refs = foreign_refs(db, keys, session_ids)
    owners = list(refs.order_by("session_id").values_list("session__session_id", flat=True).distinct())
    removed = 0
    for owner in owners:
        head = lock_session(db, owner)
        removed += refs.filter(session_id=head.pk).delete()[0]
        advance(db, head)
    return removed


def kept_usage(db: Database, session_ids: Collection[str]) -> QuerySet[UsageEntry]:
    """The entries of deleted sessions with these ids."""
    entries = UsageEntry.objects.using(db.alias).filter(tenant=db.tenant)
    return entries.filter(recorded_for__in=session_ids, session__isnull=True)


def usage_of_sub_sessions(
    db: Database, keys: Collection[int], session_ids: Collection[str]
) -> QuerySet[UsageEntry]:
    """The entries of other sessions that name one of these as the sub-session."""
    entries = UsageEntry.objects.using(db.alias).filter(tenant=db.tenant, sub_session_id__in=session_ids)
    return entries.exclude(session_id__in=keys)
