"""The rows of a tenant, straight from the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.core.exceptions import FieldDoesNotExist
from django.db import connections
from django.db.models import AutoField, Field, ForeignKey, Model, UniqueConstraint

from helix_store.models.fields import MomentField
from tests.faults.stored_rows import compared_fields
from tests.faults.writes.stories import Contents, masked

__all__ = ["Rows"]

_KEYS: Final = {"current", "base_key"}
_PARENTS: Final = ("session", "stream")

Found = list[list[tuple[Any, ...]]]


class Rows:
    """Reads all rows of a tenant, with one query for each table."""

    def __init__(self, alias: str, tenant: str, tables: Sequence[type[Model]]) -> None:
        self._alias = alias
        self._tables = tables
        self._queries = [self._query(table, tenant) for table in tables]

    def read(self) -> Found:
        """Every column of every row, in an order that the twin has too."""
        with connections[self._alias].cursor() as cursor:
            if cursor.db.vendor == "sqlite":
                return [cursor.execute(*query).fetchall() for query in self._queries]
            # One round trip.
            cursor.execute(
                "; ".join(sql for sql, _ in self._queries), [p for _, ps in self._queries for p in ps]
            )
            found = [cursor.fetchall()]
            while cursor.nextset():
                found.append(cursor.fetchall())
            return found

    def contents(self, found: Found) -> Contents:
        """What the rows say without the keys, the tenant, the times and random ids."""
        text = {}
        for table, rows in zip(self._tables, found, strict=True):
            fields = compared_fields(table)
            for number, row in enumerate(rows):
                seen = [_value(field, value) for field, value in zip(fields, row, strict=True)]
                text[f"{table.__name__} {number}"] = "|".join(each for each in seen if each is not None)
        return dict(zip(text, masked("\0".join(text.values())).split("\0"), strict=True)) if text else {}

    def _query(self, table: type[Model], tenant: str) -> tuple[str, tuple[Any, ...]]:
        chosen = table._default_manager.using(self._alias).filter(**{_path_to_tenant(table): tenant})
        columns = [field.attname for field in compared_fields(table)]
        query = chosen.order_by(*_order(table)).values_list(*columns).query
        sql, parameters = query.get_compiler(self._alias).as_sql()
        return sql, tuple(parameters)


def _order(table: type[Model]) -> Sequence[str]:
    """By the key; rows of a thread by their names, for a copy on PostgreSQL gets its keys in any order."""
    if table._meta.app_label != "helix_store_langgraph":
        return ["pk"]
    unique = next(each for each in table._meta.constraints if isinstance(each, UniqueConstraint))
    return unique.fields


def _path_to_tenant(table: type[Model]) -> str:
    for name in ("tenant", *_PARENTS):
        try:
            table._meta.get_field(name)
        except FieldDoesNotExist:
            continue
        return name if name == "tenant" else f"{name}__tenant"
    raise AssertionError(f"whose rows are in {table.__name__}?")


def _value(field: Field[Any, Any], value: Any) -> str | None:
    if isinstance(field, AutoField | ForeignKey) or field.name in _KEYS or field.name == "tenant":
        return None
    if isinstance(field, MomentField) and value is not None:
        return "T"
    if field.name == "claim_token" and value is not None:
        return "N"  # it grows by a random number
    return value.tobytes().hex() if isinstance(value, memoryview) else repr(value)
