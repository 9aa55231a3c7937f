"""Model fields with the same behaviour on each database."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from django.db import models
from django.utils import timezone

from helix_store.core.usage import cost_from_units, cost_units

__all__ = [
    "CostField",
    "IdentifierField",
    "LongIdentifierField",
    "MomentField",
    "PayloadField",
    "is_read_as_local_time",
    "stored_moment",
]


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


class LongIdentifierField(models.TextField):  # type: ignore[type-arg]  # not subscriptable at run time
    """Opaque text of any length, compared and ordered by code point, for ids that a framework makes."""

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


class MomentField(models.DateTimeField):  # type: ignore[type-arg]  # not subscriptable at run time
    """An aware datetime, in projects with any ``USE_TZ`` and ``TIME_ZONE``. SQLite holds it in UTC.

    Without ``USE_TZ``, Django's own field reads local times, which are ambiguous when clocks are set back,
    and SQLite refuses aware ones. With a ``TIME_ZONE`` in ``DATABASES``, SQLite would hold times of that
    zone, while its clock is in UTC.
    """

    def deconstruct(self) -> Any:
        """As Django's field, because the column is the same."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs

    def get_prep_value(self, value: Any) -> Any:
        value = super().get_prep_value(value)
        if isinstance(value, datetime) and value.tzinfo is None:
            # A filter of the admin gives local time.
            return timezone.make_aware(value, timezone.get_default_timezone())
        return value

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if not prepared:
            value = self.get_prep_value(value)
        return stored_moment(connection, value) if isinstance(value, datetime) else value

    def from_db_value(self, value: datetime | None, expression: Any, connection: Any) -> datetime | None:
        if value is None or value.tzinfo is UTC:
            return value
        if connection.vendor == "sqlite":
            return value.replace(tzinfo=UTC)
        if value.tzinfo is None:
            # The driver has set `fold` for the second one of two equal hours.
            return value.replace(tzinfo=ZoneInfo(connection.timezone_name)).astimezone(UTC)
        return value


def stored_moment(connection: Any, moment: datetime) -> Any:
    """An aware datetime as a parameter. On SQLite it is the text of Django's fields, in UTC."""
    if connection.vendor != "sqlite":
        return moment
    if moment.tzinfo is not UTC:
        moment = moment.astimezone(UTC)
    return str(moment.replace(tzinfo=None))


def is_read_as_local_time(connection: Any) -> bool:
    """Whether Django reads naive local times from this connection: from PostgreSQL without ``USE_TZ``."""
    return connection.vendor == "postgresql" and connection.timezone is None
