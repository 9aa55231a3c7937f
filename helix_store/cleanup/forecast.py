"""What an erasure would delete and change: the numbers of a dry run. Each session is counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from django.db.models import Count, Exists, F, Model, OuterRef, Q, QuerySet, Sum

from helix_store.cleanup import references, trees
from helix_store.cleanup.requests import ErasureRequest
from helix_store.engine.database import Database
from helix_store.models import Lock, Session, Stream, StreamChunk, SubSessionRef, UsageEntry
from helix_store.sessions.database.app_rows import foreseen
from helix_store.sessions.database.trees import forest_keys, tree_keys

__all__ = [
    "IN_USE",
    "Erased",
    "Forecast",
    "Left",
    "PageOfTrees",
    "rows_of_streams",
    "streams_without_session",
]

IN_USE: Final = "it is in use"

Rows = Counter[type[Model]]


class Erased(NamedTuple):
    """The rows that an erased tree deletes and changes."""

    deleted: Rows
    changed: Rows
    snapshots: int = 0


class Left(Exception):
    """The tree is left as it is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PageOfTrees(NamedTuple):
    """What a page of trees deletes, how many trees it has, and the tops of trees in use."""

    deleted: Rows
    trees: int
    in_use: list[int]


class Forecast:
    """Counts trees of one erasure in the order in which it would erase them."""

    def __init__(self, request: ErasureRequest) -> None:
        self._request = request
        self._counted: set[int] = set()

    def of_tree(self, db: Database, session_id: str) -> Erased:
        """Count one tree. Call in a query. Raises `Left`."""
        keys = set(tree_keys(db, session_id)) - self._counted
        if not keys:
            return Erased(Counter(), Counter())
        if not self._request.force and trees.in_use(db, keys):
            raise Left(IN_USE)
        self._counted |= keys
        ids = trees.ids_of(db, keys)
        streams = trees.doomed_streams(db, keys)
        deleted = trees.row_counts(db, keys, streams)
        changed: Rows = Counter()
        if self._request.keep_branches:
            changed[Session] = len(references.branches_of(db, ids))
        unnamed = set(ids).difference(stream.stream_id for stream in streams)
        deleted += rows_of_streams(streams_without_session(db).filter(stream_id__in=unnamed))
        deleted[SubSessionRef] += references.foreign_refs(db, keys, ids).count()
        deleted[Lock] = trees.locks_of(db, keys).count()
        user_id = self._request.user_id
        # Entries of the user are counted apart: they go wherever they are.
        of_user = Q(user_id=user_id) if user_id is not None else Q(pk__in=())
        for entries in (
            UsageEntry.objects.using(db.alias).filter(session_id__in=keys),
            references.kept_usage(db, ids),
        ):
            deleted[UsageEntry] += entries.filter(~of_user | Q(user_id__isnull=True)).count()
        others = references.usage_of_sub_sessions(db, keys, ids).exclude(recorded_for__in=ids)
        changed[UsageEntry] = others.filter(~of_user | Q(user_id__isnull=True)).count()
        return Erased(deleted, changed)

    def beside_trees(self, db: Database) -> Rows:
        """Count what other apps would delete with the counted trees of a tenant. Call in a query, after all.

        Together and not tree by tree: what two of them share goes with the last one.
        """
        keys, self._counted = self._counted, set()
        return foreseen(db, keys)

    def of_page(self, db: Database, tops: Sequence[int]) -> PageOfTrees:
        """Count the trees of these sessions of a tenant that goes as a whole.

        Usage, streams and locks are not counted. Pages come in the order of the keys: what is remembered are
        the counted sub-sessions that are still to come.
        """
        found = forest_keys(db, tops)
        used = set() if self._request.force else trees.in_use(db, set().union(*found.values()))
        in_use, counted, number = [], set[int](), 0
        for top, keys in found.items():
            if top in self._counted:
                continue
            if keys & used:
                in_use.append(top)
                continue
            # A session with a smaller key was met before, with its tree.
            counted |= {key for key in keys if key >= top} - self._counted
            self._counted |= keys
            number += 1
        self._counted = {key for key in self._counted if key > tops[-1]}
        return PageOfTrees(trees.row_counts(db, counted, []), number, in_use)


def streams_without_session(db: Database) -> QuerySet[Stream]:
    """The streams that no session names."""
    named = Session.objects.using(db.alias).filter(tenant=OuterRef("tenant"), stream_id=OuterRef("stream_id"))
    return Stream.objects.using(db.alias).filter(~Exists(named), tenant=db.tenant)


def rows_of_streams(streams: QuerySet[Stream]) -> Rows:
    """The numbers of these streams and of their chunks. Call in a query."""
    chunks = Sum(F("last_sequence") - F("floor"), default=0)
    sums = streams.aggregate(streams=Count("pk"), chunks=chunks)
    return Counter({Stream: sums["streams"], StreamChunk: sums["chunks"]})
