"""Model fields with the same behaviour on each database."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.db import models

from helix_store.core.usage import cost_from_units, cost_units

__all__ = ["CostField", "IdentifierField", "PayloadField"]


class IdentifierField(models.CharField):  # type: ignore[type-arg]  # not subscriptable at run time
    """Opaque text of at most 255 characters, compared and ordered by code point.

    Without the C collation, PostgreSQL orders by the database's locale. SQLite orders by bytes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("max_length", 255)
        super().__init__(*args, **kwargs)

    def db_parameters(self, connection: Any) -> dict[str, Any]:
        parameters: dict[str, Any] = super().db_parameters(connection)
        if connection.vendor == "postgresql":
            parameters["collation"] = "C"
        return parameters


class PayloadField(models.TextField):  # type: ignore[type-arg]  # not subscriptable at run time
    """Exact JSON text from the payload gate. Never ``jsonb``: it reorders keys and turns floats into ints."""


class CostField(models.Field):  # type: ignore[type-arg]  # not subscriptable at run time
    """An exact amount of dollars, stored as a whole number of its smallest unit.

    SQLite stores a ``DecimalField`` as a float, whose sums are not exact.
    """

    def get_internal_type(self) -> str:
        return "BigIntegerField"

    def to_python(self, value: Any) -> Decimal | None:
        return None if value is None else Decimal(value)

    def get_prep_value(self, value: Any) -> int | None:
        return None if value is None else cost_units(Decimal(value))

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Decimal | None:
        return None if value is None else cost_from_units(int(value))
