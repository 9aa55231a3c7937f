"""The usage ledger in the database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from itertools import islice
from typing import Any, Final, TypeVar

from django.db.models import Count, QuerySet
from django.db.models.functions import Trunc

from helix_store import conf
from helix_store.core import validation
from helix_store.core.types import UsageKind
from helix_store.core.usage import (
    TokenCounts,
    UsageBucket,
    UsageEntry,
    UsageGrouping,
    UsageRollup,
    UsageSource,
    cost_from_units,
)
from helix_store.engine.database import (
    Database,
    DatabaseOperations,
    reads,
    writes,
)
from helix_store.engine.expressions import ExactSum, beyond, summed
from helix_store.exceptions import SessionNotFound
from helix_store.models import UsageEntry as UsageRow
from helix_store.sessions.database.rows import any_tenant, first_row, named
from helix_store.sessions.database.trees import tree_keys
from helix_store.usage.backend import (
    EntryFilter,
    PlacedEntry,
    TimeSeriesQuery,
    UsageQuery,
)
from helix_store.usage.entries import plain_amount
from helix_store.usage.rollups import (
    UsageSum,
    rollup,
    time_series,
)
from helix_store.usage.sql import (
    KEPT,
    OF_SESSION,
    ROWS_PER_STATEMENT,
    SESSION_COLUMNS,
    entry_columns,
    insert_many,
    insert_one,
    keep_sessions,
    of_sessions,
    sum_entries,
)
from helix_store.usage.store import UsageStoreBase

__all__ = ["DatabaseUsage", "DatabaseUsageStore"]

T = TypeVar("T")

_SESSIONS_PER_QUERY: Final = 10_000
"""SQLite takes no more than 32,766 parameters."""

_TOKENS: Final = ("prompt", "completion", "reasoning", "cached", "total")
_TOKEN_SUMS: Final = {name: ExactSum(f"{name}_tokens") for name in _TOKENS}
_GROUP_COLUMNS: Final = {
    UsageGrouping.MODEL: "model",
    UsageGrouping.AGENT_TYPE: "session_agent_type",
    UsageGrouping.USER_ID: "user_id",
    UsageGrouping.KIND: "kind",
}
_ENTRY_COLUMNS: Final = tuple(
    field.attname
    for field in UsageRow._meta.concrete_fields
    if field.attname not in ("tenant", "session_id", "session_agent_type", "user_id")
)


class DatabaseUsageStore(UsageStoreBase):
    """What sessions spend, in a Django database: one row for each entry, summed when it is asked for.

    ``using`` and ``tenant`` are those of the state store whose sessions spend. Entries go with their session,
    unless that is deleted with ``keep_usage``. No counter is kept: recording never waits for other recording.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), None)
        super().__init__(DatabaseUsage(db), tenant=db.tenant)


class DatabaseUsage(DatabaseOperations):
    def record(self, entries: Sequence[UsageEntry]) -> None:
        if len(entries) == 1 and self._record_one(entries[0]):
            return
        self._record_all(entries)

    def _record_one(self, entry: UsageEntry) -> bool:
        """In a single statement, which records nothing both for a known id and for an unknown session."""
        connection = self.db.connection
        statement = insert_one(connection, self.db.tenant, entry_columns(connection, entry))
        return bool(self.db.write(*statement))

    @writes
    def _record_all(self, entries: Sequence[UsageEntry]) -> None:
        connection = self.db.connection
        of_session = self._kept_sessions(entries)
        for batch in _batches(entries, ROWS_PER_STATEMENT):
            rows = [of_session[entry.session_id] | entry_columns(connection, entry) for entry in batch]
            self.db.execute(*insert_many(connection, rows))

    def _kept_sessions(self, entries: Sequence[UsageEntry]) -> Mapping[str, dict[str, Any]]:
        """What entries take over from their sessions, by id; they cannot be deleted until the commit."""
        connection = self.db.connection
        names = dict.fromkeys(entry.session_id for entry in entries)
        found: dict[str, dict[str, Any]] = {}
        for batch in _batches(names, _SESSIONS_PER_QUERY):
            rows = self.db.execute(*keep_sessions(connection, self.db.tenant, batch))
            found |= {name: dict(zip(SESSION_COLUMNS, columns, strict=True)) for name, *columns in rows}
        for name in names:
            if name not in found:
                raise SessionNotFound(name)
        return found

    @reads
    def select(
        self, session_id: str, chosen: EntryFilter, *, limit: int | None, offset: int
    ) -> list[UsageEntry]:
        rows = self._of_session(session_id)
        if chosen.kinds is not None:
            rows = rows.filter(kind__in=sorted(chosen.kinds))
        if chosen.first_step is not None:
            rows = rows.filter(step_count__gte=chosen.first_step)
        if chosen.last_step is not None:
            rows = rows.filter(step_count__lte=chosen.last_step)
        end = None if limit is None else offset + limit
        return [_entry(row) for row in rows.order_by("timestamp", "pk").values(*_ENTRY_COLUMNS)[offset:end]]

    @reads
    def rollup(self, session_id: str, *, include_sub_agents: bool) -> UsageRollup | None:
        if include_sub_agents:
            keys = tree_keys(self.db, session_id)
            if keys:
                sums = self._sums(*of_sessions(self.db.connection, keys))
                return rollup(sums, session_count=len(keys))
        named = {"tenant": self.db.tenant, "session_id": session_id}
        sums = self._sums(OF_SESSION, named)
        if sums or self._key(session_id):
            return rollup(sums, session_count=1)
        kept = self._sums(KEPT, named)
        return rollup(kept, session_count=1) if kept else None

    def _sums(self, condition: str, parameters: Mapping[str, Any]) -> list[UsageSum]:
        sql = sum_entries(self.db.connection, condition)
        return [_sum(row) for row in self.db.read(sql, parameters)]

    @reads
    def query(self, query: UsageQuery) -> tuple[list[PlacedEntry], int | None, bool]:
        matching = _filtered(self._of_tenant, query)
        total = matching.count() if query.count else None
        prefix = "-" if query.descending else ""
        page = matching.order_by(f"{prefix}timestamp", f"{prefix}pk")
        if query.after is not None:
            timestamp, place = query.after
            last = {"timestamp": timestamp, "id": place}
            page = page.filter(beyond(UsageRow, last, descending=query.descending))
        rows = list(page.values(*_ENTRY_COLUMNS)[query.offset : query.offset + query.limit + 1])
        placed = [PlacedEntry(_entry(row), row["id"]) for row in rows[: query.limit]]
        return placed, total, len(rows) > query.limit

    @reads
    def time_series(self, query: TimeSeriesQuery) -> list[UsageBucket]:
        wanted = UsageQuery(agent_type=query.agent_type, date_from=query.date_from, date_to=query.date_to)
        groups = (
            _filtered(self._of_tenant, wanted)
            .annotate(start=Trunc("timestamp", query.bucket.value, tzinfo=UTC))
            .values_list("start", _GROUP_COLUMNS[query.group_by])
            .annotate(entries=Count("pk"), cost=ExactSum("cost_usd"), **_TOKEN_SUMS)
            .order_by()
        )
        return time_series(
            UsageBucket(
                start=start,
                group=group,
                tokens=_token_counts(tokens),
                cost_usd=cost_from_units(cost),
                entry_count=entries,
            )
            for start, group, entries, cost, *tokens in groups
        )

    @reads
    def exists(self, session_id: str) -> bool:
        return self._of_session(session_id).exists()

    @writes
    def delete(self, session_id: str) -> int:
        count, _ = self._kept(session_id).delete()
        for key in self._key(session_id):
            count += self._rows.filter(session_id=key).delete()[0]
        return count

    @property
    def _rows(self) -> QuerySet[UsageRow]:
        return UsageRow.objects.using(self.db.alias)

    @property
    def _of_tenant(self) -> QuerySet[UsageRow]:
        return self._rows.filter(tenant=any_tenant(self.db.tenant))

    def _of_session(self, session_id: str) -> QuerySet[UsageRow]:
        for key in self._key(session_id):
            return self._rows.filter(session_id=key)
        return self._kept(session_id)

    def _kept(self, session_id: str) -> QuerySet[UsageRow]:
        """Entries that have outlived a session of this id."""
        return self._of_tenant.filter(recorded_for=session_id, session__isnull=True)

    def _key(self, session_id: str) -> list[int]:
        """The key of a session; empty for an unknown one."""
        key = first_row(named(self.db, session_id).values_list("pk", flat=True))
        return [] if key is None else [key]


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _filtered(rows: QuerySet[UsageRow], query: UsageQuery) -> QuerySet[UsageRow]:
    equal: dict[str, Any] = {
        "session_agent_type": query.agent_type,
        "user_id": query.user_id,
        "model": query.model,
        "timestamp__gte": query.date_from,
        "timestamp__lt": query.date_to,
        "kind__in": None if query.kinds is None else sorted(query.kinds),
    }
    return rows.filter(**{name: value for name, value in equal.items() if value is not None})


def _sum(row: tuple[Any, ...]) -> UsageSum:
    kind, name, custom_name, entries, successes, amount, *sums = row
    duration, cost, *tokens = map(summed, sums)
    return UsageSum(
        kind=UsageKind(kind),
        name=name,
        custom_name=custom_name,
        entry_count=entries,
        successes=successes,
        tokens=_token_counts(tokens),
        duration_ms=duration,
        amount=amount or 0,
        cost=cost,
    )


def _token_counts(counts: Iterable[int]) -> TokenCounts:
    return TokenCounts(**dict(zip(_TOKENS, counts, strict=True)))


def _entry(row: Mapping[str, Any]) -> UsageEntry:
    kind = UsageKind(row["kind"])
    return UsageEntry(
        kind=kind,
        session_id=row["recorded_for"],
        step_count=row["step_count"],
        timestamp=validation.datetime_to_milliseconds(row["timestamp"]),
        source=UsageSource(type=row["source_type"], name=row["source_name"]),
        run_id=row["run_id"],
        id=row["entry_id"],
        cost_usd=row["cost_usd"],
        model=row["model"],
        tokens=(
            _token_counts(row[f"{name}_tokens"] or 0 for name in _TOKENS)
            if kind is UsageKind.TOKENS
            else None
        ),
        tool_name=row["tool_name"],
        agent_type=row["agent_type"],
        sub_session_id=row["sub_session_id"],
        success=row["success"],
        duration_ms=row["duration_ms"],
        type=row["custom_type"],
        name=row["custom_name"],
        amount=None if row["amount"] is None else plain_amount(row["amount"]),
        unit=row["custom_unit"],
    )
