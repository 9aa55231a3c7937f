"""Removing what nobody needs any more."""

from __future__ import annotations

from datetime import datetime, timedelta

from helix_store import conf
from helix_store.core import validation
from helix_store.core.streams import PrunedStreams
from helix_store.engine.database import Database
from helix_store.streams.manager import prune_request
from helix_store.streams.pruning import prune

__all__ = ["prune_streams"]


def prune_streams(
    *,
    using: str | None = None,
    tenant: str | None = None,
    older_than: timedelta | datetime | None,
    keep_chunks: int | None = None,
    dry_run: bool = False,
) -> PrunedStreams:
    """Fail streams whose writer died, and remove chunks that are too old or too many.

    ``older_than`` is an age, or a point in time, of the end of streams: those that ended or failed before it
    lose all of their chunks, and so do those whose manager's ``retention`` is over. With ``keep_chunks``
    every other stream keeps its newest that many. The heads stay, so that a reader below the floor is told.
    ``tenant=None`` is every tenant. Works in small transactions; safe to repeat. Raises `InvalidQuery`.
    """
    conf.require_usable_prefix()
    request = prune_request(older_than=older_than, keep_chunks=keep_chunks, dry_run=dry_run)
    checked = None if tenant is None else validation.tenant(tenant)
    return prune(Database(using, checked or "", None), checked, request)
