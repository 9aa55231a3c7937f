"""The steps of deleting session trees: lock them, check that they are not in use, and count rows by table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from django.db.models import Count, F, Model, QuerySet, Sum

from helix_store.catalogue.rows import children_of_sessions, tenants_with_rows
from helix_store.cleanup import sql
from helix_store.cleanup.outcomes import SessionKey
from helix_store.cleanup.sql import IN_USE, LINKS_INTO, STREAMS_OF_NO_OTHER
from helix_store.cleanup.workspaces import Snapshot, WorkspaceProvider, owned_snapshots
from helix_store.core.payloads import decode_object
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter
from helix_store.models import Lock, Session, Stream, StreamChunk
from helix_store.sessions.database.trees import forest_keys

Rows = Counter[type[Model]]


def tenants_of(using: str | None, models: Iterable[type[Model]]) -> list[str]:
    """Return the tenants with rows in these tables.

    Each tenant takes one index lookup, regardless of its size.
    """
    alias = Database(using, "").alias
    return sorted({tenant for model in models for tenant in tenants_with_rows(model, alias)})


def sessions_with_keys(db: Database, keys: Collection[int]) -> QuerySet[Session]:
    return Session.objects.using(db.alias).filter(pk__in=keys)


def require_writable(db: Database, keys: Collection[int]) -> None:
    """Write locked rows unchanged, so that a tenant being moved is refused before any irreversible step.

    Its sessions may continue in the other database, with the same snapshots. Raise `TenantMoved`.
    """
    sessions_with_keys(db, keys).update(updated_at=F("updated_at"))


def ids_of(db: Database, keys: Collection[int]) -> list[str]:
    return list(sessions_with_keys(db, keys).values_list("session_id", flat=True))


def links_into(db: Database, keys: Collection[int]) -> dict[int, set[int]]:
    """Return, by the key of a session, the keys of the sessions of which it is a sub-session."""
    links = defaultdict(set)
    for key, owner in db.read(LINKS_INTO, {"keys": list_parameter(db, list(keys))}):
        links[key].add(owner)
    return links


def is_in_use(db: Database, keys: Collection[int]) -> bool:
    """Return whether one of the sessions is in use and must be kept. Call this in a transaction.

    It locks the rows of the sessions' locks, so that nobody can acquire one until the transaction ends.
    """
    locks = locks_of(db, keys)
    # If a row is locked, someone is acquiring that lock, so it is about to become live.
    free = set(locks.select_for_update(skip_locked=True).order_by("pk").values_list("pk", flat=True))
    if set(locks.values_list("pk", flat=True)) - free:
        return True
    return bool(in_use(db, keys))


def in_use(db: Database, keys: Collection[int]) -> set[int]:
    """Return the sessions with a running run, a live lock, or a stream with a live writer."""
    return {key for (key,) in db.read(IN_USE, {"keys": list_parameter(db, list(keys))})}


def locks_of(db: Database, keys: Collection[int]) -> QuerySet[Lock]:
    """Return the locks with the names of these sessions."""
    names = sessions_with_keys(db, keys).values("session_id")
    return Lock.objects.using(db.alias).filter(tenant=db.tenant, name__in=names)


def snapshots_of_tree(
    db: Database, keys: Collection[int], providers: Mapping[str, WorkspaceProvider]
) -> list[Snapshot]:
    """Return the workspace snapshots of these sessions.

    Raise `MissingProvider`, or `IntegrityFault` if a session cannot be read.
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


class DoomedStream(NamedTuple):
    """A stream that no session refers to once these sessions are deleted."""

    key: int
    chunks: int
    is_lost: bool
    """True if its writer died, so that pruning would mark the stream as failed."""


def doomed_streams(db: Database, keys: Collection[int]) -> list[DoomedStream]:
    parameters = {"tenant": db.tenant, "keys": list_parameter(db, list(keys))}
    return [DoomedStream(*row) for row in db.read(STREAMS_OF_NO_OTHER, parameters)]


def row_counts(db: Database, keys: Collection[int], streams: Collection[DoomedStream]) -> Rows:
    """Return the rows of each model that are deleted with these sessions and streams, without usage."""
    (numbers,) = db.read(sql.row_counts(), {"keys": list_parameter(db, list(keys))})
    models = (relation.related_model for relation in children_of_sessions())
    counts: Rows = Counter(dict(zip(models, numbers, strict=True)))
    counts[Session] = len(keys)
    counts[Stream] = len(streams)
    counts[StreamChunk] = sum(stream.chunks for stream in streams)
    return counts


# --- Forecast ----------------------------------------------------------------------------------------


class Forecast:
    """The forecast of a tenant's erasure for a dry run, tree by tree in the order of a real one."""

    def __init__(self, *, force: bool) -> None:
        self._force = force
        self._counted: set[int] = set()

    def of_page(self, db: Database, tops: Sequence[int]) -> tuple[Rows, int, list[int]]:
        """Return the rows that are deleted with the trees of these sessions, the number of the trees, and the
        roots of trees in use.

        Usage, streams and locks are not counted. Pages come in key order, so only those sub-sessions already
        counted that have larger keys must be remembered.
        """
        found = forest_keys(db, tops)
        used = set() if self._force else in_use(db, set().union(*found.values()))
        left, counted, number = [], set[int](), 0
        for top, keys in found.items():
            if top in self._counted:
                continue
            if keys & used:
                left.append(top)
                continue
            # A session with a smaller key has already been counted with its tree.
            counted |= {key for key in keys if key >= top} - self._counted
            self._counted |= keys
            number += 1
        self._counted = {key for key in self._counted if key > tops[-1]}
        return row_counts(db, counted, []), number, left

    def streams(self, db: Database) -> Rows:
        """Count the tenant's streams and their chunks. Call this in a query."""
        chunks = Sum(F("last_sequence") - F("floor"), default=0)
        streams = Stream.objects.using(db.alias).filter(tenant=db.tenant)
        sums = streams.aggregate(streams=Count("pk"), chunks=chunks)
        return Counter({Stream: sums["streams"], StreamChunk: sums["chunks"]})
