"""Columns and read-only fields that show one value of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin

from helix_store.admin.elements import NOTHING, json_block
from helix_store.reports.payloads import payload_of


def column(name: str, label: Any, show: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a method of a page that shows the attribute ``name`` of a row, or a dash if it is ``None``."""

    @admin.display(description=label)
    def shown(_page: Any, row: Any) -> Any:
        value = getattr(row, name)
        return NOTHING if value is None else show(value)

    return shown


def json_column(name: str, label: Any) -> Callable[[Any, Any], Any]:
    """Return a method of a page that shows the JSON column ``name`` of a row."""

    @admin.display(description=label)
    def shown(_page: Any, row: Any) -> Any:
        return json_block(payload_of(row, name))

    return shown
