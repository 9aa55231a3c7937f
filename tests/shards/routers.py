"""Routers as a project writes them: a tenant is in one database."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from django.db.models import Model

__all__ = ["PLACES", "ByName", "ByPlacement", "place"]

PLACES: Final[dict[str, str]] = {}
"""The database of each group of tenants, for `ByName`."""

_placement: Path | None = None


class ByName:
    """A tenant's name begins with its group."""

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        return PLACES.get(str(hints.get("tenant", "")).partition(":")[0])


class ByPlacement:
    """Every tenant is where a file says, which changes while the process runs."""

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        return _placement.read_text() if _placement is not None and "tenant" in hints else None


def place(file: Path) -> None:
    """Let `ByPlacement` read this file."""
    global _placement
    _placement = file
