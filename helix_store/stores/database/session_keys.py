"""The key of a session within the statement that reads its rows."""

from __future__ import annotations

from django.db.models import Subquery

from helix_store.models import Session
from helix_store.stores.database.scope import Scope

__all__ = ["key_of"]


def key_of(scope: Scope, session_id: str) -> Subquery:
    """What ``session_id`` of a child's row equals; no row's does when there is no such session.

    Joined to the session instead, PostgreSQL expects few rows, and sorts a whole history for its newest page.
    """
    sessions = Session.objects.using(scope.alias).filter(tenant=scope.tenant, session_id=session_id)
    return Subquery(sessions.values("pk"))
