"""Session trees: a session and its local descendants."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from django.db.models import Model, OuterRef, Subquery
from django.db.models.functions import Coalesce

from helix_store.catalogue.rows import children_with_rows, let_go
from helix_store.counters.counting import delete_usage
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter
from helix_store.engine.moved_tenants import refuse_moved
from helix_store.models import (
    Session,
    UsageEntry,
)
from helix_store.sessions.database.locking import lock_sessions
from helix_store.sessions.sql import FOREST_KEYS, TREE_KEYS
from helix_store.streams.database import delete_orphaned_streams, streams_of

Rows = Counter[type[Model]]


class TreeBusy(Exception):
    """Another transaction has locked a session of the tree."""


def tree_keys(db: Database, session_id: str) -> list[int]:
    """Return the surrogate keys of a session and those below it, or none if it is unknown. One query."""
    rows = db.read(TREE_KEYS, {"tenant": db.tenant, "session_id": session_id})
    return [key for (key,) in rows]


def forest_keys(db: Database, tops: Sequence[int]) -> dict[int, set[int]]:
    """Return the `tree_keys` of many sessions by key, in order, without unknown ones. One query."""
    found: dict[int, set[int]] = defaultdict(set)
    for top, key in db.read(FOREST_KEYS, {"tenant": db.tenant, "keys": list_parameter(db, tops)}):
        found[top].add(key)
    return {top: found[top] for top in tops if top in found}


def delete_tree(db: Database, session_id: str, *, keep_usage: bool) -> int:
    """Delete a session tree, children first, and return the number of sessions. Call in a transaction."""
    return delete_locked_sessions(db, lock_tree(db, session_id), keep_usage=keep_usage)[Session]


def lock_tree(db: Database, session_id: str, *, wait: bool = True) -> set[int]:
    """Lock a whole tree and return its keys, or none if the session is unknown. Call this in a transaction.

    With ``wait=False``, raises `TreeBusy` if another transaction has locked a session of the tree.
    """
    locked: set[int] = set()
    while (keys := set(tree_keys(db, session_id))) - locked:
        # Only a second look finds a child that was created before its parent was locked.
        locked = {head.pk for head in lock_sessions(db, keys, wait=wait)}
        if not wait and keys - locked:
            raise TreeBusy
        if not locked:
            break
    if not keys:
        refuse_moved(db)
    return keys & locked


def delete_locked_sessions(db: Database, locked: Collection[int], *, keep_usage: bool) -> Rows:
    """Delete locked sessions, children first, and return the numbers of deleted rows."""
    deleted: Rows = Counter()
    if not locked:
        return deleted
    children = children_with_rows(db, locked)
    deleted += let_go(db, locked, [child.related_model for child in children])
    stream_ids = streams_of(db, locked)
    usage = UsageEntry.objects.using(db.alias).filter(session_id__in=locked)
    if not keep_usage:
        deleted[UsageEntry] = delete_usage(db, usage)
    for relation in children:
        rows = relation.related_model._base_manager.using(db.alias)
        deleted[relation.related_model] += rows.filter(**{f"{relation.field.name}__in": locked}).delete()[0]
    # A budget of the tree still counts the kept entries.
    session = Session.objects.filter(pk=OuterRef("session_id"))
    root_id = session.values(root=Coalesce("root_session_id", "session_id"))
    usage.update(tree_id=Subquery(root_id), session=None)
    deleted[Session] = Session.objects.using(db.alias).filter(pk__in=locked)._raw_delete(db.alias)
    return deleted + delete_orphaned_streams(db, stream_ids)
