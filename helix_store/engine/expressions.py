"""Query expressions and parameters that PostgreSQL and SQLite write differently.

A pair of strings is the SQL for PostgreSQL and for SQLite, as `Statement` takes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.db.models import (
    Aggregate,
    BigIntegerField,
    BooleanField,
    CharField,
    F,
    Func,
    Lookup,
    Model,
    Value,
)
from django.db.models.lookups import GreaterThan, LessThan

from helix_store.core.limits import MAX_BIGINT
from helix_store.engine.database import Database
from helix_store.engine.statement import Statement, table
from helix_store.models.fields import MomentField

_IN_KEYS: Final = re.compile(r"([\w.]+) IN %\(keys\)s")


def tenant_parameter(tenant: str) -> Func:
    """Return the value of a tenant in a form that is hidden from PostgreSQL's planner. ``(SELECT …)``.

    The statistics do not contain a new tenant, so PostgreSQL expects it to have no rows. Every index that
    begins with the tenant then looks equally good, and a lookup by key may read all rows of the tenant. For a
    hidden value, PostgreSQL plans for an average tenant.
    """
    return _HiddenValue(Value(tenant), output_field=CharField())


class _HiddenValue(Func):
    template = "(SELECT %(expressions)s)"

    def as_sqlite(self, compiler: Any, connection: Any, **extra_context: Any) -> Any:
        return self.as_sql(compiler, connection, template="%(expressions)s", **extra_context)


class NoIndexHint(Func):
    """A column whose index SQLite must not use.

    SQLite prefers an index on an equality column to one with the right order, and sorts the rows afterwards.
    """

    arity = 1
    template = "%(expressions)s"

    def as_sqlite(self, compiler: Any, connection: Any, **extra_context: Any) -> Any:
        return self.as_sql(compiler, connection, template="+%(expressions)s", **extra_context)


class StartInUTC(Func):
    """The start of the hour, day, week or month around a moment. Django's ``Trunc`` depends on ``USE_TZ``."""

    template = "pg_catalog.date_trunc('%(unit)s', %(expressions)s, 'UTC')"

    def __init__(self, column: str, unit: str) -> None:
        super().__init__(column, output_field=MomentField(), unit=unit)

    def as_sqlite(self, compiler: Any, connection: Any, **extra_context: Any) -> Any:
        column, params = compiler.compile(self.get_source_expressions()[0])
        return connection.ops.datetime_trunc_sql(self.extra["unit"], column, tuple(params), None)


class _Row(Func):
    template = "(%(expressions)s)"


def after_keyset(model: type[Model], last: Mapping[str, Any], *, descending: bool = False) -> Lookup[Any]:
    """Return the rows that follow the last row of a page, in the order of these columns: ``(a, b) > (1, 2)``.

    This is one range of an index. The same condition with OR would read again all rows that have the ``a`` of
    the last row. All columns must have the same direction.
    """
    fields: Any = model._meta.get_field
    values = [Value(value, output_field=fields(name)) for name, value in last.items()]
    # A lookup is a condition without a comparison; Django compares any other expression with true.
    follows = LessThan if descending else GreaterThan
    return follows(
        _Row(*map(F, last), output_field=BooleanField()), _Row(*values, output_field=BooleanField())
    )


class _JSONContains(Func):
    """The condition that a jsonb column contains a document, which SQLite checks with ``json_each``."""

    def __init__(self, column: str, document: Any, sqlite_condition: str, sqlite_params: list[str]) -> None:
        super().__init__(column, output_field=BooleanField())
        self.value = document
        self.document = json.dumps(document)
        self.sqlite_condition = sqlite_condition
        self.sqlite_params = sqlite_params

    def as_postgresql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = compiler.compile(self.source_expressions[0])
        # The second half is the condition of the partial index, which omits empty documents.
        empty = "[]" if isinstance(self.value, list) else "{}"
        condition = f"({column} @> %s::jsonb AND {column} <> '{empty}'::jsonb)"
        return condition, (*params, self.document, *params)

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = compiler.compile(self.source_expressions[0])
        condition = f"EXISTS (SELECT 1 FROM json_each({column}) WHERE {self.sqlite_condition})"
        return condition, (*params, *self.sqlite_params)


def has_tag(tag: str) -> Func:
    return _JSONContains("tags", [tag], "json_each.value = %s", [tag])


def has_metadata(key: str, value: str) -> Func:
    return _JSONContains(
        "metadata", {key: value}, "json_each.key = %s AND json_each.value = %s", [key, value]
    )


class ExactSum(Aggregate):
    """SUM of a column of whole numbers from 0, as an ``int``; 0 if there are no rows. See `exact_sum`."""

    function = "SUM"
    name = "ExactSum"

    def __init__(self, column: str) -> None:
        super().__init__(column, output_field=BigIntegerField())

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = compiler.compile(self.get_source_expressions()[0])
        _, sqlite = exact_sum(column)
        return sqlite, (*params, *params)

    def convert_value(self, value: Any, expression: Any, connection: Any) -> int:
        return summed(value)


def exact_sum(column: str) -> tuple[str, str]:
    """Return the SQL of `ExactSum`; `summed` reads the result.

    PostgreSQL adds up bigints as numeric. SQLite fails if a sum exceeds 64 bits, so there the upper and the
    lower 32 bits are summed separately.
    """
    return f"SUM({column})", f"(SUM({column} >> 32) || ' ' || SUM({column} & 4294967295))"


def summed(value: Any) -> int:
    """Return the result of an `exact_sum` as an ``int``; 0 if there were no rows."""
    if isinstance(value, str):
        upper, lower = value.split()
        return (int(upper) << 32) + int(lower)
    return int(value or 0)


def local_day(column: str, parameter: str) -> tuple[str, str]:
    """Return the SQL for the day of a moment, as ``2026-11-20``, in the time zone of the named parameter.
    Days after the year 9999 become its last day, because Python has no later ones.
    """
    return (
        f"to_char(LEAST({column} AT TIME ZONE %({parameter})s::text, timestamp '9999-12-31'), 'YYYY-MM-DD')",
        # Django adds this function to SQLite, which has no time zones.
        f"""CASE WHEN {column} >= '9999-12-30' THEN '9999-12-31'
            ELSE django_datetime_cast_date({column}, %({parameter})s, 'UTC') END""",
    )


def is_in_list(column: str, parameter: str, column_type: str) -> tuple[str, str]:
    """Return the condition that a column has one of the values of a `list_parameter`."""
    return (
        f"{column} = ANY(%({parameter})s::{column_type}[])",
        f"{column} IN (SELECT value FROM json_each(%({parameter})s))",
    )


def looked_up(model: type[Model], alias: str, condition: str, *, end: str = "LIMIT 1") -> tuple[str, str]:
    """Return a join that finds by an index the row that meets a condition on the preceding tables.

    ``LIMIT 1`` prevents PostgreSQL from joining the whole table. If several rows match, pass ``OFFSET 0``.
    """
    source = f"{table(model)} AS {alias}"
    return (
        f"CROSS JOIN LATERAL (SELECT * FROM {source} WHERE {condition} {end}) AS {alias}",
        f"CROSS JOIN {source} ON {condition}",
    )


def for_keys(statement: Statement | str) -> Statement:
    """Return a statement in which ``column IN %(keys)s`` works; ``keys`` is a `list_parameter` of numbers."""
    if isinstance(statement, str):
        statement = Statement(statement)
    postgresql, sqlite = is_in_list(r"\1", "keys", "bigint")
    return Statement(
        _IN_KEYS.sub(postgresql, statement.postgresql),
        _IN_KEYS.sub(sqlite, statement.sqlite),
        citus=[_IN_KEYS.sub(postgresql, text) for text in statement.citus],
    )


def list_parameter(db: Database, values: Sequence[Any]) -> Sequence[Any] | str:
    """Return values as one parameter: an array on PostgreSQL, a JSON array on SQLite."""
    return list(values) if db.is_postgresql else json.dumps(values, ensure_ascii=False)


def rows_parameter(db: Database, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the values of these columns: an array for each column on PostgreSQL, row after row on SQLite.

    A column that a row does not have becomes null.
    """
    if db.is_postgresql:
        return [[row.get(name) for row in rows] for name in names]
    return [row.get(name) for row in rows for name in names]


def all_tenants(rows: str, *, most: int = MAX_BIGINT) -> str:
    """Return a query for the tenants of a table, at most one more than ``most``. It is a skip scan, which
    takes one lookup for each of them, in an index that begins with the tenant.
    """
    return f"""
        WITH RECURSIVE known(tenant, place) AS (
            SELECT min(tenant), CAST(1 AS bigint) FROM {rows}
          UNION ALL
            SELECT (SELECT min(t.tenant) FROM {rows} AS t WHERE t.tenant > known.tenant), place + 1
            FROM known WHERE known.tenant IS NOT NULL AND place <= {most}
        )
        SELECT tenant FROM known WHERE tenant IS NOT NULL"""


def tenants_with(rows: str, column: str) -> Statement:
    """Select the tenants of a table that have a row with this id, in order: no index begins with the id."""
    return Statement(f"""
        SELECT tenant FROM ({all_tenants(rows)}) AS known WHERE EXISTS (
            SELECT 1 FROM {rows} AS own WHERE own.tenant = known.tenant AND own.{column} = %({column})s
        ) ORDER BY tenant""")
