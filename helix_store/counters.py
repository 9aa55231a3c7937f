"""The counters of budgets, which change together with the ledger.

The SQL of counters.

A writer of the ledger looks for budgets in the same statement, or in a later one. A call that creates
a budget waits for writers that may not have seen it (see `budgets`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db.models import QuerySet
from django.db.models.sql import DeleteQuery

from helix_store.core import validation
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.usage import BudgetPeriod, BudgetScope, UsageEntry, cost_units
from helix_store.engine.database import Database
from helix_store.engine.expressions import SEES_COMMITS, exact_sum, require_current_reads, summed
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import UnsupportedIsolation
from helix_store.models import Budget, BudgetCounter, Session
from helix_store.models import UsageEntry as UsageRow

_LENGTHS: Final = {BudgetPeriod.TOTAL: 0, BudgetPeriod.MONTH: 7, BudgetPeriod.DAY: 10}


class Spender(NamedTuple):
    """The values that determine the budgets of a session: its tree, its user and its agent type."""

    root_id: str | None
    user_id: str | None
    agent_type: str | None


class Spent(NamedTuple):
    """The usage of a spender on a day, written ``2026-11-20``. Dollars are whole units (see `cost_units`)."""

    spender: Spender
    day: str
    usd: int
    tokens: int


class Key(NamedTuple):
    """The scope and the value of budgets that apply, and the value of the counter to use."""

    scope: BudgetScope
    value: str
    counted: str


def keys_of(spender: Spender) -> list[Key]:
    """Return the keys of every budget that may cap a session."""
    keys = [Key(BudgetScope.TENANT, "", "")]
    if spender.root_id:
        keys.append(Key(BudgetScope.TREE, spender.root_id, spender.root_id))
    for scope, value in ((BudgetScope.USER, spender.user_id), (BudgetScope.AGENT_TYPE, spender.agent_type)):
        if value is not None:
            keys += [Key(scope, value, value), Key(scope, "", value)]
    return keys


def spent_on(entry: UsageEntry, spender: Spender) -> Spent:
    """Return the usage of one entry."""
    return Spent(
        spender,
        period_of(BudgetPeriod.DAY, validation.milliseconds_to_datetime(entry.timestamp)),
        0 if entry.cost_usd is None else cost_units(entry.cost_usd),
        0 if entry.tokens is None else entry.tokens.total,
    )


def amounts_by_key(spent: Iterable[Spent]) -> list[list[str | int]]:
    """Return the sums for each key and day as (scope, value, counted value, day, dollars, tokens)."""
    sums: dict[tuple[Key, str], tuple[int, int]] = {}
    for each in spent:
        for key in keys_of(each.spender):
            usd, tokens = sums.get((key, each.day), (0, 0))
            sums[key, each.day] = usd + each.usd, tokens + each.tokens
    return [
        [key.scope.value, key.value, key.counted, day, bounded(usd), bounded(tokens)]
        for (key, day), (usd, tokens) in sums.items()
        if usd or tokens
    ]


def bounded(amount: int) -> int:
    """Return the amount, limited to what a column can hold."""
    return max(-MAX_BIGINT, min(MAX_BIGINT, amount))


def period_of(period: BudgetPeriod, at: datetime) -> str:
    """Return the period of a moment in the form that counters use: a day, a month, or empty for a total."""
    return at.astimezone(UTC).date().isoformat()[: _LENGTHS[period]]


def is_period(text: str) -> bool:
    """Return whether a counter's period is a day, a month or empty, as `period_of` writes it."""
    if not text:
        return True
    try:
        day = date.fromisoformat(text if len(text) == _LENGTHS[BudgetPeriod.DAY] else f"{text}-01")
    except ValueError:
        return False
    return text in (day.isoformat()[:length] for length in _LENGTHS.values())


def start_of(period: BudgetPeriod, at: datetime) -> tuple[datetime, datetime] | None:
    """Return the start and the end of the period that contains a moment, or ``None`` for a total."""
    if period is BudgetPeriod.TOTAL:
        return None
    start = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period is BudgetPeriod.DAY:
        return start, start + timedelta(days=1)
    start = start.replace(day=1)
    return start, (start + timedelta(days=31)).replace(day=1)


_BUDGET: Final = table(Budget)
_COUNTER: Final = table(BudgetCounter)
_DAY: Final = ("to_char({0} AT TIME ZONE 'UTC', 'YYYY-MM-DD')", "substr({0}, 1, 10)")
# Citus refuses clock_timestamp() in a query on a table.
_TODAY: Final = _DAY[0].format("pg_catalog.statement_timestamp()")


def has_budgets(tenant: str) -> str:
    """Return the condition that a tenant, given as an SQL expression, has budgets."""
    return f"EXISTS (SELECT 1 FROM {_BUDGET} AS b WHERE b.tenant = {tenant})"


def scopes_of(session: str) -> tuple[str, ...]:
    """Return the conditions of which a budget ``b`` of a session's tenant fulfils one if it applies to it."""
    root_id = f"COALESCE({session}.root_session_id, {session}.session_id)"
    return (
        "b.scope = 'tenant'",
        f"b.scope = 'tree' AND b.value = {root_id}",
        f"b.scope = 'user' AND b.value = {session}.user_id",
        f"b.scope = 'user' AND b.value = '' AND {session}.user_id IS NOT NULL",
        f"b.scope = 'agent_type' AND b.value IN ({session}.agent_type, '')",
    )


def applies_to(session: str) -> str:
    """Return the condition that a budget of its tenant applies to a session."""
    # Each part uses the index, also if the tenant has thousands of budgets.
    found = (
        f"EXISTS (SELECT 1 FROM {_BUDGET} AS b WHERE b.tenant = {session}.tenant AND {scope})"
        for scope in scopes_of(session)
    )
    return f"({' OR '.join(found)})"


def _keys(row: str, root_id: str, agent_type: str) -> str:
    """Return the keys of `rules.keys_of` as rows. Rows whose ``counted`` is NULL do not apply."""
    user_id, agent_type = f"{row}.user_id", f"{row}.{agent_type}"
    return f"""
                    SELECT 'tenant' AS scope, '' AS value, '' AS counted
                    UNION ALL VALUES ('tree', {root_id}, {root_id}),
                        ('user', {user_id}, {user_id}), ('user', '', {user_id}),
                        ('agent_type', {agent_type}, {agent_type}), ('agent_type', '', {agent_type})"""


def may_be_stopped(session: str) -> str:
    """Return the condition that a limit of a session's budgets has been reached, or that an amount is held;
    otherwise, no budget can stop a step without an estimate. For PostgreSQL.
    """
    root_id = f"COALESCE({session}.root_session_id, {session}.session_id)"
    # Without OFFSET, PostgreSQL may read all budgets and counters of the tenant.
    return f"""EXISTS (
                SELECT 1 FROM ({_keys(session, root_id, "agent_type")}) AS k
                CROSS JOIN LATERAL (
                    SELECT * FROM {_BUDGET} AS b
                    WHERE b.tenant = {session}.tenant AND b.scope = k.scope AND b.value = k.value OFFSET 0
                ) AS b LEFT JOIN LATERAL (
                    SELECT * FROM {_COUNTER} AS c WHERE c.tenant = b.tenant AND c.name = b.name
                        AND c.value = k.counted AND c.period = {period(_TODAY)} OFFSET 0
                ) AS c ON true
                WHERE k.counted IS NOT NULL AND (
                    COALESCE(c.spent_usd, 0) >= b.limit_usd OR COALESCE(c.spent_tokens, 0) >= b.limit_tokens
                    OR {_is_held("b", "k.counted")}))"""


def _is_held(budget: str, value: str) -> str:
    """Return the condition that sessions hold amounts of a budget. Its holds belong to no period."""
    return f"""EXISTS (
                        SELECT 1 FROM {_COUNTER} AS h WHERE h.tenant = {budget}.tenant
                            AND h.name = {budget}.name AND h.value = {value} AND h.period = ''
                            AND h.holds <> '{{}}' OFFSET 0)"""


# The counter ``c`` as it has just been changed. Whether an amount is held is what was stored before.
_MAY_STOP: Final = f"""EXISTS (
            SELECT 1 FROM {_BUDGET} AS b WHERE b.tenant = c.tenant AND b.name = c.name AND (
                c.spent_usd >= b.limit_usd OR c.spent_tokens >= b.limit_tokens
                OR {_is_held("b", "c.value")}))"""


def period(day: str) -> str:
    """Return the period of a day of the budget ``b``, as counters name it. The day is an SQL expression."""
    return f"CASE b.period WHEN 'day' THEN {day} WHEN 'month' THEN substr({day}, 1, 7) ELSE '' END"


_PERIOD: Final = period("k.day")


IN_ORDER: Final = "period, name, value"
"""The order in which a transaction locks counters. Those without a period come first: they have the holds."""


_APPLIES: Final = "b.tenant = %(tenant)s AND b.scope = k.scope AND b.value = k.value"
_BUDGETS_SQLITE: Final = f"{_BUDGET} AS b WHERE {_APPLIES}"
# One by one, by their index: PostgreSQL expects a hundred entries, and would read all budgets of the tenant.
_BUDGETS_POSTGRESQL: Final = (
    f"LATERAL (SELECT * FROM {_BUDGET} AS b WHERE {_APPLIES} OFFSET 0) AS b WHERE true"
)


def _change(
    given: str, budgets: str, amounts: str, group: str, new: str, *, locks_holds: bool = False
) -> str:
    budgets = f"({given}) AS k CROSS JOIN {budgets}"
    first = is_locked = ""
    if locks_holds:
        first = f"""
        WITH held AS MATERIALIZED (
            SELECT 1 FROM (SELECT DISTINCT b.tenant, b.name, k.counted FROM {budgets}) AS b
            JOIN {_COUNTER} AS h ON h.tenant = b.tenant AND h.name = b.name AND h.value = b.counted
                AND h.period = ''
            ORDER BY h.name, h.value FOR NO KEY UPDATE OF h)"""
        is_locked = "AND (SELECT count(*) FROM held) >= 0"
    return f"""{first}
        INSERT INTO {_COUNTER} AS c (tenant, name, value, period, spent_usd, spent_tokens, holds)
        SELECT b.tenant, b.name, k.counted, {_PERIOD}, {amounts}, '{{}}'
        FROM {budgets}
            AND {_PERIOD} >= b.counted_from {is_locked}
        {group} ORDER BY 4, 2, 3
        ON CONFLICT (tenant, name, value, period) DO UPDATE
        SET spent_usd = {new.format("spent_usd")}, spent_tokens = {new.format("spent_tokens")}"""


_GIVEN: Final = ("scope", "value", "counted", "day", "usd", "tokens")
_GIVEN_POSTGRESQL: Final = ", ".join(
    f"(e.value ->> {number}){'::numeric' if number > 3 else ''} AS {name}"
    for number, name in enumerate(_GIVEN)
)
_GIVEN_SQLITE: Final = ", ".join(
    f"json_extract(e.value, '$[{number}]') AS {name}" for number, name in enumerate(_GIVEN)
)
_MOST: Final = str(MAX_BIGINT)
_RETURNED: Final = """
        RETURNING"""
_SUM: Final = f"GREATEST(0, LEAST({_MOST}, c.{{0}}::numeric + excluded.{{0}}))"


def _change_given(*, locks_holds: bool) -> Statement:
    def postgresql(*, locks_holds: bool) -> str:
        return _change(
            f"SELECT {_GIVEN_POSTGRESQL} FROM jsonb_array_elements(%(given)s::jsonb) AS e",
            _BUDGETS_POSTGRESQL,
            f"LEAST({_MOST}, sum(k.usd)), LEAST({_MOST}, sum(k.tokens))",
            "GROUP BY b.tenant, b.name, k.counted, 4",
            _SUM,
            locks_holds=locks_holds,
        )

    return Statement(
        postgresql=f"{postgresql(locks_holds=locks_holds)}{_RETURNED} {_MAY_STOP}",
        # Citus supports neither a lock in an INSERT nor a query in the RETURNING of an INSERT ... SELECT.
        citus=(f"{postgresql(locks_holds=False)}{_RETURNED} true",),
        # SQLite may update a counter several times in one statement, and a sum of its own could exceed 64
        # bits.
        sqlite=_change(
            f"SELECT {_GIVEN_SQLITE} FROM json_each(%(given)s) AS e",
            _BUDGETS_SQLITE,
            "k.usd, k.tokens",
            "",
            f"max(0, min({_MOST}, c.{{0}} + excluded.{{0}}))",
        ),
    )


CHANGE_COUNTERS: Final = _change_given(locks_holds=False)
"""Add amounts, which may be negative, to the counters of all budgets to which they apply, in order.

On PostgreSQL, return for each counter whether its budget may now stop a step without an estimate.
"""

LOCK_HOLDS_AND_CHANGE: Final = _change_given(locks_holds=True)
"""The same for a transaction that goes on to change the holds: it first locks the counters that have them."""


def _root(entry: str) -> str:
    return f"""COALESCE(
                {entry}.tree_id,
                (SELECT s.root_session_id FROM {table(Session)} AS s WHERE s.id = {entry}.session_id),
                {entry}.recorded_for)"""


_ROOT: Final = _root("e")
_OF_SPENDER: Final = "e.user_id, e.session_agent_type, e.root_id"

_INSERTED: Final = f"""
            SELECT k.*, {_DAY[0].format("e.timestamp")} AS day,
                COALESCE(e.cost_usd, 0) AS usd, COALESCE(e.total_tokens, 0) AS tokens
            FROM (SELECT e.*, {_ROOT} AS root_id FROM inserted AS e) AS e
            CROSS JOIN LATERAL ({_keys("e", "e.root_id", "session_agent_type")}) AS k
            WHERE k.counted IS NOT NULL AND (e.cost_usd > 0 OR e.total_tokens > 0)"""


def count_inserted(*, locks_holds: bool) -> str:
    """Add the single entry that a query ``inserted`` has returned to counters, on PostgreSQL.

    Return for each counter whether its budget may now stop a step without an estimate. ``locks_holds`` is for
    a transaction that goes on to change the holds: it first locks the counters that have them.
    """
    change = _change(_INSERTED, _BUDGETS_POSTGRESQL, "k.usd, k.tokens", "", _SUM, locks_holds=locks_holds)
    return f"{change}{_RETURNED} {_MAY_STOP} AS may_stop"


@cache
def sums_of_entries(entries: str, *, is_postgresql: bool, is_counted: str = "true") -> str:
    """Return the sums of entries ``e`` by spender and day, for `Spent` and `summed`.

    The first column is the condition ``is_counted``, the second the number of entries.
    """
    vendor = 0 if is_postgresql else 1
    day = _DAY[vendor].format("e.timestamp")
    sums = [exact_sum(column)[vendor] for column in ("e.cost_usd", "e.total_tokens")]
    return f"""
        SELECT {is_counted}, count(*), {_OF_SPENDER}, {day}, {", ".join(sums)}
        FROM (SELECT e.*, {_ROOT} AS root_id FROM {entries} AS e) AS e
        GROUP BY e.tenant, {_OF_SPENDER}, {day}"""


def deletion(delete: str) -> Statement:
    """Delete entries of a tenant; return whether it has budgets, and the sums of the deleted entries. For
    PostgreSQL. The first is ``None`` if the transaction may not see all budgets. On Citus, which cannot query
    the rows that a statement deletes, each row is returned, and the caller must ask for the isolation level.
    """
    is_counted = f"CASE WHEN {SEES_COMMITS} THEN {{}} END"
    of_gone = has_budgets("(SELECT tenant FROM gone LIMIT 1)")
    entry = table(UsageRow)
    # to_char() and current_setting() are not immutable, so the day is a date.
    returned = f"""
            {has_budgets(f"{entry}.tenant")}, 1, {entry}.user_id,
            {entry}.session_agent_type, {_root(entry)},
            ({entry}.timestamp AT TIME ZONE 'UTC')::date, {entry}.cost_usd, {entry}.total_tokens"""
    return Statement(
        f"""
        WITH gone AS ({delete} RETURNING *)
        {sums_of_entries("gone", is_postgresql=True, is_counted=is_counted.format(of_gone))}""",
        citus=(f"{delete} RETURNING {returned}",),
    )


R = TypeVar("R")

_HAS_BUDGETS: Final = Statement(f"SELECT {has_budgets('%(tenant)s')}")


def change_counters(db: Database, spent: Iterable[Spent], *, locks_holds: bool = False) -> bool:
    """Add usage to the counters of all budgets to which it applies. Call this in a transaction, and with
    ``locks_holds`` if it goes on to change the holds.

    On PostgreSQL, return whether any of these budgets may now stop a step without an estimate.
    """
    given = amounts_by_key(spent)
    if not given:
        return False
    parameters = {"tenant": db.tenant, "given": json.dumps(given, ensure_ascii=False)}
    statement = LOCK_HOLDS_AND_CHANGE if locks_holds else CHANGE_COUNTERS
    return any(may_stop for (may_stop,) in db.execute(statement, parameters))


def _subtracted(spent: Iterable[Spent]) -> list[Spent]:
    return [each._replace(usd=-each.usd, tokens=-each.tokens) for each in spent]


def delete_usage(db: Database, entries: QuerySet[UsageRow]) -> int:
    """Delete entries of a tenant, subtract them from its counters, and return their number.

    Call this in a transaction. Raises `UnsupportedIsolation`.
    """
    if db.is_postgresql:
        try:
            text, parameters = entries.query.chain(DeleteQuery).get_compiler(using=db.alias).as_sql()
        except EmptyResultSet:
            return 0
        rows = db.execute(deletion(text), parameters)
        if any(is_counted is None for is_counted, *_ in rows):
            raise UnsupportedIsolation
        if rows and db.enter().features.is_citus:
            require_current_reads(db)
        spent = _spent_of(row for row in rows if row[0])
        deleted: int = sum(row[1] for row in rows)
    else:
        # Nobody else records entries in the meantime; such entries would be deleted without being counted.
        spent = _spent_by(db, entries) if db.execute(_HAS_BUDGETS, {"tenant": db.tenant})[0][0] else []
        deleted, _ = entries.delete()
    change_counters(db, _subtracted(spent))
    return deleted


def add_usage(db: Database, keys: Sequence[int]) -> None:
    """Count entries that were just inserted. Call this in the transaction that inserted them."""
    if db.execute(_HAS_BUDGETS, {"tenant": db.tenant})[0][0]:
        change_counters(db, _spent_by(db, UsageRow.objects.using(db.alias).filter(pk__in=keys)))


def change_usage(db: Database, keys: Sequence[int], change: Callable[[], R]) -> R:
    """Change entries of a tenant in a way that may move them to other scopes. Call this in a transaction."""
    entries = UsageRow.objects.using(db.alias).filter(pk__in=keys)
    if db.has_row_locks:
        list(entries.select_for_update().order_by("pk").values_list("pk"))
    before = _spent_by(db, entries)
    changed = change()
    change_counters(db, [*_subtracted(before), *_spent_by(db, entries)])
    return changed


def _spent_by(db: Database, entries: QuerySet[UsageRow]) -> list[Spent]:
    """Return the sums of entries by spender and day."""
    columns = [field.attname for field in UsageRow._meta.concrete_fields]
    try:
        text, parameters = entries.order_by().values(*columns).query.get_compiler(using=db.alias).as_sql()
    except EmptyResultSet:
        # Django knows that no row matches, and has no SQL for it.
        return []
    statement = Statement(sums_of_entries(f"({text})", is_postgresql=db.is_postgresql))
    return _spent_of(db.execute(statement, parameters))


def _spent_of(rows: Iterable[tuple[Any, ...]]) -> list[Spent]:
    return [
        Spent(Spender(root_id, user_id, agent_type), str(day), summed(usd), summed(tokens))
        for _, _, user_id, agent_type, root_id, day, usd, tokens in rows
    ]
