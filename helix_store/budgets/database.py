"""Budgets in the database.

The statement that writes the ledger also looks for budgets. Creating or deleting a budget therefore locks the
ledger's table for a moment: every writer has then either finished, or sees the budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from django.db.models import Q, QuerySet, Subquery

from helix_store.budgets import sql
from helix_store.budgets.rules import (
    NOTHING,
    Amounts,
    Definition,
    Hold,
    Standing,
    require_allowed,
    unknown_budget,
)
from helix_store.core import moments
from helix_store.core.budgets import Budget, BudgetPeriod, BudgetScope
from helix_store.core.guards import Guard
from helix_store.core.moments import as_utc
from helix_store.core.usage import cost_from_units, cost_units
from helix_store.counters.rules import Key, bounded, period_of
from helix_store.engine.database import Database, DatabaseOperations, Rows, reads, writes
from helix_store.engine.expressions import ExactSum, StartInUTC, list_parameter, tenant_parameter
from helix_store.exceptions import IntegrityFault
from helix_store.models import Budget as BudgetRow
from helix_store.models import BudgetCounter, Session, UsageEntry
from helix_store.sessions.database.locking import lock_session
from helix_store.sessions.database.rows import first_row

_LOCK_TIMEOUT: Final = "2s"
"""While a call waits for the ledger, other writers also wait. PostgreSQL cancels an autovacuum of the ledger
for this lock, but only after ``deadlock_timeout``, by default one second.
"""
_ATTEMPTS: Final = 3
_ROWS: Final = 1_000


class DatabaseBudgets(DatabaseOperations):
    """The database back end. Arguments have already been checked."""

    @writes
    def set(self, definition: Definition) -> Budget:
        row = first_row(self._rows.filter(name=definition.name))
        if row is not None and _is_counted_alike(row, definition):
            at = moments.now()
            self._rows.filter(pk=row.pk).update(updated_at=at, **_limits(definition))
            return definition.as_value(created_at=row.created_at, updated_at=at)
        _lock_ledger(self.db)
        row = first_row(self._rows.filter(name=definition.name))
        at = moments.now()
        created_at = at if row is None else row.created_at
        self._rows.filter(name=definition.name).delete()
        _counters_of(self.db, definition.name).delete()
        self._rows.create(
            tenant=self.db.tenant,
            name=definition.name,
            scope=definition.scope.value,
            value=definition.value,
            period=definition.period.value,
            counted_from=period_of(definition.period, self.db.now()),
            created_at=created_at,
            updated_at=at,
            **_limits(definition),
        )
        _count_locked(self.db, definition.name)
        return definition.as_value(created_at=created_at, updated_at=at)

    @reads
    def get(self, name: str) -> Budget | None:
        row = first_row(self._rows.filter(name=name))
        return None if row is None else _value_of(row)

    @reads
    def select(self) -> list[Budget]:
        return [_value_of(row) for row in self._rows.order_by("name")]

    @writes
    def delete(self, name: str) -> bool:
        if not self._rows.filter(name=name).exists():
            return False
        _lock_ledger(self.db)
        _counters_of(self.db, name).delete()
        return self._rows.filter(name=name).delete()[0] > 0

    def standing(self, name: str, value: str | None) -> Standing:
        """Return the budget and its counter now. Raises `NotFoundError` and `InvalidPayload`."""
        parameters = {"tenant": self.db.tenant, "name": name, "value": value or ""}
        for row in self.db.read(sql.STANDING_OF_NAME, parameters):
            standing, _, _ = standing_of(row)
            return standing._replace(value=standing.definition.counted(value))
        raise unknown_budget(name)

    def standings(self, keys: Sequence[Key]) -> list[Standing]:
        """Return the budgets with one of these keys."""
        rows = self.db.read(sql.STANDINGS_OF_KEYS, self._given(keys))
        return [standing_of(row)[0] for row in rows]

    def hold(
        self, keys: Sequence[Key], session_id: str, fencing_token: int, estimate: Amounts
    ) -> Hold | None:
        """Hold an estimate in every budget with one of these keys, in place of the session's earlier hold.

        Return ``None`` if the session then holds nothing. Raises `BudgetExceeded`, `FencedOutError` and
        `SessionNotFound`, in which case it holds nothing new.
        """
        given = self._given(keys, session_id)
        rows = self.db.read(sql.STANDINGS_OF_KEYS, given)
        if not any(f'"{row[_OWN]}"' in (row[_HOLDS] or "") for row in rows):
            if not any(estimate):
                for row in rows:
                    require_allowed(standing_of(row)[0], estimate)
                return None
            # In the caller's transaction, the session must be locked before the counters.
            hold = None if self.db.in_transaction else self._hold_as_read(rows, fencing_token, estimate)
            if hold is not None:
                return hold
        return self._hold_locked(given, session_id, fencing_token, estimate)

    @writes
    def _hold_locked(
        self, given: dict[str, Any], session_id: str, fencing_token: int, estimate: Amounts
    ) -> Hold | None:
        """Hold an estimate even if others are using the counters, or if it replaces an earlier hold."""
        lock_session(self.db, session_id, Guard(fencing_token=fencing_token))
        return self._hold_as_read(self._locked_rows(given), fencing_token, estimate)

    def _hold_as_read(self, rows: Rows, fencing_token: int, estimate: Amounts) -> Hold | None:
        """Hold an estimate, or return ``None`` if any of the counters has changed since it was read.

        That read also determined which holds are live. A statement that waits for a counter could not
        determine this: it sees the new counter, but the old locks. Raises `BudgetExceeded`.
        """
        changes = []
        for row in rows:
            own = row[_OWN]
            standing, counter, holds = standing_of(row, own=own)
            require_allowed(standing, estimate)
            # The new value omits the holds of workers that died.
            holds[str(own)] = [fencing_token, *estimate]
            changes.append([counter, *standing.spent, row[_STORED_HOLDS], json.dumps(holds)])
        # The session may have been deleted in the meantime.
        if not changes or own is None:
            return None
        if not self.db.write(sql.SET_HOLDS, {"changes": json.dumps(changes)}):
            return None
        return Hold(own, fencing_token, [counter for counter, *_ in changes])

    def _locked_rows(self, given: dict[str, Any]) -> Rows:
        """Lock the current counters of all budgets with the given keys, and return their rows."""
        rows: Rows = []
        for _ in range(_ATTEMPTS):
            locked = {key for (key,) in self.db.write(sql.LOCK_COUNTERS, given)}
            rows = self.db.read(sql.STANDINGS_OF_KEYS, given)
            if all(row[_COUNTER] in locked for row in rows):
                return rows
            # A counter does not exist before its first step, or before the first step of a period.
            self.db.write(sql.CREATE_COUNTERS, given)
        return [row for row in rows if row[_COUNTER] in locked]

    def settle(self, hold: Hold, record: Callable[[], object] | None) -> None:
        """Record usage, and release a hold in the same transaction."""
        parameters = {
            "key": str(hold.owner),
            "token": str(hold.fencing_token),
            "keys": list_parameter(self.db, hold.counters),
        }

        def write() -> None:
            # Recording locks the session and the ledger before the counters.
            if record is not None:
                record()
            self.db.write(sql.RELEASE_HOLDS, parameters)

        # This needs no separate savepoint in a commit.
        write() if self.db.in_transaction else self.db.transaction(write)

    def _given(self, keys: Sequence[Key], session_id: str = "") -> dict[str, Any]:
        given = json.dumps(keys, ensure_ascii=False)
        return {"tenant": self.db.tenant, "keys": given, "session_id": session_id}

    @property
    def _rows(self) -> QuerySet[BudgetRow]:
        return _rows_of(self.db)


_COUNTER: Final = 7
_HOLDS: Final = 10
_OWN: Final = 12
_STORED_HOLDS: Final = 13


def standing_of(
    row: tuple[Any, ...], *, own: int | None = None
) -> tuple[Standing, int, dict[str, list[int]]]:
    """Return a row's standing, the key of its counter, and the live holds of others."""
    counted, counter, usd, tokens, text, at = row[6:12]
    holds: dict[str, list[int]] = json.loads(text) if text else {}
    holds.pop(str(own), None)
    held = sum(map(_amounts_of, holds.values()), NOTHING)
    return Standing(_definition(*row[:6]), counted, Amounts(usd, tokens), held, as_utc(at)), counter, holds


def _amounts_of(hold: Any) -> Amounts:
    """Return the amounts of a hold. Raises `IntegrityFault`."""
    if len(hold) != 3 or any(type(each) is not int for each in hold):
        raise IntegrityFault("A stored hold of a budget cannot be read; other rows are not affected.")
    return Amounts(*hold[1:])


def _value_of(row: BudgetRow) -> Budget:
    return _definition_of(row).as_value(created_at=row.created_at, updated_at=row.updated_at)


def _definition_of(row: BudgetRow) -> Definition:
    limit_usd = None if row.limit_usd is None else cost_units(row.limit_usd)
    return _definition(row.name, row.scope, row.value, row.period, limit_usd, row.limit_tokens)


def _definition(
    name: str, scope: str, value: str, period: str, limit_usd: int | None, limit_tokens: int | None
) -> Definition:
    return Definition(name, BudgetScope(scope), value, BudgetPeriod(period), limit_usd, limit_tokens)


def _is_counted_alike(row: BudgetRow, definition: Definition) -> bool:
    return (row.scope, row.value, row.period) == (definition.scope, definition.value, definition.period)


def _limits(definition: Definition) -> dict[str, Any]:
    usd = definition.limit_usd
    return {
        "limit_usd": None if usd is None else cost_from_units(usd),
        "limit_tokens": definition.limit_tokens,
    }


def _rows_of(db: Database) -> QuerySet[BudgetRow]:
    return BudgetRow.objects.using(db.alias).filter(tenant=db.tenant)


# --- The sums of the ledger ---------------------------------------------------------------------------


def _lock_ledger(db: Database) -> None:
    """Wait for all current writers of the ledger. Later writers see what this transaction commits."""
    if not db.has_row_locks:
        return
    ((timeout,),) = db.execute(sql.LOCK_TIMEOUT, {})
    db.execute(sql.SET_LOCK_TIMEOUT, {"timeout": _LOCK_TIMEOUT})
    db.execute(sql.LOCK_LEDGER, {})
    db.execute(sql.SET_LOCK_TIMEOUT, {"timeout": timeout})


def count_again(db: Database, name: str) -> None:
    """Set the counters of a budget to the sums of the ledger. Holds stay. Call in a transaction."""
    _lock_ledger(db)
    _count_locked(db, name)


def _count_locked(db: Database, name: str) -> None:
    sums = sums_of(db, name)
    for row in _counters_of(db, name):
        usd, tokens = sums.pop((row.value, row.period), NOTHING)
        counted = {"spent_usd": cost_from_units(bounded(usd)), "spent_tokens": bounded(tokens)}
        if (row.spent_usd, row.spent_tokens) != tuple(counted.values()):
            _counters_of(db, name).filter(pk=row.pk).update(**counted)
    new = [
        BudgetCounter(
            tenant=db.tenant,
            name=name,
            value=value,
            period=period,
            spent_usd=cost_from_units(bounded(usd)),
            spent_tokens=bounded(tokens),
        )
        for (value, period), (usd, tokens) in sorted(sums.items())
        if usd or tokens
    ]
    BudgetCounter.objects.using(db.alias).bulk_create(new, batch_size=_ROWS)


def counters_of(db: Database, name: str) -> dict[tuple[str, str], Amounts]:
    """Return a budget's stored counters by value and period, without periods that no longer count."""
    counted_from = _rows_of(db).filter(name=name).values("counted_from")[:1]
    rows = _counters_of(db, name).filter(period__gte=Subquery(counted_from))
    return {(row.value, row.period): Amounts(cost_units(row.spent_usd), row.spent_tokens) for row in rows}


def _counters_of(db: Database, name: str) -> QuerySet[BudgetCounter]:
    return BudgetCounter.objects.using(db.alias).filter(tenant=db.tenant, name=name)


_SPENDER_COLUMNS: Final = {BudgetScope.USER: "user_id", BudgetScope.AGENT_TYPE: "session_agent_type"}


def sums_of(db: Database, name: str) -> dict[tuple[str, str], Amounts]:
    """Return the ledger's sums for a budget, by the value and the period of their counters."""
    row = _rows_of(db).get(name=name)
    definition = _definition_of(row)
    since = datetime.fromisoformat(f"{row.counted_from}-01"[:10]) if row.counted_from else None
    sums: dict[tuple[str, str], Amounts] = {}
    for entries in _entries_of(db, definition):
        if since is not None:
            entries = entries.filter(timestamp__gte=since.replace(tzinfo=UTC))
            entries = entries.annotate(start=StartInUTC("timestamp", definition.period.value))
        column = _SPENDER_COLUMNS[definition.scope] if definition.is_for_each else None
        groups = [*([column] if column else []), *(["start"] if since else [])]
        totals = {"usd": ExactSum("cost_usd"), "tokens": ExactSum("total_tokens")}
        found = (
            entries.values(*groups).annotate(**totals).order_by() if groups else [entries.aggregate(**totals)]
        )
        for each in found:
            counted = each[column] if column else definition.value
            period = period_of(definition.period, each["start"]) if since else ""
            place = (counted, period)
            sums[place] = sums.get(place, NOTHING) + Amounts(each["usd"], each["tokens"])
    return sums


def _entries_of(db: Database, definition: Definition) -> Iterator[QuerySet[UsageEntry]]:
    """Yield the usage entries in a budget's scope, in parts that each use an index."""
    entries = UsageEntry.objects.using(db.alias).filter(tenant=tenant_parameter(db.tenant))
    if definition.scope is not BudgetScope.TREE:
        column = _SPENDER_COLUMNS.get(definition.scope)
        if column is not None and definition.value:
            entries = entries.filter(**{column: definition.value})
        elif column is not None:
            entries = entries.filter(**{f"{column}__isnull": False})
        yield entries
        return
    root = definition.value
    is_root = Q(root_session_id=root) | Q(root_session_id__isnull=True, session_id=root)
    sessions = Session.objects.using(db.alias).filter(is_root, tenant=tenant_parameter(db.tenant))
    yield UsageEntry.objects.using(db.alias).filter(session_id__in=sessions.values("pk"))
    yield entries.filter(session__isnull=True, tree_id=root)
    # Entries from before the ledger stored the root of their tree.
    yield entries.filter(session__isnull=True, tree_id__isnull=True, recorded_for=root)
