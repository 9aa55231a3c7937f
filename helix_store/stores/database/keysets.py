"""Pages by key: what follows a row in the order of an index, and that SQLite keeps to this index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import BooleanField, F, Func, Lookup, Model, Value
from django.db.models.lookups import GreaterThan, LessThan

__all__ = ["Unindexed", "beyond"]


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
