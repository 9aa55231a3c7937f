"""The SQL of counters.

A writer of the ledger looks for budgets in the same statement, or in a later one. A call that creates
a budget waits for writers that may not have seen it (see `budgets.database`).
"""

from __future__ import annotations

from functools import cache
from typing import Final

from helix_store.core.limits import MAX_BIGINT
from helix_store.engine.expressions import exact_sum
from helix_store.engine.statement import Statement, table
from helix_store.models import Budget, BudgetCounter, Session, UsageEntry

_BUDGET: Final = table(Budget)
_COUNTER: Final = table(BudgetCounter)
_DAY: Final = ("to_char({0} AT TIME ZONE 'UTC', 'YYYY-MM-DD')", "substr({0}, 1, 10)")
# Citus refuses clock_timestamp() in a query on a table.
_TODAY: Final = _DAY[0].format("pg_catalog.statement_timestamp()")


def has_budgets(tenant: str) -> str:
    """Return the condition that a tenant, given as an SQL expression, has budgets."""
    return f"EXISTS (SELECT 1 FROM {_BUDGET} AS b WHERE b.tenant = {tenant})"


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
                    OR c.holds <> '{{}}'))"""


def period(day: str) -> str:
    """Return the period of a day of the budget ``b``, as counters name it. The day is an SQL expression."""
    return f"CASE b.period WHEN 'day' THEN {day} WHEN 'month' THEN substr({day}, 1, 7) ELSE '' END"


_PERIOD: Final = period("k.day")


def _change(given: str, amounts: str, group: str, new: str) -> str:
    return f"""
        INSERT INTO {_COUNTER} AS c (tenant, name, value, period, spent_usd, spent_tokens, holds)
        SELECT b.tenant, b.name, k.counted, {_PERIOD}, {amounts}, '{{}}'
        FROM ({given}) AS k CROSS JOIN {_BUDGET} AS b
        WHERE b.tenant = %(tenant)s AND b.scope = k.scope AND b.value = k.value
            AND {_PERIOD} >= b.counted_from
        {group} ORDER BY 2, 3, 4
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
_SUM: Final = f"GREATEST(0, LEAST({_MOST}, c.{{0}}::numeric + excluded.{{0}}))"

CHANGE_COUNTERS: Final = Statement(
    postgresql=_change(
        f"SELECT {_GIVEN_POSTGRESQL} FROM jsonb_array_elements(%(given)s::jsonb) AS e",
        f"LEAST({_MOST}, sum(k.usd)), LEAST({_MOST}, sum(k.tokens))",
        "GROUP BY b.tenant, b.name, k.counted, 4",
        _SUM,
    ),
    # SQLite may update a counter several times in one statement, and a sum of its own could exceed 64 bits.
    sqlite=_change(
        f"SELECT {_GIVEN_SQLITE} FROM json_each(%(given)s) AS e",
        "k.usd, k.tokens",
        "",
        f"max(0, min({_MOST}, c.{{0}} + excluded.{{0}}))",
    ),
)
"""Add amounts, which may be negative, to the counters of all budgets to which they apply, in order."""


def _root(entry: str) -> str:
    return f"""COALESCE(
                {entry}.tree_id,
                (SELECT s.root_session_id FROM {table(Session)} AS s WHERE s.id = {entry}.session_id),
                {entry}.recorded_for)"""


_ROOT: Final = _root("e")
_OF_SPENDER: Final = "e.user_id, e.session_agent_type, e.root_id"

COUNT_INSERTED: Final = _change(
    f"""
            SELECT k.*, {_DAY[0].format("e.timestamp")} AS day,
                COALESCE(e.cost_usd, 0) AS usd, COALESCE(e.total_tokens, 0) AS tokens
            FROM (SELECT e.*, {_ROOT} AS root_id FROM inserted AS e) AS e
            CROSS JOIN LATERAL ({_keys("e", "e.root_id", "session_agent_type")}) AS k
            WHERE k.counted IS NOT NULL AND (e.cost_usd > 0 OR e.total_tokens > 0)""",
    "k.usd, k.tokens",
    "",
    _SUM,
)
"""Add the single entry that a query ``inserted`` has returned to counters, on PostgreSQL."""


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
    PostgreSQL. On Citus, which cannot query the rows that a statement deletes, each row is returned.
    """
    is_counted = has_budgets("(SELECT tenant FROM gone LIMIT 1)")
    entry = table(UsageEntry)
    # to_char() is not immutable, so the day is a date.
    returned = f"""
            {has_budgets(f"{entry}.tenant")}, 1, {entry}.user_id, {entry}.session_agent_type, {_root(entry)},
            ({entry}.timestamp AT TIME ZONE 'UTC')::date, {entry}.cost_usd, {entry}.total_tokens"""
    return Statement(
        f"""
        WITH gone AS ({delete} RETURNING *)
        {sums_of_entries("gone", is_postgresql=True, is_counted=is_counted)}""",
        citus=(f"{delete} RETURNING {returned}",),
    )
