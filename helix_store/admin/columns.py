"""Columns of lists, read-only fields that show one value of a row, and cells with numbers and costs."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from django.contrib import admin
from django.utils.html import format_html
from django.utils.safestring import SafeString

from helix_store.admin.elements import NOTHING, json_block
from helix_store.admin.labels import LABELS
from helix_store.core.serialization import exact_cost
from helix_store.core.usage import rounded_cost
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


def own_column(name: str) -> Callable[[Any], Any]:
    """Return a list column that shows a column of the model under its label."""

    @admin.display(description=LABELS[name])
    def value(row: Any) -> Any:
        return getattr(row, name)

    value.__name__ = name
    return value


def number(count: int, *, is_partial: bool = False) -> SafeString:
    return format_html('<span class="helix-number">{}{}</span>', "> " if is_partial else "", f"{count:,}")


def dollars(cost: Decimal | None, *, is_partial: bool = False) -> SafeString:
    """Return a cost with two decimals, or two significant digits below 0.1. Return a dash for no cost."""
    if cost is None:
        return format_html('<span class="helix-number">{}</span>', NOTHING)
    return format_html(
        '<span class="helix-number" title="{} USD">{}${}</span>',
        exact_cost(cost),
        "> " if is_partial else "",
        rounded_cost(cost),
    )
