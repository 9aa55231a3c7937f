"""Names of tables in plain SQL."""

from __future__ import annotations

from django.db.models import Model

__all__ = ["table"]


def table(model: type[Model]) -> str:
    # PostgreSQL alone comes here, and table prefixes are plain names.
    return f'"{model._meta.db_table}"'
