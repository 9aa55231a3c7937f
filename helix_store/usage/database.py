"""The usage ledger in the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.db.models import Count, QuerySet

from helix_store.core import validation
from helix_store.core.types import UsageKind
from helix_store.core.usage import (
    UsageBucket,
    UsageEntry,
    UsageGrouping,
    UsageRollup,
    UsageSource,
    UsageTimeBucket,
    cost_from_units,
    cost_units,
)
from helix_store.counters.counting import change_counters, delete_usage
from helix_store.counters.rules import Spender, spent_on
from helix_store.engine.database import Call, Database, DatabaseOperations, reads, writes
from helix_store.engine.expressions import (
    ExactSum,
    StartInUTC,
    after_keyset,
    list_parameter,
    rows_parameter,
    summed,
    tenant_parameter,
)
from helix_store.engine.statement import Statement
from helix_store.models import UsageEntry as UsageRow
from helix_store.sessions.database.locking import missing_session
from helix_store.sessions.database.rows import first_row, session_with_id
from helix_store.sessions.database.trees import tree_keys
from helix_store.usage import sql
from helix_store.usage.entries import plain_amount
from helix_store.usage.rules import (
    TOKEN_FIELDS,
    KindFilter,
    StepFilter,
    UsageQuery,
    UsageSum,
    rollup,
    time_series,
    token_counts,
)

_TOKEN_SUMS: Final = {name: ExactSum(f"{name}_tokens") for name in TOKEN_FIELDS}
_GROUP_COLUMNS: Final = {
    UsageGrouping.MODEL: "model",
    UsageGrouping.AGENT_TYPE: "session_agent_type",
    UsageGrouping.USER_ID: "user_id",
    UsageGrouping.KIND: "kind",
}
_FIELDS: Final = {
    "entry_id": "id",
    "recorded_for": "session_id",
    "step_count": "step_count",
    "run_id": "run_id",
    "model": "model",
    "tool_name": "tool_name",
    "agent_type": "agent_type",
    "sub_session_id": "sub_session_id",
    "success": "success",
    "duration_ms": "duration_ms",
    "custom_type": "type",
    "custom_name": "name",
    "custom_unit": "unit",
}
"""The columns that store a field of an entry, and the name of that field."""

_ENTRY_COLUMNS: Final = tuple(
    field.attname
    for field in UsageRow._meta.concrete_fields
    if field.attname not in ("tenant", "session_id", "session_agent_type", "user_id", "tree_id")
)


class DatabaseUsage(DatabaseOperations):
    """The database back end. Arguments have already been checked, and entries have ids and costs.

    The entries of a session id belong to the existing session, or are the kept entries of a deleted one.
    """

    def __init__(self, db: Database) -> None:
        super().__init__(db)
        self._counts = False  # True once the tenant has been found to have budgets

    def record(self, entries: Sequence[UsageEntry]) -> None:
        """Record all entries or none; entries with a known id are skipped. Raises `SessionNotFound`."""
        if len(entries) != 1:
            self._record_all(entries)
            return
        (entry,) = entries
        columns = _columns_of(entry)
        parameters = {"tenant": self.db.tenant, **columns}

        def record(call: Call) -> None:
            statement = sql.insert_entry(tuple(columns), counts=self._counts)
            if not call.write(statement, parameters):
                self._record_all(entries)

        # An entry with a known id is not recorded twice.
        self.db.committed_once(record, record, operation_id=lambda: entry.id)

    @writes
    def _record_all(self, entries: Sequence[UsageEntry]) -> None:
        kept = self._kept_sessions(entries)
        counted: set[str] = set()
        for start in range(0, len(entries), sql.ROWS_PER_STATEMENT):
            batch = entries[start : start + sql.ROWS_PER_STATEMENT]
            rows = [kept[entry.session_id][1] | _columns_of(entry) for entry in batch]
            inserted = self.db.execute(
                sql.insert_entries(len(rows)), rows_parameter(self.db, sql.COLUMNS, rows)
            )
            counted.update(entry_id for entry_id, has_budgets in inserted if has_budgets)
        if counted:
            self._counts = True
            change_counters(
                self.db,
                (spent_on(entry, kept[entry.session_id][0]) for entry in entries if entry.id in counted),
            )

    def _kept_sessions(self, entries: Sequence[UsageEntry]) -> dict[str, tuple[Spender, dict[str, Any]]]:
        """Return the spender of each session, and the columns that entries copy from it, by session id.

        The sessions cannot be deleted until the commit. Raises `SessionNotFound`.
        """
        names = list(dict.fromkeys(entry.session_id for entry in entries))
        rows = self.db.execute(
            sql.KEEP_SESSIONS, {"tenant": self.db.tenant, "session_ids": list_parameter(self.db, names)}
        )
        found = {}
        for name, root_id, *columns in rows:
            copied = dict(zip(sql.SESSION_COLUMNS, columns, strict=True))
            found[name] = Spender(root_id, copied["user_id"], copied["session_agent_type"]), copied
        for name in names:
            if name not in found:
                raise missing_session(self.db, name)
        return found

    @reads
    def select(
        self, session_id: str, kinds: KindFilter, steps: StepFilter, *, limit: int | None, offset: int
    ) -> list[UsageEntry]:
        """Return the entries of a session, ordered by timestamp and then by the order of recording."""
        first, last = steps
        rows = _narrowed(
            self._of_session(session_id), kind__in=kinds, step_count__gte=first, step_count__lte=last
        )
        end = None if limit is None else offset + limit
        return [_entry(row) for row in rows.order_by("timestamp", "pk").values(*_ENTRY_COLUMNS)[offset:end]]

    @reads
    def rollup(self, session_id: str, *, include_sub_agents: bool) -> UsageRollup | None:
        if include_sub_agents:
            keys = tree_keys(self.db, session_id)
            if keys:
                sums = self._sums(sql.SUMS_OF_SESSIONS, keys=list_parameter(self.db, keys))
                return rollup(sums, session_count=len(keys))
        by_id = {"tenant": self.db.tenant, "session_id": session_id}
        sums = self._sums(sql.SUMS_OF_SESSION, **by_id)
        if sums or self._key(session_id) is not None:
            return rollup(sums, session_count=1)
        kept = self._sums(sql.SUMS_OF_KEPT, **by_id)
        return rollup(kept, session_count=1) if kept else None

    def _sums(self, statement: Statement, **parameters: Any) -> list[UsageSum]:
        return [_sum(row) for row in self.db.read(statement, parameters)]

    @reads
    def query(self, query: UsageQuery) -> tuple[list[tuple[UsageEntry, int]], int | None, bool]:
        """Return the page, the total if ``query.count``, and whether more entries follow. Each entry has its
        recording number, which orders entries with the same timestamp.
        """
        matching = _filtered(self._of_tenant, query)
        total = matching.count() if query.count else None
        prefix = "-" if query.descending else ""
        page = matching.order_by(f"{prefix}timestamp", f"{prefix}pk")
        if query.after is not None:
            timestamp, ordinal = query.after
            last = {"timestamp": timestamp, "id": ordinal}
            page = page.filter(after_keyset(UsageRow, last, descending=query.descending))
        rows = list(page.values(*_ENTRY_COLUMNS)[query.offset : query.offset + query.limit + 1])
        placed = [(_entry(row), row["id"]) for row in rows[: query.limit]]
        return placed, total, len(rows) > query.limit

    @reads
    def time_series(
        self, query: UsageQuery, bucket: UsageTimeBucket, group_by: UsageGrouping
    ) -> list[UsageBucket]:
        groups = (
            _filtered(self._of_tenant, query)
            .annotate(start=StartInUTC("timestamp", bucket.value))
            .values_list("start", _GROUP_COLUMNS[group_by])
            .annotate(entries=Count("pk"), cost=ExactSum("cost_usd"), **_TOKEN_SUMS)
            .order_by()
        )
        return time_series(
            UsageBucket(
                start=start,
                group=group,
                tokens=token_counts(tokens),
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
        """Delete all entries with this session id, including kept ones, and return their number."""
        count = delete_usage(self.db, self._kept(session_id))
        key = self._key(session_id)
        if key is not None:
            count += delete_usage(self.db, self._rows.filter(session_id=key))
        return count

    @property
    def _rows(self) -> QuerySet[UsageRow]:
        return UsageRow.objects.using(self.db.alias)

    @property
    def _of_tenant(self) -> QuerySet[UsageRow]:
        return self._rows.filter(tenant=tenant_parameter(self.db.tenant))

    def _of_session(self, session_id: str) -> QuerySet[UsageRow]:
        key = self._key(session_id)
        return self._kept(session_id) if key is None else self._rows.filter(session_id=key)

    def _kept(self, session_id: str) -> QuerySet[UsageRow]:
        """Return the kept entries of deleted sessions with this id."""
        return self._of_tenant.filter(recorded_for=session_id, session__isnull=True)

    def _key(self, session_id: str) -> int | None:
        """Return the key of a session, or ``None`` for an unknown session."""
        return first_row(session_with_id(self.db, session_id).values_list("pk", flat=True))


def _filtered(rows: QuerySet[UsageRow], query: UsageQuery) -> QuerySet[UsageRow]:
    return _narrowed(
        rows,
        session_agent_type=query.agent_type,
        user_id=query.user_id,
        model=query.model,
        timestamp__gte=query.date_from,
        timestamp__lt=query.date_to,
        kind__in=query.kinds,
    )


def _narrowed(rows: QuerySet[UsageRow], **given: Any) -> QuerySet[UsageRow]:
    """Return the rows that meet these conditions; ``None`` means no condition."""
    return rows.filter(**{name: value for name, value in given.items() if value is not None})


def _sum(row: tuple[Any, ...]) -> UsageSum:
    kind, name, custom_name, entries, successes, amount, *sums = row
    duration, cost, *tokens = map(summed, sums)
    return UsageSum(
        kind=UsageKind(kind),
        name=name,
        custom_name=custom_name,
        entry_count=entries,
        successes=successes,
        tokens=token_counts(tokens),
        duration_ms=duration,
        amount=amount or 0,
        cost=cost,
    )


def _columns_of(entry: UsageEntry) -> dict[str, Any]:
    """Return the columns of an entry, without nulls or `SESSION_COLUMNS`; the reverse of `_entry`."""
    columns = {column: getattr(entry, field) for column, field in _FIELDS.items()}
    columns |= {
        "kind": entry.kind.value,
        "timestamp": validation.milliseconds_to_datetime(entry.timestamp),
        "source_type": entry.source.type,
        "source_name": entry.source.name,
        "amount": None if entry.amount is None else float(entry.amount),
        "cost_usd": None if entry.cost_usd is None else cost_units(entry.cost_usd),
    }
    if entry.tokens is not None:
        columns |= {f"{name}_tokens": getattr(entry.tokens, name) for name in TOKEN_FIELDS}
    return {name: value for name, value in columns.items() if value is not None}


def _entry(row: Mapping[str, Any]) -> UsageEntry:
    kind = UsageKind(row["kind"])
    tokens = token_counts(row[f"{name}_tokens"] or 0 for name in TOKEN_FIELDS)
    return UsageEntry(
        **{field: row[column] for column, field in _FIELDS.items()},
        kind=kind,
        timestamp=validation.datetime_to_milliseconds(row["timestamp"]),
        source=UsageSource(type=row["source_type"], name=row["source_name"]),
        amount=None if row["amount"] is None else plain_amount(row["amount"]),
        cost_usd=row["cost_usd"],
        tokens=tokens if kind is UsageKind.TOKENS else None,
    )
