"""`DjangoStore`: the long-term memory of LangGraph in the tables of this app."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final

from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    Item,
    ListNamespacesOp,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    validate_op_namespace,
)

from helix_store.contrib.langgraph.memories import (
    Address,
    Memories,
    NewMemory,
    StoredMemory,
    checked_filter,
    delete_namespace,
    encoded_value,
    labels_of,
    matches,
    namespace_text,
    sweep,
)
from helix_store.contrib.langgraph.saver import AcceptsLifecycle, Nothing
from helix_store.contrib.langgraph.vectors.index import Embedded, Index
from helix_store.core import validation
from helix_store.core.limits import MAX_CALL_ITEMS, MAX_ID_BYTES
from helix_store.core.payloads import within_one_call
from helix_store.engine.async_twins import async_twin, in_thread_to_the_end
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidPayload, InvalidQuery

_logger = logging.getLogger(__name__)

_MOST_CONDITIONS: Final = 100
_TTL_KEYS: Final = frozenset({"refresh_on_read", "omit_expired", "default_ttl", "sweep_interval_minutes"})


class DjangoStore(AcceptsLifecycle, BaseStore):
    """Values by namespace and key, for all threads of a tenant: pass it to ``compile(store=…)``.

    ``ttl`` is LangGraph's ``TTLConfig``. The database's clock decides which values have expired, and
    `sweep_ttl` deletes them; the store starts no thread, so ``sweep_interval_minutes`` only logs a warning.

    ``index`` is the configuration of LangGraph's ``PostgresStore``. With it, a search with a ``query``
    returns the items with the nearest texts. It requires PostgreSQL and the app for vectors (see `Index`).
    Texts are embedded before the transaction. Without an index, ``query`` and the ``index`` of a put have no
    effect, as in LangGraph's stores; the first such search logs a warning.

    Each batch reads first and then writes, and its writes are one transaction. Safe for any number of
    threads. Calls raise the errors of `helix_store.exceptions`, and LangGraph's ``InvalidNamespaceError``.

    Example::

        memory = DjangoStore(ttl={"default_ttl": 60 * 24 * 30})
        memory.put(("users", "ada"), "diet", {"food": "vegetarian"})
        print([item.value for item in memory.search(("users",))])
    """

    supports_ttl = True

    def __init__(
        self,
        *,
        using: str | None = None,
        tenant: str = "",
        ttl: TTLConfig | None = None,
        index: IndexConfig | None = None,
    ) -> None:
        self.ttl_config = _checked_config(ttl)
        self.index_config = index
        self._db = Database(using, validation.tenant(tenant))
        self._index = None if index is None else Index(index, self._db)
        self._has_warned = False

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Run the operations and return their results in the same order.

        All operations are checked before the first statement. Reads see the store as it was before the batch;
        if several puts have the same address, the last one wins. A search leaves out an item that cannot be
        read and logs an error; without a filter, the item still counts towards ``limit`` and ``offset``. A
        get of such an item raises `IntegrityFault`.
        """
        plan = self._planned(ops)
        return self._run(plan, Embedded() if self._index is None else self._index.embed(*plan.to_embed))

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Async version of `batch`. A cancelled call raises after its writes have ended."""
        plan = self._planned(ops)
        embedded = Embedded() if self._index is None else await self._index.aembed(*plan.to_embed)
        return await in_thread_to_the_end(partial(self._run, plan, embedded))

    def sweep_ttl(self) -> int:
        """Delete the tenant's expired items and return their number. Each transaction deletes a thousand
        items.

        `expired_session_cleanup` and ``cleanup_expired_sessions`` also do this, for all tenants.
        """
        return sweep(self._db, self._db.query(self._db.now))

    def start_ttl_sweeper(self, sweep_interval_minutes: int | None = None) -> Nothing:
        """Log a warning, because the store starts no thread. Async code may await the result."""
        _warn_of_no_sweeper("start_ttl_sweeper")
        return Nothing()

    def stop_ttl_sweeper(self, timeout: float | None = None) -> Nothing:
        """Do nothing: no thread has been started. Async code may await the result."""
        return Nothing()

    def delete_namespace(self, prefix: Sequence[str]) -> int:
        """Delete all items of a namespace and of those under it, and return their number.

        Each transaction deletes a thousand items; safe to repeat. Items that are put during the call may
        remain. Raises `InvalidPayload` without labels, and ``InvalidNamespaceError`` for labels that no item
        can have.
        """
        if isinstance(prefix, str):
            raise InvalidPayload(path="prefix", reason="expected labels, got str")
        validate_op_namespace(GetOp(tuple(prefix), ""))
        return delete_namespace(self._db, _stored_namespace(prefix))

    asweep_ttl = async_twin(sweep_ttl)
    adelete_namespace = async_twin(delete_namespace)

    @property
    def _memories(self) -> Memories:
        return Memories(self._db, omit_expired=bool((self.ttl_config or {}).get("omit_expired")))

    def _planned(self, ops: Iterable[Op]) -> _Plan:
        return _planned(validation.items(ops, "ops"), self._db.limits.max_state_bytes, self._index)

    def _run(self, plan: _Plan, embedded: Embedded) -> list[Result]:
        if (
            self._index is None
            and not self._has_warned
            and any(each.query for each in plan.searches.values())
        ):
            self._has_warned = True
            _logger.warning("This store has no index: a search ignores its query and uses only its filter.")
        results: list[Result] = [None] * plan.size
        renewed: list[StoredMemory] = []
        if plan.gets or plan.searches or plan.lists:
            renewed = self._db.query(partial(self._read, plan, embedded, results))
        if renewed or plan.puts:
            self._db.transaction(partial(self._write, plan, embedded, renewed))
        return results

    def _read(self, plan: _Plan, embedded: Embedded, results: list[Result]) -> list[StoredMemory]:
        """Fill in the results, and return the items whose term restarts because they have been read."""
        memories, read = self._memories, []
        found = memories.at([address for address, _ in plan.gets.values()]) if plan.gets else {}
        for index, (address, is_renewing) in plan.gets.items():
            if memory := found.get(address):
                results[index] = Item(**_fields(memory, memory.value))
                read.append((memory, is_renewing))
        for index, search in plan.searches.items():
            page = self._found(search, embedded)
            results[index] = [
                SearchItem(**_fields(memory, value), score=score)
                for memory, score in page
                if (value := memory.readable_value) is not None
            ]
            read.extend((memory, search.refresh_ttl) for memory, _ in page)
        for index, listing in plan.lists.items():
            results[index] = memories.namespaces(**listing)
        return [memory for memory, is_renewing in read if is_renewing and memory.ttl_ms is not None]

    def _found(self, search: SearchOp, embedded: Embedded) -> Sequence[tuple[StoredMemory, float | None]]:
        memories, page = self._memories, {"limit": search.limit, "offset": search.offset}
        prefix, conditions = namespace_text(search.namespace_prefix), search.filter or {}
        if self._index is None or not search.query:
            return [(memory, None) for memory in memories.search(prefix, conditions, **page)]
        embedding = self._index, embedded.queries[search.query]
        return memories.nearest(embedding, prefix, conditions, **page)

    def _write(self, plan: _Plan, embedded: Embedded, renewed: list[StoredMemory]) -> None:
        memories = self._memories
        memories.renew(renewed)
        memories.delete([address for address, new in plan.puts.items() if new is None])
        memories.put(
            {address: new for address, new in plan.puts.items() if new is not None},
            vectors=None if self._index is None else embedded.texts,
        )


# --- Checked operations ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """Operations, keyed by their place in the batch. The value of a delete is ``None``."""

    size: int
    gets: dict[int, tuple[Address, bool]] = field(default_factory=dict)
    searches: dict[int, SearchOp] = field(default_factory=dict)
    lists: dict[int, dict[str, Any]] = field(default_factory=dict)
    puts: dict[Address, NewMemory | None] = field(default_factory=dict)

    @property
    def to_embed(self) -> tuple[list[str], list[str]]:
        """The texts to store and the queries to embed."""
        stored = [new for new in self.puts.values() if new is not None]
        return (
            [text for new in stored for text in new.embedded.values()],
            [search.query for search in self.searches.values() if search.query],
        )


def _planned(ops: list[Op], limit: int, embedding: Index | None) -> _Plan:
    plan = _Plan(len(ops))
    for index, op in enumerate(ops):
        validate_op_namespace(op)
        match op:
            case GetOp():
                plan.gets[index] = (_address(op), op.refresh_ttl)
            case PutOp():
                where = "value" if len(ops) == 1 else f"ops/{index}/value"
                plan.puts[_address(op)] = _new_memory(op, where, limit, embedding)
            case SearchOp():
                plan.searches[index] = _search(op)
            case ListNamespacesOp():
                plan.lists[index] = _listing(op)
            case _:
                raise InvalidPayload(path=f"ops/{index}", reason=f"{type(op).__name__} is not an operation")
    within_one_call((new.text for new in plan.puts.values() if new is not None), limit=limit)
    return plan


def _stored_namespace(labels: Sequence[str]) -> str:
    namespace = namespace_text(labels)
    if not namespace:
        raise InvalidPayload(path="namespace", reason="a namespace needs a label")
    return namespace


def _address(op: GetOp | PutOp) -> Address:
    return Address(_stored_namespace(op.namespace), validation.text(op.key, "key", limit=MAX_ID_BYTES))


def _new_memory(op: PutOp, where: str, limit: int, embedding: Index | None) -> NewMemory | None:
    if op.value is None:
        return None
    if not isinstance(op.value, Mapping):
        raise InvalidPayload(path=where, reason=f"expected a dict, got {type(op.value).__name__}")
    value, text = encoded_value(op.value, limit=limit, path=where)
    embedded = {} if embedding is None else embedding.texts_of(value, op.index)
    return NewMemory(text, None if op.ttl is None else _ttl_ms(op.ttl, "ttl"), embedded)


def _search(op: SearchOp) -> SearchOp:
    namespace_text(op.namespace_prefix, "namespace_prefix")
    limit, offset = _count(op.limit, "limit"), validation.page_offset(op.offset)
    return op._replace(filter=checked_filter(op.filter), limit=limit, offset=offset)


def _listing(op: ListNamespacesOp) -> dict[str, Any]:
    matching = matches("prefix", ())
    conditions = validation.items(op.match_conditions or (), "match_conditions")
    if len(conditions) > _MOST_CONDITIONS:
        raise InvalidQuery(f"At most {_MOST_CONDITIONS} match_conditions.", path="match_conditions")
    for condition in conditions:
        if condition.match_type not in ("prefix", "suffix"):
            raise InvalidQuery("match_type must be prefix or suffix.", path="match_conditions")
        matching &= matches(condition.match_type, condition.path)
    depth = op.max_depth
    return {
        "matching": matching,
        "depth": None if depth is None else validation.query_number(depth, "max_depth", minimum=1),
        "limit": _count(op.limit, "limit"),
        "offset": validation.page_offset(op.offset),
    }


def _count(value: Any, name: str) -> int:
    return validation.query_number(value, name, maximum=MAX_CALL_ITEMS)


def _ttl_ms(minutes: Any, name: str) -> int:
    """Return minutes as milliseconds. Raises `InvalidPayload` unless they are from 0 to a hundred years."""
    if isinstance(minutes, int | float) and not isinstance(minutes, bool) and math.isfinite(minutes):
        try:
            term = timedelta(minutes=minutes)
        except OverflowError:
            term = -timedelta.resolution
        if validation.is_age(term):
            return term // timedelta(milliseconds=1)
    raise InvalidPayload(path=name, reason="expected minutes from 0 to a hundred years")


def _checked_config(config: TTLConfig | None) -> TTLConfig | None:
    if config is None:
        return None
    for name in config.keys() - _TTL_KEYS:
        raise InvalidPayload(path=f"ttl/{name}", reason=f"expected one of {', '.join(sorted(_TTL_KEYS))}")
    if config.get("sweep_interval_minutes") is not None:
        _warn_of_no_sweeper("sweep_interval_minutes")
    if (minutes := config.get("default_ttl")) is not None:
        _ttl_ms(minutes, "ttl/default_ttl")
    return TTLConfig(**config)


def _warn_of_no_sweeper(name: str) -> None:
    _logger.warning(
        "DjangoStore starts no thread, so %s has no effect: the command cleanup_expired_sessions deletes "
        "expired values, and so does sweep_ttl().",
        name,
    )


def _fields(memory: StoredMemory, value: dict[str, Any]) -> dict[str, Any]:
    return {
        "namespace": labels_of(memory.namespace),
        "key": memory.key,
        "value": value,
        "created_at": memory.created_at,
        "updated_at": memory.updated_at,
    }
