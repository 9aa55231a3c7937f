"""The SQL of the usage ledger. An insertion skips every entry whose id is known.

An entry takes its columns from the locked row of its session, and the unique constraint decides on its id.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from helix_store.core.usage import UsageReportGrouping
from helix_store.counters.sql import COUNT_INSERTED, has_budgets
from helix_store.engine.expressions import all_tenants, exact_sum, for_keys, is_in_list, local_day
from helix_store.engine.statement import Statement, table
from helix_store.models import Session
from helix_store.models import UsageEntry as UsageRow
from helix_store.sessions.sql import SESSION_BY_ID
from helix_store.usage.rules import TOKEN_FIELDS

_TYPES: Final = {
    "BigIntegerField": "bigint",
    "BooleanField": "boolean",
    "CharField": "varchar",
    "DateTimeField": "timestamptz",
    "FloatField": "float8",
    "ForeignKey": "bigint",
}
_COLUMN_TYPES: Final = {
    field.attname: _TYPES[field.get_internal_type()]
    for field in UsageRow._meta.concrete_fields
    if not (field.primary_key or field.attname == "tree_id")
}
"""PostgreSQL's type of each column: prepared parameters have types before they have values."""

COLUMNS: Final = tuple(_COLUMN_TYPES)
SESSION_COLUMNS: Final = {
    "tenant": "tenant",
    "session_id": "id",
    "session_agent_type": "agent_type",
    "user_id": "user_id",
}
"""Columns that an entry copies from its session, and their names there."""

_TOKENS: Final = tuple(f"{name}_tokens" for name in TOKEN_FIELDS)
SUMMED: Final = ("duration_ms", "cost_usd", *_TOKENS)

# SQLite has allowed this number of parameters since 3.32, unless it is built with a different limit.
_SQLITE_PARAMETERS: Final = 32_766
ROWS_PER_STATEMENT: Final = min(1_000, _SQLITE_PARAMETERS // len(COLUMNS))

# This prevents the deletion of a session until the commit, but does not wait for its steps. Without this lock
# a concurrent deletion would fail the commit with a broken foreign key.
_KEEP: Final = "FOR KEY SHARE"
_UNLESS_KNOWN: Final = "ON CONFLICT (tenant, entry_id) DO NOTHING"


def _names(columns: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


@lru_cache(512)
def insert_entry(columns: tuple[str, ...], *, counts: bool) -> Statement:
    """Insert an entry of the session ``recorded_for``; return no row for a known id or an unknown session.

    An entry of a tenant with budgets is inserted only by a statement that ``counts``, that is, which also
    changes the counters. Only PostgreSQL has such a statement. Without budgets, it takes 1.1 times as long.
    """
    insert = f"INSERT INTO {table(UsageRow)} ({_names((*SESSION_COLUMNS, *columns))})"
    copied = ", ".join(SESSION_COLUMNS.values())
    typed = ", ".join(f"%({name})s::{_COLUMN_TYPES[name]}" for name in columns)
    plain = ", ".join(f"%({name})s" for name in columns)
    session = f"""FROM {table(Session)} AS s
            WHERE tenant = (SELECT %(tenant)s) AND session_id = %(recorded_for)s::varchar"""
    uncapped = f"AND NOT {has_budgets('(SELECT %(tenant)s)')}"
    postgresql = f"{insert} SELECT {copied}, {typed} {session} {{}} {_UNLESS_KNOWN} RETURNING "
    counting = f"""
            WITH inserted AS ({postgresql.format(_KEEP)} *), counted AS ({COUNT_INSERTED})
            SELECT id FROM inserted"""
    return Statement(
        postgresql=counting if counts else f"{postgresql.format(f'{uncapped} {_KEEP}')} id",
        # Citus does not support a row lock in an INSERT.
        citus=(f"SELECT id {session} {_KEEP}", f"{postgresql.format(uncapped)} id"),
        sqlite=f"""
            {insert} SELECT {copied}, {plain} FROM {table(Session)} AS s
            WHERE tenant = (SELECT %(tenant)s) AND session_id = %(recorded_for)s {uncapped}
            {_UNLESS_KNOWN} RETURNING id""",
    )


@lru_cache(16)
def insert_entries(rows: int) -> Statement:
    """Insert entries in order with all `COLUMNS`; `rows_parameter` returns the parameters. With arrays,
    PostgreSQL takes a quarter of the time that it takes with a placeholder for every value.

    Return the id of each entry that was inserted, and whether its tenant may have budgets.
    """
    insert = f"INSERT INTO {table(UsageRow)} ({_names(COLUMNS)})"
    arrays = ", ".join(f"%s::{column_type}[]" for column_type in _COLUMN_TYPES.values())
    row = f"({', '.join(['%s'] * len(COLUMNS))})"
    tenant = f"{table(UsageRow)}.tenant"
    postgresql = f"""
            {insert} SELECT {_names(COLUMNS)}
            FROM unnest({arrays}) WITH ORDINALITY AS given({_names(COLUMNS)}, ordinal)
            ORDER BY ordinal {_UNLESS_KNOWN} RETURNING entry_id,"""
    return Statement(
        postgresql=f"{postgresql} {has_budgets(tenant)}",
        # Citus does not support a query in the RETURNING of an INSERT ... SELECT.
        citus=(f"{postgresql} true",),
        # With the plain column, SQLite would not use the index.
        sqlite=f"""
            {insert} VALUES {", ".join([row] * rows)} {_UNLESS_KNOWN}
            RETURNING entry_id, {has_budgets(f"+{tenant}")}""",
    )


def _keep_sessions() -> Statement:
    # Sorted in the order in which trees are locked, so that the two cannot deadlock.
    read = f"""
        SELECT session_id, COALESCE(root_session_id, session_id), {", ".join(SESSION_COLUMNS.values())}
        FROM {table(Session)}
        WHERE tenant = (SELECT %(tenant)s) AND {{}} ORDER BY id"""
    postgresql, sqlite = map(read.format, is_in_list("session_id", "session_ids", "text"))
    return Statement(postgresql=f"{postgresql} {_KEEP}", sqlite=sqlite)


def _sums(condition: str) -> Statement:
    """Sum the entries that meet a condition by kind, name and custom name.

    These three columns are followed by the number of entries, the number of successes, the sum of amounts,
    and the sums of `SUMMED`, for `summed`.
    """
    # All names are in one column: with more grouping columns PostgreSQL estimates too many groups, and sorts
    # where it could hash.
    of_postgresql, of_sqlite = zip(*map(exact_sum, SUMMED), strict=True)

    def text(sums: Iterable[str]) -> str:
        return f"""
            SELECT kind, COALESCE(model, tool_name, agent_type, custom_type), custom_name,
                count(*), count(*) FILTER (WHERE success), SUM(amount), {", ".join(sums)}
            FROM {table(UsageRow)} WHERE {condition} GROUP BY 1, 2, 3"""

    return Statement(text(of_postgresql), text(of_sqlite))


KEEP_SESSIONS: Final = _keep_sessions()
"""The id, the root and the `SESSION_COLUMNS` of each session. No session can be deleted until the commit."""

SUMS_OF_SESSION: Final = _sums(f"session_id = (SELECT id FROM {table(Session)} WHERE {SESSION_BY_ID})")
SUMS_OF_SESSIONS: Final = for_keys(_sums("session_id IN %(keys)s"))
SUMS_OF_KEPT: Final = _sums(
    "tenant = (SELECT %(tenant)s) AND recorded_for = %(session_id)s AND session_id IS NULL"
)
"""Entries of deleted sessions with this id."""


@lru_cache(4)
def totals_of_sessions(most: int) -> Statement:
    """Return the key of each session with the number and the sums of its entries, of at most one more than
    ``most`` entries. On SQLite, these three are one string.
    """

    def read(columns: str, key: str) -> str:
        return f"""(SELECT {columns} FROM (
            SELECT e.total_tokens, e.cost_usd FROM {table(UsageRow)} AS e
            WHERE e.session_id = {key} LIMIT {most + 1}) AS entries)"""

    tokens, tokens_sqlite = exact_sum("total_tokens")
    cost, cost_sqlite = exact_sum("cost_usd")
    # It is a single string, because SQLite would read the entries again for each value.
    sums = f"count(*) || ';' || coalesce({tokens_sqlite}, '0 0') || ';' || coalesce({cost_sqlite}, '0 0')"
    return Statement(
        f"""SELECT keys.value, sums.* FROM unnest(%(keys)s::bigint[]) AS keys(value),
            LATERAL {read(f"count(*), {tokens}, {cost}", "keys.value")} AS sums""",
        f"SELECT keys.value, {read(sums, 'keys.value')} FROM json_each(%(keys)s) AS keys",
    )


# --- Reports ---------------------------------------------------------------------------------------

REPORTED: Final = (*_TOKENS, "cost_usd")
"""The columns that a report adds up."""

REPORT_FILTERS: Final = {
    "tenant": "e.tenant = (SELECT %(tenant)s)",
    "agent_type": "e.session_agent_type = %(agent_type)s",
    "user_id": "e.user_id = %(user_id)s",
    "model": "e.model = %(model)s",
    "date_from": "e.timestamp >= %(date_from)s",
    "date_to": "e.timestamp < %(date_to)s",
}
"""The conditions of a report, keyed by the names of their parameters."""

_SESSION_OF_ENTRY: Final = f"LEFT JOIN {table(Session)} AS s ON s.id = e.session_id"
_DAY: Final = local_day("e.timestamp", "zone")
_GROUPS: Final = {
    UsageReportGrouping.SESSION: ("e.tenant", "e.recorded_for", "e.session_id IS NULL"),
    UsageReportGrouping.TREE: (
        "e.tenant",
        "COALESCE(s.root_session_id, e.recorded_for)",
        "e.session_id IS NULL",
    ),
    UsageReportGrouping.MODEL: ("NULL", "e.model", "FALSE"),
    UsageReportGrouping.AGENT_TYPE: ("NULL", "e.session_agent_type", "FALSE"),
    UsageReportGrouping.USER: ("e.tenant", "e.user_id", "FALSE"),
}
"""The columns that the entries of a group share: tenant, name and whether the session was deleted."""


@lru_cache(256)
def report(by: UsageReportGrouping, filters: tuple[str, ...]) -> Statement:
    """Return the groups with the highest costs, or the last days, and the sums of all groups.

    ``filters`` are names of `REPORT_FILTERS`. The columns are the number of groups, the tenant, the group,
    whether it was deleted, the number of entries, of tool calls and of entries without a price, and the sums
    of `REPORTED`, for `summed`. The number of groups is not null in the row with the sums of all groups.
    """
    conditions = [REPORT_FILTERS[name] for name in filters]
    if conditions and "tenant" not in filters:
        # Every other index begins with the tenant.
        conditions.insert(0, f"e.tenant IN ({all_tenants(table(UsageRow))})")
    rows = f"{table(UsageRow)} AS e"
    if by is UsageReportGrouping.TREE:
        rows += f" {_SESSION_OF_ENTRY}"
    if conditions:
        rows += f" WHERE {' AND '.join(conditions)}"
    return Statement(_report(by, rows, is_sqlite=False), _report(by, rows, is_sqlite=True))


def _report(by: UsageReportGrouping, rows: str, *, is_sqlite: bool) -> str:
    """Return the report for one vendor. On SQLite, each sum has two columns; the lower one has 32 bits."""
    tenant, name, is_deleted = _GROUPS.get(by, ("NULL", _DAY[is_sqlite], "FALSE"))
    if is_sqlite:
        low = "SUM(e.{0} & 4294967295)"
        high = f"SUM(e.{{0}} >> 32) + ({low} >> 32)"
        summed = f"COALESCE({high}, 0) AS {{0}}, COALESCE({low}, 0) & 4294967295 AS {{0}}_low"
        totalled, shown = "SUM({0}) || ' ' || SUM({0}_low)", "{0} || ' ' || {0}_low"
    else:
        summed, totalled, shown = "COALESCE(SUM(e.{0}), 0) AS {0}", "SUM({0})", "{0}"
    halves = ("", "_low") if is_sqlite else ("",)
    order = [f"{column}{half} DESC" for column in ("cost_usd", "total_tokens") for half in halves]
    order += ["tenant", "name IS NULL", "name", "is_deleted"]
    if by is UsageReportGrouping.DAY:
        order = ["name DESC"]
    sums, totals, columns = (", ".join(map(each.format, REPORTED)) for each in (summed, totalled, shown))
    return f"""
        WITH grouped AS (
            SELECT {tenant} AS tenant, {name} AS name, {is_deleted} AS is_deleted, count(*) AS entry_count,
                count(*) FILTER (WHERE e.kind = 'tool') AS tool_calls,
                count(*) FILTER (WHERE e.kind = 'tokens' AND e.cost_usd IS NULL) AS unpriced,
                {sums}
            FROM {rows}
            GROUP BY 1, 2, 3
        )
        SELECT count(*), NULL, NULL, NULL, SUM(entry_count), SUM(tool_calls), SUM(unpriced), {totals}
        FROM grouped
      UNION ALL
        SELECT * FROM (
            SELECT CAST(NULL AS bigint), tenant, name, is_deleted, entry_count, tool_calls, unpriced,
                {columns}
            FROM grouped ORDER BY {", ".join(order)} LIMIT %(limit)s) AS highest"""
