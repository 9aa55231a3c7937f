"""Pruning streams: fail those whose writer died, and remove chunks by age and count, in small transactions.

A stream's head stays, with the floor below which a reader is told that chunks are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Final

from django.db.models import F, Q, QuerySet
from django.db.models.expressions import Combinable
from django.db.models.functions import Now

from helix_store import conf
from helix_store.core.streams import PrunedStreams
from helix_store.engine.database import Database
from helix_store.engine.expressions import NoIndexHint
from helix_store.models import Stream, StreamChunk
from helix_store.sessions.database.rows import first_row
from helix_store.streams.backend import PruneRequest
from helix_store.streams.notifications import announce_after_commit
from helix_store.streams.sql import stream_statements

__all__ = ["prune"]

_CHUNKS_PER_TRANSACTION: Final = 5_000

_ALL_BY_KEY: Final = F("id")
_FEW_BY_KEY: Final = F("id") + 0
"""Found by the indexes of their condition, and sorted: by the plain key all streams would be passed over."""


def prune(db: Database, tenant: str | None, request: PruneRequest) -> PrunedStreams:
    """Do what the request says for one tenant, or for all of them when it is ``None``.

    Each batch is a transaction by itself unless the caller has one open. Safe to repeat and to interrupt.
    """
    failed = _count_lost(db, tenant) if request.dry_run else _fail_lost(db, tenant, request)
    doomed = _is_doomed(request)
    whole = _removed(db, tenant, doomed, keep=0, dry_run=request.dry_run, by=_FEW_BY_KEY)
    if request.keep_chunks is None:
        removed = whole
    else:
        is_long = Q(last_sequence__gt=F("floor") + request.keep_chunks) & ~doomed
        removed = whole + _removed(
            db, tenant, is_long, keep=request.keep_chunks, dry_run=request.dry_run, by=_ALL_BY_KEY
        )
    return PrunedStreams(streams=sum(count > 0 for count in removed), chunks=sum(removed), failed=failed)


def _count_lost(db: Database, tenant: str | None) -> int:
    statement = stream_statements(db.connection).lost
    ((count,),) = db.query(lambda: db.execute(statement, {"tenant": tenant}))
    return int(count)


def _fail_lost(db: Database, tenant: str | None, request: PruneRequest) -> int:
    parameters = {
        "tenant": tenant,
        "error": request.lost_writer_error,
        "limit": conf.page_size(),
        "no": False,
    }

    def batch() -> int:
        rows = db.execute(stream_statements(db.connection).fail_lost, parameters)
        for key, last_sequence in rows:
            announce_after_commit(db.connection, key, last_sequence)
        return len(rows)

    failed = 0
    while count := db.transaction(batch):
        failed += count
    return failed


def _is_doomed(request: PruneRequest) -> Q:
    """What loses all of its chunks: streams over for too long, on the clock of the database."""
    # Each part is spelled as the partial index that serves it.
    doomed = Q(keep_until__isnull=False, is_emptied=False, keep_until__lte=Now())
    if request.older_than is not None:
        is_age = isinstance(request.older_than, timedelta)
        cutoff = Now() - request.older_than if is_age else request.older_than
        doomed |= Q(ended_at__isnull=False, is_emptied=False, ended_at__lte=cutoff)
    return doomed


def _removed(
    db: Database, tenant: str | None, doomed: Q, *, keep: int, dry_run: bool, by: Combinable
) -> list[int]:
    """How many chunks went, stream by stream."""
    removed = []
    for stream in _each(db, tenant, doomed, by):
        if dry_run:
            removed.append(max(0, stream.last_sequence - keep - stream.floor))
        else:
            removed.append(_remove(db, stream.pk, doomed, keep))
    return removed


def _each(db: Database, tenant: str | None, doomed: Q, by: Combinable) -> Iterator[Stream]:
    """The streams concerned, a page at a time, by key."""
    streams = Stream.objects.using(db.alias).filter(doomed)
    if tenant is not None:
        streams = streams.alias(unindexed_tenant=NoIndexHint("tenant")).filter(unindexed_tenant=tenant)
    streams = streams.only("id", "last_sequence", "floor").alias(position=by).order_by("position")
    key = 0
    while page := db.query(partial(_page_after, streams, key)):
        yield from page
        key = page[-1].pk


def _page_after(streams: QuerySet[Any], key: int) -> list[Stream]:
    return list(streams.filter(position__gt=key)[: conf.page_size()])


def _remove(db: Database, key: int, doomed: Q, keep: int) -> int:
    removed = 0
    while count := db.transaction(lambda: _remove_batch(db, key, doomed, keep)):
        removed += count
    return removed


def _remove_batch(db: Database, key: int, doomed: Q, keep: int) -> int:
    """Remove the oldest chunks of a stream and return how many; 0 once nothing is left to remove.

    The condition is asked again under the lock: the stream may have been reactivated. One that is locked is
    in use, and left for the next time.
    """
    streams = Stream.objects.using(db.alias).filter(pk=key)
    stream = first_row(
        streams.filter(doomed)
        .select_for_update(skip_locked=True, no_key=True)
        .only("id", "last_sequence", "floor", "ended_at")
    )
    if stream is None:
        return 0
    target = max(stream.floor, stream.last_sequence - keep)
    floor = min(target, stream.floor + _CHUNKS_PER_TRANSACTION)
    StreamChunk.objects.using(db.alias).filter(stream_id=key, sequence__lte=floor).delete()
    is_emptied = stream.ended_at is not None and floor == stream.last_sequence
    streams.update(floor=floor, is_emptied=is_emptied)
    announce_after_commit(db.connection, key, stream.last_sequence)
    return floor - stream.floor
