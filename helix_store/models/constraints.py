"""Indexes and constraints of the tables, by their names without the project's prefix."""

from __future__ import annotations

from collections.abc import Iterable

from django.db import models
from django.db.models import Q

from helix_store.conf import constraint_name


def index(name: str, fields: list[str], *, where: Q | None = None) -> models.Index:
    return models.Index(fields=fields, name=constraint_name(name), condition=where)


def unique(name: str, fields: list[str], *, where: Q | None = None) -> models.UniqueConstraint:
    return models.UniqueConstraint(fields=fields, name=constraint_name(name), condition=where)


def one_of(name: str, field: str, values: Iterable[str]) -> models.CheckConstraint:
    """Allow only the values of an enumeration."""
    condition = Q(**{f"{field}__in": [str(value) for value in values]})
    return models.CheckConstraint(condition=condition, name=constraint_name(name))
