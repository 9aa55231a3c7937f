"""The statements of `DjangoStore` on its table.

Conditions of a search: namespaces as text, and filters.

A dot follows each label of a namespace, so that no label is a prefix of another one. The database checks a
part of the filter, and this module checks all of it.
"""

from __future__ import annotations

import logging
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db.models import F, Q, QuerySet

from helix_store.contrib.item_storage import plain_json
from helix_store.contrib.langgraph.models import LangGraphMemory
from helix_store.core import moments, validation
from helix_store.core.limits import MAX_NAMESPACE_BYTES
from helix_store.core.payloads import decode_object, encode, is_plain_json, size_of
from helix_store.engine.database import Database
from helix_store.engine.expressions import after_keyset, tenant_parameter
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidPayload, InvalidQuery, shown_id

if TYPE_CHECKING:
    from helix_store.contrib.langgraph.vectors.index import Index


_ANY_LABEL: Final = "*"
_MOST_BYTES: Final = 64 * 1024
# SQLite refuses a LIKE pattern that is longer than 50,000 bytes.
_LONGEST_PATTERN: Final = 1_000
# SQLite refuses an expression of more than 1,000 levels, and each field adds one.
_NARROWING_FIELDS: Final = 50

_ORDERS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
_EQUAL: Final = "$eq"
_OPERATORS: Final = frozenset({*_ORDERS, _EQUAL, "$ne"})
_NUMBERS: Final = (int, float)


def namespace_text(labels: Sequence[str], name: str = "namespace") -> str:
    """Return a namespace as text. Raises `InvalidPayload` or `LimitExceeded` if it cannot be stored."""
    return validation.text("".join(f"{label}." for label in labels), name, limit=MAX_NAMESPACE_BYTES)


def labels_of(text: str) -> tuple[str, ...]:
    return tuple(text[:-1].split("."))


def end_of(text: str) -> str:
    """Return the first text after all namespaces under this one; the character after the dot is a slash."""
    return f"{text[:-1]}/"


def is_under(text: str) -> Q:
    """Return the condition for a namespace and all namespaces under it: one range of the index."""
    return Q(namespace__gte=text, namespace__lt=end_of(text)) if text else Q()


def matches(match_type: str, path: Sequence[str]) -> Q:
    """Return the condition for namespaces that begin or end with a path, in which ``*`` is any one label."""
    labels = namespace_text(path, "path")
    if not labels:
        return Q()
    pattern = "".join(r"[^.]+\." if label == _ANY_LABEL else re.escape(f"{label}.") for label in path)
    if match_type == "suffix":
        return Q(namespace__regex=rf"(^|\.){pattern}$")
    if _ANY_LABEL not in path:
        return is_under(labels)
    first = path[: path.index(_ANY_LABEL)]
    return is_under(namespace_text(first)) & Q(namespace__regex=f"^{pattern}")


def encoded_value(
    given: Mapping[str, Any], *, limit: int, name: str = "max_state_bytes", path: str
) -> tuple[dict[str, Any], str]:
    """Return a value as it is stored, and its text. As in LangGraph's stores in databases, a tuple becomes a
    list, and an enumeration its value. Raises `InvalidPayload` and `LimitExceeded`.
    """
    value = dict(given)
    try:
        return value, encode(value, limit=limit, name=name, path=path)
    except InvalidPayload:
        plain = plain_json(value)
        if plain is None:
            raise
    return plain, encode(plain, limit=limit, name=name, path=path)


# --- Filters ---------------------------------------------------------------------------------------


def checked_filter(given: Any) -> dict[str, Any]:
    """Return a filter as a dict. Raises `InvalidQuery` for values other than JSON and unknown operators."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidQuery(f"filter must be a dict, not {type(given).__name__}.", path="filter")
    try:
        checked, _ = encoded_value(given, limit=_MOST_BYTES, name="bytes of filter", path="filter")
    except HelixStoreError as exc:
        raise InvalidQuery(str(exc), path="filter") from exc
    for value in checked.values():
        _check_operators(value)
    return checked


def narrowed(conditions: Mapping[str, Any]) -> Q:
    """Return conditions on the text of a value, which select a superset of the rows that `is_match` accepts.
    A field that equals a string can be written in only one way, unless the whole value has the other form of
    `core.payloads`, which begins with a tilde.
    """
    found = Q()
    for name, condition in islice(conditions.items(), _NARROWING_FIELDS):
        value = condition.get(_EQUAL) if isinstance(condition, dict) else condition
        if type(value) is not str:
            continue
        field = encode({name: value}, path="filter")
        if is_plain_json(field) and len(field) <= _LONGEST_PATTERN:
            found &= Q(value__contains=field[1:-1]) | Q(value__startswith="~")
    return found


def is_match(value: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    """Return whether each field meets its condition. A missing field counts as null."""
    return all(_meets(value.get(name), condition) for name, condition in conditions.items())


def _is_operators(condition: Any) -> bool:
    return isinstance(condition, dict) and any(name.startswith("$") for name in condition)


def _check_operators(condition: Any) -> None:
    if isinstance(condition, list):
        for inner in condition:
            _check_operators(inner)
    elif _is_operators(condition):
        for name in condition.keys() - _OPERATORS:
            known = ", ".join(sorted(_OPERATORS))
            raise InvalidQuery(f"filter has an unknown operator; use one of {known}.", path=f"filter/{name}")
    elif isinstance(condition, dict):
        for inner in condition.values():
            _check_operators(inner)


def _meets(value: Any, condition: Any) -> bool:
    if _is_operators(condition):
        return all(_compares(value, name, operand) for name, operand in condition.items())
    if isinstance(condition, dict):
        return isinstance(value, dict) and is_match(value, condition)
    if isinstance(condition, list):
        return isinstance(value, list) and len(value) == len(condition) and all(map(_meets, value, condition))
    return _is_equal(value, condition)


def _compares(value: Any, name: str, operand: Any) -> bool:
    if name == _EQUAL:
        return _is_equal(value, operand)
    if name == "$ne":
        return not _is_equal(value, operand)
    are_texts = isinstance(value, str) and isinstance(operand, str)
    return (are_texts or (_is_number(value) and _is_number(operand))) and _ORDERS[name](value, operand)


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def _is_equal(value: Any, other: Any) -> bool:
    """Compare JSON values: ``1`` equals ``1.0``, but not ``true`` as in Python."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_equal(value[name], other[name]) for name in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    return bool(value == other)


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
            name = f"{shown_id(self.key)} of the namespace {shown_id(self.namespace)}"
            _logger.error("A search leaves out the LangGraph memory %s, which cannot be read.", name)
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
