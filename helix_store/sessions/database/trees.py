"""Session trees: a session and its local descendants."""

from __future__ import annotations

from typing import Any

from django.db.models import CASCADE

from helix_store.engine.database import Database
from helix_store.models import (
    Session,
    UsageEntry,
)
from helix_store.sessions.database.locking import lock_sessions
from helix_store.sessions.sql import TREE_KEYS
from helix_store.streams.database import delete_orphaned_streams, streams_of

__all__ = ["delete_tree", "tree_keys"]


def tree_keys(db: Database, session_id: str) -> list[int]:
    """Surrogate keys of the tree below and including a session; empty for an unknown one. One query."""
    rows = db.read(TREE_KEYS, {"tenant": db.tenant, "session_id": session_id})
    return [key for (key,) in rows]


def delete_tree(db: Database, session_id: str, *, keep_usage: bool) -> int:
    """Delete a session tree, children first, and return how many sessions went. Call in a transaction."""
    locked: set[int] = set()
    while (keys := set(tree_keys(db, session_id))) - locked:
        # A child created before its parent was locked is only seen by looking again.
        locked = {head.pk for head in lock_sessions(db, keys)}
        if not locked:
            return 0
    stream_ids = streams_of(db, locked)
    if not keep_usage:
        UsageEntry.objects.using(db.alias).filter(session_id__in=locked).delete()
    for relation in _children():
        rows = relation.related_model._base_manager.using(db.alias)
        rows.filter(**{f"{relation.field.name}__in": locked}).delete()
    UsageEntry.objects.using(db.alias).filter(session_id__in=locked).update(session=None)
    Session.objects.using(db.alias).filter(pk__in=locked)._raw_delete(db.alias)
    delete_orphaned_streams(db, stream_ids)
    return len(locked)


def _children() -> list[Any]:
    """Every table whose rows go with their session; read off the models so that none can be forgotten."""
    return [relation for relation in Session._meta.related_objects if relation.on_delete is CASCADE]
