"""What PostgreSQL and SQLite do differently, in one place."""

from __future__ import annotations

import json
from typing import Any

from django.db.models import BooleanField, Expression, F

__all__ = ["has_metadata", "has_tag"]


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
