"""The statements of `DjangoStore` on its table."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db.models import F, Q, QuerySet

from helix_store.contrib.langgraph.filters import (
    end_of,
    is_match,
    is_under,
    labels_of,
    namespace_text,
    narrowed,
)
from helix_store.contrib.langgraph.models import LangGraphMemory
from helix_store.core import moments
from helix_store.core.payloads import decode_object, size_of
from helix_store.engine.database import Database
from helix_store.engine.expressions import after_keyset, tenant_parameter
from helix_store.exceptions import IntegrityFault, shown_id

if TYPE_CHECKING:
    from helix_store.contrib.langgraph.vectors.index import Index

_logger = logging.getLogger(__name__)

_AT_ONCE: Final = 200
_DELETED_AT_ONCE: Final = 1_000
_FIRST_PAGE: Final = 100
_LARGEST_PAGE: Final = 1_000
_NEWEST_FIRST: Final = ("updated_at", "id")
_COLUMNS: Final = ("id", "namespace", "key", "value", "created_at", "updated_at", "ttl_ms")


class Address(NamedTuple):
    """The columns that identify a memory within its tenant. ``namespace`` is its text form."""

    namespace: str
    key: str


class NewMemory(NamedTuple):
    """A value to store. ``embedded`` maps the path of each part that gets a vector to its text."""

    text: str
    ttl_ms: int | None
    embedded: Mapping[str, str] = {}


class StoredMemory(NamedTuple):
    id: int
    namespace: str
    key: str
    text: str
    created_at: datetime
    updated_at: datetime
    ttl_ms: int | None

    @property
    def value(self) -> dict[str, Any]:
        """Raises `IntegrityFault` if it cannot be read."""
        return decode_object(self.text)

    @property
    def readable_value(self) -> dict[str, Any] | None:
        """The value, or `None` if it cannot be read, so that one memory cannot hide others in a search."""
        try:
            return self.value
        except IntegrityFault:
            place = f"{shown_id(self.key)} of the namespace {shown_id(self.namespace)}"
            _logger.error("A search leaves out the LangGraph memory %s, which cannot be read.", place)
            return None


class Memories:
    """The memories of one tenant. The caller opens the query or transaction.

    With ``omit_expired``, reads omit memories that have expired according to the database's clock.
    """

    def __init__(self, db: Database, *, omit_expired: bool = False) -> None:
        self._db = db
        self._omit_expired = omit_expired

    # --- Reads -------------------------------------------------------------------------------------

    def at(self, addresses: Collection[Address]) -> dict[Address, StoredMemory]:
        """Return the memories at these addresses, with one statement for every 200."""
        found = {}
        for some in _portions(sorted(set(addresses))):
            for row in self._readable().filter(_is_one_of(some)).values_list(*_COLUMNS):
                memory = StoredMemory(*row)
                found[Address(memory.namespace, memory.key)] = memory
        return found

    def search(
        self, prefix: str, conditions: Mapping[str, Any], *, limit: int, offset: int
    ) -> list[StoredMemory]:
        """Return the memories under a namespace that match a filter, most recently written first.

        Without a filter the values are not read.
        """
        rows = self._readable().filter(is_under(prefix)).order_by("-updated_at", "-id")
        if not conditions:
            return [StoredMemory(*row) for row in rows.values_list(*_COLUMNS)[offset : offset + limit]]
        memories = self._all(rows.filter(narrowed(conditions)))
        matching = (memory for memory in memories if _is_readable_match(memory, conditions))
        return list(islice(islice(matching, offset, None), limit))

    def nearest(
        self,
        embedding: tuple[Index, str],
        prefix: str,
        conditions: Mapping[str, Any],
        *,
        limit: int,
        offset: int,
    ) -> list[tuple[StoredMemory, float]]:
        """Return the memories under a namespace that match a filter, nearest first, with their scores.

        With a filter, this reads the distances of all memories, followed by values until enough have matched.
        """
        from helix_store.contrib.langgraph.vectors.rows import with_distance

        index, vector = embedding
        rows = self._readable().filter(is_under(prefix), narrowed(conditions))
        nearest_first = (F("distance").asc(nulls_last=True), "-updated_at", "-id")
        ranked = with_distance(rows, index, vector).order_by(*nearest_first).values_list("pk", "distance")
        if not conditions:
            ranked, offset = ranked[offset : offset + limit], 0
        scores = {key: index.score(distance) for key, distance in ranked if distance is not None}
        found = (
            memory
            for some in _portions(list(scores))
            for memory in self._by_keys(some)
            if _is_readable_match(memory, conditions)
        )
        return [(memory, scores[memory.id]) for memory in islice(islice(found, offset, None), limit)]

    def _by_keys(self, keys: Sequence[int]) -> Iterator[StoredMemory]:
        rows = self.rows().filter(pk__in=keys).values_list(*_COLUMNS)
        found = {row[0]: StoredMemory(*row) for row in rows}
        return (found[key] for key in keys if key in found)

    def namespaces(self, matching: Q, *, depth: int | None, limit: int, offset: int) -> list[tuple[str, ...]]:
        """Return the namespaces that contain a memory, ordered by text and cut to ``depth`` labels."""
        rows = self._readable().filter(matching).order_by("namespace").values_list("namespace", flat=True)
        rows = rows.distinct()
        if depth is None:
            return [labels_of(text) for text in rows[offset : offset + limit]]
        return list(islice(islice(self._cut_namespaces(rows, depth), offset, None), limit))

    def _cut_namespaces(self, rows: QuerySet[Any, str], depth: int) -> Iterator[tuple[str, ...]]:
        after = ""
        while page := list(rows.filter(namespace__gt=after)[:_LARGEST_PAGE]):
            for labels, _ in groupby(page, key=lambda text: labels_of(text)[:depth]):
                yield labels
            # Deeper namespaces are cut to this depth.
            after = page[-1] if len(labels) < depth else end_of(namespace_text(labels))

    def _all(self, rows: QuerySet[LangGraphMemory]) -> Iterator[StoredMemory]:
        """Yield all rows in pages of growing length, because a filter often matches among the first rows."""
        size, page = _FIRST_PAGE, rows
        while True:
            memories = [StoredMemory(*row) for row in page.values_list(*_COLUMNS)[:size]]
            yield from memories
            if len(memories) < size:
                return
            last = {name: getattr(memories[-1], name) for name in _NEWEST_FIRST}
            page = rows.filter(after_keyset(LangGraphMemory, last, descending=True))
            size = min(2 * size, _LARGEST_PAGE)

    # --- Writes ------------------------------------------------------------------------------------

    def put(self, memories: Mapping[Address, NewMemory], *, vectors: Mapping[str, str] | None = None) -> None:
        """Insert or replace in the order of addresses, so that two writers do not wait for each other.

        ``vectors`` belong to the texts in ``embedded``, and replace the vectors of the previous values.
        """
        time = moments.now()
        has_terms = any(memory.ttl_ms is not None for memory in memories.values())
        clock = self._db.now() if has_terms else None
        rows = [
            LangGraphMemory(
                tenant=self._db.tenant,
                namespace=address.namespace,
                key=address.key,
                value=memory.text,
                size_bytes=size_of(memory.text),
                ttl_ms=memory.ttl_ms,
                expires_at=None if clock is None else _term_end(clock, memory.ttl_ms),
                created_at=time,
                updated_at=time,
            )
            for address, memory in sorted(memories.items())
        ]
        LangGraphMemory.objects.using(self._db.alias).bulk_create(
            rows,
            batch_size=_AT_ONCE,
            update_conflicts=True,
            unique_fields=["tenant", "namespace", "key"],
            update_fields=["value", "size_bytes", "ttl_ms", "expires_at", "updated_at"],
        )
        if vectors is None:
            return
        from helix_store.contrib.langgraph.vectors.rows import delete_vectors, insert_vectors

        for some in _portions(sorted(memories)):
            delete_vectors(self._db, _is_one_of(some))
        embedded = [
            (*address, path, vectors[text])
            for address, memory in sorted(memories.items())
            for path, text in memory.embedded.items()
        ]
        insert_vectors(self._db, embedded, time)

    def delete(self, addresses: Collection[Address]) -> None:
        for some in _portions(sorted(addresses)):
            self.rows().filter(_is_one_of(some)).delete()

    def renew(self, memories: Collection[StoredMemory]) -> None:
        """Restart the terms of memories that were read.

        A memory that has been replaced since keeps its term.
        """
        by_term = defaultdict(set)
        for memory in memories:
            if memory.ttl_ms is not None:
                by_term[memory.ttl_ms].add(memory.id)
        if not by_term:
            return
        clock = self._db.now()
        for ttl_ms, keys in sorted(by_term.items()):
            for some in _portions(sorted(keys)):
                rows = self.rows().filter(pk__in=some, ttl_ms=ttl_ms)
                rows.update(expires_at=_term_end(clock, ttl_ms))

    # --- Rows --------------------------------------------------------------------------------------

    def rows(self) -> QuerySet[LangGraphMemory]:
        rows = LangGraphMemory.objects.using(self._db.alias)
        return rows.filter(tenant=tenant_parameter(self._db.tenant))

    def _readable(self) -> QuerySet[LangGraphMemory]:
        if not self._omit_expired:
            return self.rows()
        clock = self._db.now()
        return self.rows().filter(Q(expires_at__isnull=True) | Q(expires_at__gt=clock))


def sweep(db: Database, now: datetime) -> int:
    """Delete the memories of a tenant that have expired, the earliest first, and return their number.

    Each transaction deletes a thousand memories. Memories that another transaction has locked are left for
    the next call.
    """
    return _delete(db, Q(expires_at__lte=now), "expires_at", skip_locked=True)


def delete_namespace(db: Database, prefix: str) -> int:
    """Delete a tenant's memories under a namespace and return their number; the rest is as in `sweep`.

    It waits for transactions that have locked one of these memories.
    """
    return _delete(db, is_under(prefix), "namespace", "key")


def _delete(db: Database, condition: Q, *order: str, skip_locked: bool = False) -> int:
    rows = Memories(db).rows()
    found = rows.filter(condition).order_by(*order).select_for_update(skip_locked=skip_locked)

    def delete_some() -> int:
        keys = list(found.values_list("pk", flat=True)[:_DELETED_AT_ONCE])
        return rows.filter(pk__in=keys).delete()[0]

    deleted = 0
    while some := db.transaction(delete_some):
        deleted += some
    return deleted


def _is_readable_match(memory: StoredMemory, conditions: Mapping[str, Any]) -> bool:
    return (value := memory.readable_value) is not None and is_match(value, conditions)


def _term_end(clock: datetime, ttl_ms: int | None) -> datetime | None:
    return None if ttl_ms is None else clock + timedelta(milliseconds=ttl_ms)


def _portions(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE))


def _is_one_of(addresses: Sequence[Address]) -> Q:
    """Return a condition for each namespace; the addresses are in order."""
    found = Q()
    for namespace, some in groupby(addresses, key=lambda address: address.namespace):
        found |= Q(namespace=namespace, key__in=[address.key for address in some])
    return found
