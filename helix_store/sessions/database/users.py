"""The user of a session that an adapter writes to; any write may name the user."""

from __future__ import annotations

from helix_store.engine.database import Database
from helix_store.exceptions import ConflictError
from helix_store.models import Session, UsageEntry
from helix_store.sessions.database.locking import advance

__all__ = ["name_user", "user_columns"]


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
