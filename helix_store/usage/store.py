"""The usage stores: they check entries and queries, and price tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from helix_store import conf
from helix_store.core import validation
from helix_store.core.dicts import AnyUsageEntry
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.types import Timestamp, UsageKind, UserId
from helix_store.core.usage import (
    UsageBucket,
    UsageEntry,
    UsageGrouping,
    UsagePage,
    UsageRollup,
    UsageTimeBucket,
)
from helix_store.engine.async_twins import async_twin
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.engine.database import Database
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.sessions.memory.scope import TenantScope
from helix_store.usage.database import DatabaseUsage
from helix_store.usage.entries import checked_entry, priced
from helix_store.usage.memory import MemoryUsage, UsageLedger
from helix_store.usage.rules import KindFilter, StepFilter, UsageQuery

Kinds = UsageKind | str | Collection[UsageKind | str]


class UsageStoreBase:
    """The usage store of the contract; subclasses provide the back end."""

    def __init__(self, backend: DatabaseUsage | MemoryUsage, *, tenant: str) -> None:
        self._backend = backend
        self.tenant: Final = tenant

    # Recording

    def record_entry(self, entry: UsageEntry | AnyUsageEntry) -> str:
        """Record one entry and return its id.

        Tokens without a ``cost_usd`` are priced if the extra ``prices`` is installed and knows the model.
        Joins the caller's transaction. It waits for a deletion of the session, but not for its steps. Raises
        `InvalidPayload` and `SessionNotFound`, in which case nothing is stored. Safe to repeat with an
        ``id``: an entry with a known id is not recorded.
        """
        (entry_id,) = self._record([priced(checked_entry(entry))])
        return entry_id

    def record_entries(self, entries: Iterable[UsageEntry | AnyUsageEntry]) -> list[str]:
        """Record all entries or none, and return their ids in order; the rest is as for `record_entry`."""
        given = enumerate(validation.items(entries, "entries"))
        return self._record([priced(checked_entry(entry, path=f"entries/{index}")) for index, entry in given])

    def _record(self, entries: Sequence[UsageEntry]) -> list[str]:
        if entries:
            self._backend.record(entries)
        return [str(entry.id) for entry in entries]

    # A session's usage

    def get_entries(
        self,
        session_id: str,
        *,
        kinds: Kinds | None = None,
        step_range: tuple[int | None, int | None] | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[UsageEntry]:
        """Return a session's entries by timestamp and then by recording order; ``limit=None`` returns all.

        ``step_range`` is the first and the last step, both inclusive; each may be ``None``. For a deleted
        session the result is its kept entries; for an unknown session it is empty.
        """
        steps = _step_range(step_range)
        return self._backend.select(
            validation.identifier(session_id, "session_id"),
            _kinds(kinds),
            steps,
            limit=None if limit is None else validation.page_limit(limit, maximum=MAX_BIGINT),
            offset=validation.page_offset(offset),
        )

    def get_rollup(self, session_id: str, *, include_sub_agents: bool = False) -> UsageRollup | None:
        """Return the sums of a session, or of its whole tree, or ``None`` for an unknown session.

        The tree contains every session that can be reached by parent or by local sub-session ref. Each
        session counts once, even in a cycle. The database computes the sums.
        """
        return self._backend.rollup(
            validation.identifier(session_id, "session_id"), include_sub_agents=bool(include_sub_agents)
        )

    def exists(self, session_id: str) -> bool:
        """Return whether the session has entries."""
        return self._backend.exists(validation.identifier(session_id, "session_id"))

    def delete(self, session_id: str) -> int:
        """Delete all entries of a session id and return their number.

        This includes entries that were kept from a deleted session with the same id. One transaction; safe to
        repeat.
        """
        return self._backend.delete(validation.identifier(session_id, "session_id"))

    # Across sessions

    def query_usage(
        self,
        *,
        agent_type: str | None = None,
        kinds: Kinds | None = None,
        user_id: UserId | None = None,
        model: str | None = None,
        date_from: Timestamp | None = None,
        date_to: Timestamp | None = None,
        order: str = "desc",
        limit: int = 50,
        offset: int = 0,
        cursor: str | None = None,
        count: bool = True,
    ) -> UsagePage:
        """Return a page of the entries of all sessions, including kept entries, by timestamp.

        Filters are combined with AND. ``agent_type`` and ``user_id`` are those of the session at the time of
        recording. ``date_from`` is inclusive, ``date_to`` is exclusive. ``limit`` is 1 to 200; a larger one
        means 200. For the next page pass ``next_cursor`` as ``cursor`` with the same filters. Raises
        `InvalidCursor` for any other cursor, and `InvalidQuery` for an invalid query.
        """
        if order not in ("asc", "desc"):
            raise InvalidQuery("order must be asc or desc.", path="order")
        query = UsageQuery(
            agent_type=validation.optional_identifier(agent_type, "agent_type"),
            kinds=_kinds(kinds),
            user_id=validation.user_id(user_id),
            model=validation.optional_identifier(model, "model"),
            date_from=None if date_from is None else validation.aware_datetime(date_from, "date_from"),
            date_to=None if date_to is None else validation.aware_datetime(date_to, "date_to"),
            descending=order == "desc",
            limit=validation.page_limit(limit),
            offset=validation.page_offset(offset),
            count=bool(count),
        )
        return self._page(query, cursor)

    def timeseries(
        self,
        *,
        bucket: UsageTimeBucket | str = "day",
        group_by: UsageGrouping | str = "model",
        date_from: Timestamp,
        date_to: Timestamp,
        agent_type: str | None = None,
    ) -> list[UsageBucket]:
        """Return sums per ``hour``, ``day``, ``week`` or ``month`` in UTC, ordered by start, then by group.

        ``group_by`` is ``model``, ``agent_type``, ``user_id`` or ``kind``. Each entry from ``date_from``
        inclusive to ``date_to`` exclusive is in one bucket. Buckets without entries are left out. The
        database computes the sums.
        """
        chosen = validation.query_enum(UsageTimeBucket, bucket, "bucket")
        grouping = "user_id" if group_by == "user" else group_by
        return self._backend.time_series(
            UsageQuery(
                date_from=validation.aware_datetime(date_from, "date_from"),
                date_to=validation.aware_datetime(date_to, "date_to"),
                agent_type=validation.optional_identifier(agent_type, "agent_type"),
            ),
            chosen,
            validation.query_enum(UsageGrouping, grouping, "group_by"),
        )

    def _page(self, query: UsageQuery, cursor: str | None) -> UsagePage:
        binding = _cursor_binding(self.tenant, query)
        if cursor is not None:
            if query.offset:
                raise InvalidQuery("Pass a cursor or an offset, not both.", path="cursor")
            timestamp, ordinal = read_cursor(cursor, query=binding)
            query = replace(query, after=(validation.milliseconds_to_datetime(timestamp), ordinal))
        placed, total, has_more = self._backend.query(query)
        next_cursor = None
        if has_more:
            last, ordinal = placed[-1]
            next_cursor = write_cursor([last.timestamp, ordinal], query=binding)
        return UsagePage(
            entries=[entry for entry, _ in placed],
            total=total,
            offset=query.offset,
            limit=query.limit,
            has_more=has_more,
            next_cursor=next_cursor,
        )

    arecord_entry = async_twin(record_entry)
    arecord_entries = async_twin(record_entries)
    aget_entries = async_twin(get_entries)
    aget_rollup = async_twin(get_rollup)
    aexists = async_twin(exists)
    adelete = async_twin(delete)
    aquery_usage = async_twin(query_usage)
    atimeseries = async_twin(timeseries)


class DatabaseUsageStore(UsageStoreBase):
    """The usage ledger in a Django database: one row for each entry, summed by queries.

    Pass the ``using`` and ``tenant`` of the state store that has the sessions. Entries are deleted with their
    session unless ``keep_usage`` is set. There is no counter row, so recordings do not wait for each other.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), None)
        super().__init__(DatabaseUsage(db), tenant=db.tenant)


class InMemoryUsageStore(UsageStoreBase):
    """The usage ledger in one process; for tests and experiments.

    With the ``world`` of an `InMemoryStateStore`, it follows the contract of the database store: an entry for
    an unknown session is refused. Without a ``world`` it accepts entries of any session, finds sub-agents by
    the entries of kind ``subagent``, and reads the agent type from a source of type ``agent``.
    """

    def __init__(self, *, tenant: str = "", world: MemoryWorld | None = None) -> None:
        tenant = validation.tenant(tenant)
        self._scope = TenantScope(MemoryWorld() if world is None else world, tenant=tenant, limits=None)
        self._ledger = self._scope.table(UsageLedger)
        super().__init__(MemoryUsage(self._scope, knows_sessions=world is not None), tenant=tenant)

    def clear(self) -> None:
        """Delete every entry of the tenant. Safe to repeat."""
        with self._scope.lock:
            self._ledger.clear()

    def get_all_session_ids(self) -> list[str]:
        """Return the ids of the sessions with entries, in the order of their first entries."""
        with self._scope.lock:
            ledger = self._ledger
            return list(dict.fromkeys((*ledger.kept, *ledger.current)))

    @property
    def size(self) -> int:
        """The number of sessions with entries."""
        return len(self.get_all_session_ids())

    @property
    def total_entry_count(self) -> int:
        with self._scope.lock:
            return sum(1 for _ in self._ledger.all())


def _kinds(kinds: Kinds | None) -> KindFilter:
    if kinds is None:
        return None
    if isinstance(kinds, str):
        kinds = [kinds]
    if not isinstance(kinds, Collection) or isinstance(kinds, bytes | Mapping):
        raise InvalidQuery("kinds must be a kind of usage or a collection of kinds.", path="kinds")
    return sorted(
        {validation.query_enum(UsageKind, kind, "kinds") for kind in validation.items(kinds, "kinds")}
    )


def _step_range(steps: Any) -> StepFilter:
    if steps is None:
        return None, None
    try:
        first, last = (
            None if step is None else validation.whole_number(step, "step_range") for step in steps
        )
    except (TypeError, ValueError, InvalidPayload) as exc:
        message = "step_range must be the first and the last step, whole numbers from 0 or None."
        raise InvalidQuery(message, path="step_range") from exc
    return first, last


def _cursor_binding(tenant: str, query: UsageQuery) -> dict[str, Any]:
    binding = {"of": "usage", "tenant": tenant, **asdict(query)}
    for paging in ("limit", "offset", "after", "count"):
        del binding[paging]
    return binding
