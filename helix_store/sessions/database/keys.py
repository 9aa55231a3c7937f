"""A session by its id, found by the index of its key whatever the server knows of its tenant.

PostgreSQL takes a tenant that came after its statistics for one without sessions. Any index that begins with
the tenant looks as good as that of the key then, and a lookup could read all that the tenant has. So the
tenant is not shown to the planner as a value: ``tenant = (SELECT …)`` is planned for as any tenant is.
"""

from __future__ import annotations

from collections.abc import Collection

from django.db.models import QuerySet, Subquery

from helix_store.engine.database import Database
from helix_store.engine.expressions import tenant_parameter as any_tenant
from helix_store.models import Session

__all__ = ["all_named", "any_tenant", "is_named", "key_of", "named"]


def named(db: Database, session_id: str) -> QuerySet[Session]:
    """The session of this id."""
    return _of_tenant(db).filter(session_id=session_id)


def all_named(db: Database, session_ids: Collection[str]) -> QuerySet[Session]:
    """The sessions of these ids."""
    return _of_tenant(db).filter(session_id__in=session_ids)


def is_named(session: str = "", *, session_id: str = "session_id") -> str:
    """The same in plain SQL; ``session`` is the table's alias, ``session_id`` the name of a parameter."""
    prefix = f"{session}." if session else ""
    return f"{prefix}tenant = (SELECT %(tenant)s) AND {prefix}session_id = %({session_id})s"


def key_of(db: Database, session_id: str) -> Subquery:
    """What ``session_id`` of a child's row equals; no row's does when there is no such session.

    Joined to the session instead, PostgreSQL expects few rows, and sorts a whole history for its newest page.
    """
    return Subquery(named(db, session_id).values("pk")[:1])


def _of_tenant(db: Database) -> QuerySet[Session]:
    return Session.objects.using(db.alias).filter(tenant=any_tenant(db.tenant))
