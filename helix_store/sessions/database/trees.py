"""Session trees: a session and its local descendants."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.db.models import CASCADE

from helix_store.engine.database import Database
from helix_store.models import (
    Session,
    SubSessionRef,
    UsageEntry,
)
from helix_store.sessions.database.keys import is_named
from helix_store.sessions.database.locking import lock_sessions
from helix_store.streams.database import delete_orphaned_streams, streams_of

__all__ = ["delete_tree", "tree_keys"]

# Reachable by parent or by local ref, every session once: UNION drops what was seen, so a cycle ends.
_TREE_POSTGRES = """
WITH RECURSIVE tree(id, session_id) AS (
    SELECT id, session_id FROM {session} WHERE {is_named}
  UNION
    SELECT child.id, child.session_id FROM tree CROSS JOIN LATERAL (
        SELECT id, session_id FROM {session}
        WHERE tenant = (SELECT %(tenant)s) AND parent_session_id = tree.session_id
      UNION ALL
        SELECT target.id, target.session_id FROM {ref} AS ref
        JOIN {session} AS target ON target.session_id = ref.sub_session_id
        WHERE ref.session_id = tree.id AND ref.location = 'local' AND target.tenant = (SELECT %(tenant)s)
    ) AS child
)
SELECT id FROM tree
"""
# What is always true is said to be unlikely: SQLite expects a tree to be huge, and with statistics it would
# build a Bloom filter of all sessions for every walk.
_TREE_SQLITE = """
WITH RECURSIVE tree(id, session_id) AS (
    SELECT id, session_id FROM {session} WHERE {is_named}
  UNION
    SELECT child.id, child.session_id FROM tree
    JOIN {session} AS child ON child.tenant = %(tenant)s AND child.parent_session_id = tree.session_id
        AND likelihood(tree.session_id <> '', 0.000001)
  UNION
    SELECT target.id, target.session_id FROM tree
    JOIN {ref} AS ref ON ref.session_id = tree.id AND ref.location = 'local'
    JOIN {session} AS target ON target.tenant = %(tenant)s AND target.session_id = ref.sub_session_id
        AND likelihood(tree.session_id <> '', 0.000001)
)
SELECT id FROM tree
"""


def tree_keys(db: Database, session_id: str) -> list[int]:
    """Surrogate keys of the tree below and including a session; empty for an unknown one. One query."""
    named = {"tenant": db.tenant, "session_id": session_id}
    return [key for (key,) in db.read(_tree_sql(db.connection.vendor), named)]


@cache
def _tree_sql(vendor: str) -> str:
    template = _TREE_POSTGRES if vendor == "postgresql" else _TREE_SQLITE
    return template.format(
        session=f'"{Session._meta.db_table}"',
        ref=f'"{SubSessionRef._meta.db_table}"',
        is_named=is_named(),
    )


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
