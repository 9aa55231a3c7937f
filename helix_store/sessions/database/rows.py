"""Lookup of sessions by id."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from django.db.models import QuerySet, Subquery

from helix_store.engine.database import Database
from helix_store.engine.expressions import tenant_parameter
from helix_store.models import Session

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
