"""Pruning, which marks streams with a dead writer as failed, and deletes chunks by age and count, in small
transactions. The row of a stream is kept, with a floor that shows readers which chunks were deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final, NamedTuple

from django.db.models import Count, F, Q, QuerySet, Sum
from django.db.models.expressions import Combinable
from django.db.models.functions import Now

from helix_store import conf
from helix_store.core import validation
from helix_store.core.streams import PrunedStreams
from helix_store.engine.database import Database
from helix_store.engine.expressions import NoIndexHint
from helix_store.models import Stream
from helix_store.streams import sql
from helix_store.streams.notifications import notify_after_commit
from helix_store.streams.rules import WRITER_LOST, PruneRequest

_CHUNKS_PER_TRANSACTION: Final = 5_000

_NOTHING: Final = PrunedStreams(streams=0, chunks=0, failed=0)

_BY_KEY: Final = F("id")
_SORTED_BY_KEY: Final = F("id") + 0
"""The order for a condition that few streams meet, which makes the database find them by an index and then
sort them. With the plain key, it would read all streams in key order.
"""


class _Rule(NamedTuple):
    """A rule: the streams that it applies to, and how many of their newest chunks they keep."""

    condition: Q
    keep: int
    order: Combinable


def prune_streams(
    *,
    using: str | None = None,
    tenant: str | None = None,
    older_than: timedelta | datetime | None,
    keep_chunks: int | None = None,
    dry_run: bool = False,
) -> PrunedStreams:
    """Mark streams with a dead writer as failed, and delete chunks that are too old or too many.

    ``older_than`` is an age or a point in time: streams that ended or failed before it lose all of their
    chunks, as do streams whose manager's ``retention`` has passed. With ``keep_chunks`` every other stream
    keeps that many of its newest chunks. The rows of the streams are kept, so that readers of removed chunks
    get `StreamTruncated`. ``tenant=None`` prunes every tenant. ``dry_run=True`` only counts.

    Works in small transactions that lock one stream or one page of streams. Safe to repeat and to interrupt.
    Raises `InvalidQuery`.
    """
    conf.require_usable_prefix()
    request = PruneRequest.checked(older_than=older_than, keep_chunks=keep_chunks, dry_run=dry_run)
    checked = None if tenant is None else validation.tenant(tenant)
    return prune(Database(using, checked or "", None), checked, request)


def prune(db: Database, tenant: str | None, request: PruneRequest) -> PrunedStreams:
    """Prune the streams of one tenant, or of all tenants if it is ``None``.

    Each batch is a transaction, or a savepoint in the caller's. Safe to repeat and to interrupt.
    """
    pruned = _NOTHING
    for batch in prune_batches(db, tenant, request):
        pruned = batch
    return pruned


def prune_batches(db: Database, tenant: str | None, request: PruneRequest) -> Iterator[PrunedStreams]:
    """Run `prune` and yield the sum so far after each step."""
    if request.dry_run:
        # Deleting millions of chunks and rolling the deletion back would take as long as the real run.
        ((lost,),) = db.read(sql.COUNT_LOST, {"tenant": tenant})
        yield replace(would_empty(db, _of_tenant(db, tenant), request), failed=int(lost))
        return
    pruned = _NOTHING
    for failed in _fail_lost(db, tenant):
        pruned = replace(pruned, failed=pruned.failed + failed)
        yield pruned
    for rule in _rules(request):
        for key in _each(db, tenant, rule):
            removed = _remove(db, key, rule)
            pruned = replace(pruned, streams=pruned.streams + (removed > 0), chunks=pruned.chunks + removed)
            yield pruned


def would_empty(db: Database, streams: QuerySet[Stream], request: PruneRequest) -> PrunedStreams:
    """Return the number of chunks that are too old or too many, and the number of streams that have them.
    Takes one statement for each rule.
    """
    pruned = _NOTHING
    for rule in _rules(request):
        surplus = F("last_sequence") - rule.keep - F("floor")
        found = streams.filter(rule.condition, last_sequence__gt=F("floor") + rule.keep)
        sums = db.query(partial(found.aggregate, streams=Count("pk"), chunks=Sum(surplus, default=0)))
        pruned = replace(
            pruned, streams=pruned.streams + sums["streams"], chunks=pruned.chunks + sums["chunks"]
        )
    return pruned


def _fail_lost(db: Database, tenant: str | None) -> Iterator[int]:
    parameters = {"tenant": tenant, "error": WRITER_LOST, "limit": conf.page_size()}

    def batch() -> int:
        rows = db.execute(sql.FAIL_LOST, parameters)
        for key, last_sequence in rows:
            notify_after_commit(db.alias, key, last_sequence)
        return len(rows)

    while count := db.transaction(batch):
        yield count


def _rules(request: PruneRequest) -> list[_Rule]:
    # Each part repeats the condition of the partial index that serves it. The database's clock decides.
    expired = Q(keep_until__isnull=False, is_emptied=False, keep_until__lte=Now())
    if request.older_than is not None:
        is_age = isinstance(request.older_than, timedelta)
        cutoff = Now() - request.older_than if is_age else request.older_than
        expired |= Q(ended_at__isnull=False, is_emptied=False, ended_at__lte=cutoff)
    # These streams lose all of their chunks, because they ended too long ago.
    rules = [_Rule(expired, 0, _SORTED_BY_KEY)]
    if request.keep_chunks is not None:
        too_many = Q(last_sequence__gt=F("floor") + request.keep_chunks) & ~expired
        rules.append(_Rule(too_many, request.keep_chunks, _BY_KEY))
    return rules


def _of_tenant(db: Database, tenant: str | None) -> QuerySet[Stream]:
    streams = Stream.objects.using(db.alias)
    if tenant is None:
        return streams
    return streams.alias(unindexed_tenant=NoIndexHint("tenant")).filter(unindexed_tenant=tenant)


def _each(db: Database, tenant: str | None, rule: _Rule) -> Iterator[int]:
    """Yield the keys of the streams to which a rule applies, read in pages."""
    streams = _of_tenant(db, tenant).filter(rule.condition)
    keys = streams.alias(position=rule.order).order_by("position").values_list("pk", flat=True)
    last = 0
    while page := db.query(partial(list[int], keys.filter(position__gt=last)[: conf.page_size()])):
        yield from page
        last = page[-1]


def _remove(db: Database, key: int, rule: _Rule) -> int:
    removed = 0
    while count := db.transaction(lambda: _remove_batch(db, key, rule)):
        removed += count
    return removed


def _remove_batch(db: Database, key: int, rule: _Rule) -> int:
    """Delete the oldest chunks of a stream and return their number, or 0 if there are none to delete.

    The condition is checked again under the lock: the stream may have been reactivated. A locked stream is in
    use, so the next run prunes it.
    """
    streams = Stream.objects.using(db.alias).filter(pk=key)
    locked = streams.filter(rule.condition).select_for_update(skip_locked=True, no_key=True)
    for stream in locked.only("id", "last_sequence", "floor", "ended_at"):
        target = max(stream.floor, stream.last_sequence - rule.keep)
        floor = min(target, stream.floor + _CHUNKS_PER_TRANSACTION)
        db.execute(sql.DELETE_CHUNKS, {"key": key, "last": floor})
        is_emptied = stream.ended_at is not None and floor == stream.last_sequence
        streams.update(floor=floor, is_emptied=is_emptied)
        notify_after_commit(db.alias, key, stream.last_sequence)
        return int(floor - stream.floor)
    return 0
