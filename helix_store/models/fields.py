"""Model fields that behave the same on every database."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from django.db import models
from django.utils import timezone

from helix_store.core.moments import as_sqlite_text
from helix_store.core.usage import cost_from_units, cost_units

__all__ = [
    "CallIdField",
    "CallIdsField",
    "CostField",
    "IdentifierField",
    "LongIdentifierField",
    "MomentField",
    "PayloadField",
]


class _ByCodePoint(models.Field):  # type: ignore[type-arg]  # not subscriptable at run time
    """Text that is compared and ordered by code point.

    Without the C collation, PostgreSQL would order by the database's locale. SQLite orders by bytes.
    """

    def db_parameters(self, connection: Any) -> dict[str, Any]:
        parameters: dict[str, Any] = super().db_parameters(connection)
        if connection.vendor == "postgresql":
            parameters["collation"] = "C"
        return parameters


class IdentifierField(_ByCodePoint, models.CharField):  # type: ignore[type-arg]
    """Opaque text of at most 255 characters, compared and ordered by code point."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("max_length", 255)
        super().__init__(*args, **kwargs)


class CallIdField(models.CharField):  # type: ignore[type-arg]  # not subscriptable at run time
    """The id of the call that wrote a row, which lets a call whose reply was lost recognise its write."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": 12, "null": True, "editable": False, **kwargs})


class CallIdsField(models.CharField):  # type: ignore[type-arg]  # not subscriptable at run time
    """The ids of the most recent calls that changed a row, as `engine.statement` writes and reads them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": 255, "null": True, "editable": False, **kwargs})


class LongIdentifierField(_ByCodePoint, models.TextField):  # type: ignore[type-arg]
    """Opaque text of any length, compared and ordered by code point, for ids that a framework generates."""


class PayloadField(models.TextField):  # type: ignore[type-arg]  # not subscriptable at run time
    """Exact JSON text from the payload gate. Never ``jsonb``, which reorders keys and makes floats ints."""


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
    """An aware datetime, in projects with any ``USE_TZ`` and ``TIME_ZONE``. SQLite stores it in UTC.

    Without ``USE_TZ``, Django's own field reads local times, which are ambiguous when clocks are set back,
    and SQLite refuses aware ones. With a ``TIME_ZONE`` in ``DATABASES``, SQLite would store times in that
    zone, although its clock is in UTC.
    """

    def deconstruct(self) -> Any:
        """Deconstruct as Django's own field, because the column is the same."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs

    def get_prep_value(self, value: Any) -> Any:
        value = super().get_prep_value(value)
        if isinstance(value, datetime) and value.tzinfo is None:
            # A filter in the admin passes a local time.
            return timezone.make_aware(value, timezone.get_default_timezone())
        return value

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if not prepared:
            value = self.get_prep_value(value)
        is_text = isinstance(value, datetime) and connection.vendor == "sqlite"
        return as_sqlite_text(value) if is_text else value

    def from_db_value(self, value: datetime | None, expression: Any, connection: Any) -> datetime | None:
        if value is None or value.tzinfo is UTC:
            return value
        if connection.vendor == "sqlite":
            return value.replace(tzinfo=UTC)
        if value.tzinfo is None:
            # The driver has set `fold` for the second of two equal hours.
            return value.replace(tzinfo=ZoneInfo(connection.timezone_name)).astimezone(UTC)
        return value
