"""Numbers and costs in cells: right-aligned, with costs shortened and the exact figure as a tooltip."""

from __future__ import annotations

from decimal import Decimal

from django.utils.html import format_html
from django.utils.safestring import SafeString

from helix_store.core.serialization import exact_cost
from helix_store.core.usage import rounded_cost


def number(count: int, *, is_partial: bool = False) -> SafeString:
    return format_html('<span class="helix-number">{}{}</span>', "> " if is_partial else "", f"{count:,}")


def dollars(cost: Decimal | None, *, is_partial: bool = False) -> SafeString:
    """Return a cost with two decimals, or two significant digits below 0.1. Return a dash for no cost."""
    if cost is None:
        return format_html('<span class="helix-number">{}</span>', "-")
    return format_html(
        '<span class="helix-number" title="{} USD">{}${}</span>',
        exact_cost(cost),
        "> " if is_partial else "",
        rounded_cost(cost),
    )
