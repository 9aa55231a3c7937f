"""The forecast of a tenant's erasure for a dry run: the rows it would delete. Each session counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from django.db.models import Count, F, Model, Sum

from helix_store.cleanup import trees
from helix_store.cleanup.requests import ErasureRequest
from helix_store.engine.database import Database
from helix_store.models import Stream, StreamChunk
from helix_store.sessions.database.trees import forest_keys

__all__ = ["Forecast", "PageOfTrees"]

Rows = Counter[type[Model]]


class PageOfTrees(NamedTuple):
    """The rows that a page of trees deletes, the number of these trees, and the tops of trees in use."""

    deleted: Rows
    trees: int
    in_use: list[int]


class Forecast:
    """A counter of a tenant's trees, in the order in which an erasure would erase them."""

    def __init__(self, request: ErasureRequest) -> None:
        self._request = request
        self._counted: set[int] = set()

    def of_page(self, db: Database, tops: Sequence[int]) -> PageOfTrees:
        """Count the trees of these sessions.

        Usage, streams and locks are not counted. Pages come in key order, so only the counted sub-sessions
        with larger keys are remembered.
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
            # A session with a smaller key was already counted with its tree.
            counted |= {key for key in keys if key >= top} - self._counted
            self._counted |= keys
            number += 1
        self._counted = {key for key in self._counted if key > tops[-1]}
        return PageOfTrees(trees.row_counts(db, counted, []), number, in_use)

    def streams(self, db: Database) -> Rows:
        """Count the tenant's streams and their chunks. Call this in a query."""
        chunks = Sum(F("last_sequence") - F("floor"), default=0)
        streams = Stream.objects.using(db.alias).filter(tenant=db.tenant)
        sums = streams.aggregate(streams=Count("pk"), chunks=chunks)
        return Counter({Stream: sums["streams"], StreamChunk: sums["chunks"]})
