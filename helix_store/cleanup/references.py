"""Rows outside a session tree that refer to its sessions, or hold copies of their data."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet

from helix_store.core.budgets import BudgetScope
from helix_store.core.types import BRANCHED_FROM
from helix_store.engine.database import Database
from helix_store.engine.expressions import has_metadata
from helix_store.models import Budget, BudgetCounter, Post, PostState, Session, SubSessionRef, UsageEntry
from helix_store.sessions.database.locking import advance, lock_session, lock_sessions
from helix_store.sessions.post_sql import SET_NEXT_POST


def branches_of(db: Database, session_ids: Collection[str]) -> list[str]:
    """Return the sessions branched from one of these. Each has a copy of part of its history."""
    sessions = Session.objects.using(db.alias).filter(tenant=db.tenant)
    found: set[str] = set()
    for session_id in session_ids:
        branched = sessions.filter(has_metadata(BRANCHED_FROM, session_id))
        found.update(branched.values_list("session_id", flat=True))
    return sorted(found.difference(session_ids))


def forget_branching_point(db: Database, session_id: str) -> None:
    """Remove the id of the source session from a branch. Call this in a transaction."""
    head = lock_session(db, session_id)
    metadata = Session.objects.using(db.alias).values_list("metadata", flat=True).get(pk=head.pk)
    advance(db, head, metadata={key: value for key, value in metadata.items() if key != BRANCHED_FROM})


def foreign_refs(
    db: Database, keys: Collection[int], session_ids: Collection[str]
) -> QuerySet[SubSessionRef]:
    """Return the refs that other sessions have to these. A ref holds the output of its sub-session."""
    refs = SubSessionRef.objects.using(db.alias).filter(sub_session_id__in=session_ids, location="local")
    # This is not a join, because without statistics SQLite would start with all sessions of the tenant.
    of_tenant = Session.objects.using(db.alias).filter(pk=OuterRef("session_id"), tenant=db.tenant)
    return refs.filter(Exists(of_tenant)).exclude(session_id__in=keys)


def remove_foreign_refs(db: Database, keys: Collection[int], session_ids: Collection[str]) -> int:
    """Delete these refs, lock each session and increment its version. Call this in a transaction."""
    refs = foreign_refs(db, keys, session_ids)
    owners = list(refs.order_by("session_id").values_list("session__session_id", flat=True).distinct())
    removed = 0
    for owner in owners:
        head = lock_session(db, owner)
        removed += refs.filter(session_id=head.pk).delete()[0]
        advance(db, head)
    return removed


def kept_usage(db: Database, session_ids: Collection[str]) -> QuerySet[UsageEntry]:
    """Return the usage entries of deleted sessions with these ids."""
    entries = UsageEntry.objects.using(db.alias).filter(tenant=db.tenant)
    return entries.filter(recorded_for__in=session_ids, session__isnull=True)


def usage_of_sub_sessions(
    db: Database, keys: Collection[int], session_ids: Collection[str]
) -> QuerySet[UsageEntry]:
    """Return the entries of other sessions that name one of these as their sub-session."""
    entries = UsageEntry.objects.using(db.alias).filter(tenant=db.tenant, sub_session_id__in=session_ids)
    return entries.exclude(session_id__in=keys)


def budgets_of(db: Database, scope: BudgetScope, values: Collection[str]) -> Iterator[QuerySet[Any]]:
    """Yield the counters of these users or trees, including those of budgets per user, and their budgets."""
    budgets = Budget.objects.using(db.alias).filter(tenant=db.tenant, scope=scope)
    counters = BudgetCounter.objects.using(db.alias).filter(tenant=db.tenant, value__in=values)
    yield counters.filter(name__in=budgets.filter(value__in=[*values, ""]).values("name"))
    yield budgets.filter(value__in=values)


def posts_of(db: Database, author: str) -> QuerySet[Post]:
    """Return a user's posts in the sessions of the tenant."""
    return Post.objects.using(db.alias).filter(author=author, session__tenant=db.tenant)


def forget_author(db: Database, key: int, author: str) -> int:
    """Remove an author from a session's posts, withdraw waiting ones, and return the number of posts.

    Call this in a transaction.
    """
    lock_sessions(db, [key])
    posts = Post.objects.using(db.alias).filter(session_id=key, author=author)
    posts.filter(state=PostState.WAITING).update(state=PostState.WITHDRAWN, payload=None)
    forgotten = posts.update(author=None)
    db.execute(SET_NEXT_POST, {"key": key})
    return forgotten
