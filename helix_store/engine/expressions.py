"""Query expressions that PostgreSQL and SQLite write differently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.db.models import (
    Aggregate,
    BigIntegerField,
    BooleanField,
    Expression,
    F,
    Func,
    Lookup,
    Model,
    Value,
)
from django.db.models.lookups import GreaterThan, LessThan

__all__ = ["ExactSum", "Unindexed", "beyond", "exact_sum", "has_metadata", "has_tag", "summed"]


class Unindexed(Func):
    """A column that SQLite is to find no rows by: it prefers an equal column to an order, and sorts."""

    arity = 1
    template = "%(expressions)s"

    def as_sqlite(self, compiler: Any, connection: Any, **extra_context: Any) -> Any:
        return self.as_sql(compiler, connection, template="+%(expressions)s", **extra_context)


class _Row(Func):
    template = "(%(expressions)s)"


def beyond(model: type[Model], last: Mapping[str, Any], *, descending: bool = False) -> Lookup[Any]:
    """The rows after the last one seen, in the order of these columns: ``(a, b) > (1, 2)``.

    That is one range of an index. The same said with OR reads every row again that has the last row's ``a``.
    All columns are in the same direction.
    """
    fields: Any = model._meta.get_field
    values = [Value(value, output_field=fields(name)) for name, value in last.items()]
    # A comparison, which stands in a condition by itself: Django compares any other expression with true.
    follows = LessThan if descending else GreaterThan
    return follows(
        _Row(*map(F, last), output_field=BooleanField()), _Row(*values, output_field=BooleanField())
    )


class _JSONContains(Expression):
    """Whether a jsonb column contains a document; on SQLite, whether ``json_each`` finds the same."""

    conditional = True

    def __init__(self, column: str, document: Any, sqlite_condition: str, sqlite_params: list[str]) -> None:
        super().__init__(output_field=BooleanField())
        self.column: Any = F(column)
        self.value = document
        self.document = json.dumps(document)
        self.sqlite_condition = sqlite_condition
        self.sqlite_params = sqlite_params

    def get_source_expressions(self) -> list[Any]:
        return [self.column]

    def set_source_expressions(self, exprs: Any) -> None:
        (self.column,) = exprs

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = compiler.compile(self.column)
        # Spelled as the index spells it, which leaves out what is empty.
        empty = "[]" if isinstance(self.value, list) else "{}"
        condition = f"({column} @> %s::jsonb AND {column} <> '{empty}'::jsonb)"
        return condition, (*params, self.document, *params)

    def as_sqlite(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = compiler.compile(self.column)
        condition = f"EXISTS (SELECT 1 FROM json_each({column}) WHERE {self.sqlite_condition})"
        return condition, (*params, *self.sqlite_params)


def has_tag(tag: str) -> Expression:
    return _JSONContains("tags", [tag], "json_each.value = %s", [tag])


def has_metadata(key: str, value: str) -> Expression:
    return _JSONContains(
        "metadata", {key: value}, "json_each.key = %s AND json_each.value = %s", [key, value]
    )


class ExactSum(Aggregate):
    """SUM of a column of whole numbers from 0, as an ``int``; 0 where there is nothing to sum.

    PostgreSQL sums bigints as numeric. SQLite fails when a sum passes 64 bits: there the upper and the lower
    halves are summed apart.
    """

    function = "SUM"
    name = "ExactSum"

    def __init__(self, column: str) -> None:
        super().__init__(column, output_field=BigIntegerField())

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = compiler.compile(self.get_source_expressions()[0])
        return exact_sum("sqlite", column), (*params, *params)

    def convert_value(self, value: Any, expression: Any, connection: Any) -> int:
        return summed(value)


def exact_sum(vendor: str, column: str) -> str:
    """The same in plain SQL; `summed` reads the result."""
    if vendor == "sqlite":
        return f"(SUM({column} >> 32) || ' ' || SUM({column} & 4294967295))"
    return f"SUM({column})"


def summed(value: Any) -> int:
    if isinstance(value, str):
        upper, lower = value.split()
        return (int(upper) << 32) + int(lower)
    return int(value or 0)
