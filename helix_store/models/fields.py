"""Fields that behave alike on every database."""

from __future__ import annotations

from typing import Any

from django.db import models

__all__ = ["IdentifierField", "PayloadField"]


class IdentifierField(models.CharField):  # type: ignore[type-arg]  # not subscriptable at run time
    """Opaque text of at most 255 characters, compared and ordered by code point.

    PostgreSQL would order by the database's locale without the C collation; SQLite orders by bytes already.
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
