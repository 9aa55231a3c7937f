"""Session trees that are to be deleted: locked, found idle or in use, and counted by table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

from django.db.models import Model, QuerySet

from helix_store import conf
from helix_store.cleanup.backend import SessionKey
from helix_store.cleanup.snapshots import Snapshot, owned_snapshots
from helix_store.cleanup.sql import LINKS_INTO
from helix_store.cleanup.workspaces import WorkspaceProvider
from helix_store.core.payloads import decode_object
from helix_store.core.types import RunStatus, StreamStatus
from helix_store.engine.clocks import database_now
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter
from helix_store.models import Lock, Run, Session, Stream, StreamChunk
from helix_store.sessions.database.rows import first_row
from helix_store.sessions.database.trees import children_of_sessions, tree_keys
from helix_store.streams.database import streams_of

__all__ = [
    "TreeBusy",
    "by_table",
    "is_in_use",
    "links_into",
    "lock_tree",
    "locks_of",
    "row_counts",
    "sessions_with_keys",
    "snapshots_of_tree",
    "streams_to_delete",
    "tenants_of",
]

_PREFIX: Final = conf.table_name("")


class TreeBusy(Exception):
    """Another transaction has locked a session of the tree."""


def by_table(rows: Mapping[type[Model], int]) -> dict[str, int]:
    """Numbers of rows by the name of the table without its prefix, without zeros, in the order of names."""
    names = {model._meta.db_table.removeprefix(_PREFIX): count for model, count in rows.items() if count}
    return dict(sorted(names.items()))


def tenants_of(using: str | None, models: Iterable[type[Model]]) -> list[str]:
    """The tenants with rows in these tables. Each is one look-up in an index, however many rows it has."""
    found: set[str] = set()
    db = Database(using, "")
    for model in models:
        rows: QuerySet[Any] = model._base_manager.using(db.alias)
        tenants = rows.order_by("tenant").values_list("tenant", flat=True)
        # The empty tenant is the smallest one, and comes first.
        following = tenants
        while (first := db.query(partial(first_row, following))) is not None:
            found.add(first)
            following = tenants.filter(tenant__gt=first)
    return sorted(found)


def sessions_with_keys(db: Database, keys: Collection[int]) -> QuerySet[Session]:
    return Session.objects.using(db.alias).filter(pk__in=keys)


def lock_tree(db: Database, session_id: str, *, wait: bool) -> set[int]:
    """Lock a whole tree and return its keys, none for an unknown session. Call in a transaction.

    With ``wait=False`` raises `TreeBusy` when another transaction has locked a session of the tree.
    """
    locked: set[int] = set()
    while (keys := set(tree_keys(db, session_id))) - locked:
        # A child created before its parent was locked is only seen by looking again.
        rows = sessions_with_keys(db, keys).select_for_update(skip_locked=not wait)
        locked = set(rows.order_by("pk").values_list("pk", flat=True))
        if not wait and keys - locked:
            raise TreeBusy
    return keys


def links_into(db: Database, keys: Collection[int]) -> dict[int, set[int]]:
    """By the key of a session: the keys of the sessions that have it as a sub-session."""
    links = defaultdict(set)
    for key, owner in db.read(LINKS_INTO, {"keys": list_parameter(db, list(keys))}):
        links[key].add(owner)
    return links


def is_in_use(db: Database, keys: Collection[int], *, lock: bool) -> bool:
    """Whether a session has a running run, a live lock, or a stream with a live writer. Call in a query.

    ``lock`` holds the rows of the locks until the transaction ends: then nobody acquires one meanwhile.
    """
    running = Run.objects.using(db.alias).filter(session_id__in=keys, status=RunStatus.RUNNING.value)
    if running.exists():
        return True
    locks = locks_of(db, keys)
    if lock:
        # A row that is locked is being acquired: its lock is live in a moment.
        free = set(locks.select_for_update(skip_locked=True).order_by("pk").values_list("pk", flat=True))
        if set(locks.values_list("pk", flat=True)) - free:
            return True
    now = database_now(db)
    if locks.filter(expires_at__gt=now).exists():
        return True
    streams = Stream.objects.using(db.alias).filter(tenant=db.tenant, stream_id__in=streams_of(db, keys))
    return streams.filter(status=StreamStatus.ACTIVE.value, lease_expires_at__gt=now).exists()


def locks_of(db: Database, keys: Collection[int]) -> QuerySet[Lock]:
    """The locks with the names of these sessions."""
    names = sessions_with_keys(db, keys).values("session_id")
    return Lock.objects.using(db.alias).filter(tenant=db.tenant, name__in=names)


def snapshots_of_tree(
    db: Database, keys: Collection[int], providers: Mapping[str, WorkspaceProvider]
) -> list[Snapshot]:
    """The workspace snapshots of these sessions.

    Raises `MissingProvider`, and `IntegrityFault` for a session that cannot be read.
    """
    rows = sessions_with_keys(db, keys).order_by("pk").values_list("pk", "session_id", "current__envelope")
    return [
        snapshot
        for key, session_id, envelope in list(rows)
        for snapshot in owned_snapshots(
            providers,
            SessionKey(session_id, db.tenant, key),
            decode_object(envelope or "").get("workspace_refs", {}).values(),
        )
    ]


def streams_to_delete(db: Database, keys: Collection[int]) -> QuerySet[Stream]:
    """The streams that no session refers to when these are gone."""
    others = Session.objects.using(db.alias).filter(tenant=db.tenant).exclude(pk__in=keys)
    found = streams_of(db, keys)
    shared = others.filter(stream_id__in=found).values_list("stream_id", flat=True)
    ids = set(found) - set(shared)
    return Stream.objects.using(db.alias).filter(tenant=db.tenant, stream_id__in=ids)


def row_counts(db: Database, keys: Collection[int]) -> Counter[type[Model]]:
    """The number of rows of each model that the deletion of these sessions deletes; usage is not counted."""
    counts: Counter[type[Model]] = Counter({Session: len(keys)})
    for relation in children_of_sessions():
        rows = relation.related_model._base_manager.using(db.alias)
        counts[relation.related_model] = rows.filter(**{f"{relation.field.name}__in": keys}).count()
    for last_sequence, floor in streams_to_delete(db, keys).values_list("last_sequence", "floor"):
        counts[Stream] += 1
        counts[StreamChunk] += last_sequence - floor
    return counts
