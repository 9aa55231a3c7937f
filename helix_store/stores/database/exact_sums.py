"""Sums of whole numbers that neither overflow nor lose digits on any database."""

from __future__ import annotations

from typing import Any

from django.db.models import Aggregate, BigIntegerField

__all__ = ["ExactSum", "exact_sum", "summed"]


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
