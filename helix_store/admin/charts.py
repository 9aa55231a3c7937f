"""SVG charts drawn by the server. Sizes are attributes, because pages have no styles of their own.

Charts are hidden from screen readers; the table next to each chart contains its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

_BAR_WIDTH: Final = 200
_COLUMN_WIDTH: Final = 20
_CHART_HEIGHT: Final = 120
_LABEL_HEIGHT: Final = 18


def bar(value: float, *, maximum: float) -> SafeString:
    """Return a horizontal bar for a row of a table."""
    length = _BAR_WIDTH * value / maximum if maximum > 0 else 0
    return format_html(
        '<svg class="helix-bar" viewBox="0 0 {} 10" preserveAspectRatio="none" aria-hidden="true" '
        'focusable="false"><rect width="{}" height="10"/></svg>',
        _BAR_WIDTH,
        _number(max(length, 1) if value > 0 else 0),
    )


def meter(spent: float, held: float, *, limit: float) -> SafeString:
    """Return a bar for a limit: the amount spent, followed by the amount held in reserve."""
    full = min(spent, limit) / limit if limit > 0 else 1
    kept = min(held, limit - min(spent, limit)) / limit if limit > 0 else 0
    return format_html(
        '<svg class="helix-bar helix-meter{}" viewBox="0 0 {} 10" preserveAspectRatio="none" '
        'aria-hidden="true" focusable="false"><rect class="helix-meter-whole" width="{}" height="10"/>'
        '<rect class="helix-meter-spent" width="{}" height="10"/>'
        '<rect class="helix-meter-held" x="{}" width="{}" height="10"/></svg>',
        " helix-meter-full" if spent + held >= limit else "",
        *(_BAR_WIDTH, _BAR_WIDTH),
        _number(_BAR_WIDTH * full),
        *(_number(_BAR_WIDTH * full), _number(_BAR_WIDTH * kept)),
    )


def columns(values: Sequence[tuple[str, float, str]]) -> SafeString:
    """Return a column for each label, with a value and a tooltip. Only the first and last are labelled."""
    highest = max((value for _label, value, _text in values), default=0)
    width = max(len(values), 10) * _COLUMN_WIDTH
    drawn = []
    for place, (_label, value, text) in enumerate(values):
        height = (_CHART_HEIGHT - 4) * value / highest if highest > 0 else 0
        drawn.append(
            (
                _number(place * _COLUMN_WIDTH + 2),
                _number(_CHART_HEIGHT - height),
                _COLUMN_WIDTH - 4,
                _number(max(height, 1) if value > 0 else 0),
                text,
            )
        )
    ends = [(0, "start", values[0][0]), (len(values) * _COLUMN_WIDTH, "end", values[-1][0])] if values else []
    return format_html(
        '<svg class="helix-columns" viewBox="0 0 {} {}" preserveAspectRatio="xMinYMid" aria-hidden="true" '
        'focusable="false">{}'
        '<line x1="0" x2="{}" y1="{}" y2="{}"/>{}</svg>',
        width,
        _CHART_HEIGHT + _LABEL_HEIGHT,
        format_html_join("", '<rect x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>', drawn),
        len(values) * _COLUMN_WIDTH,
        *(_CHART_HEIGHT, _CHART_HEIGHT),
        format_html_join(
            "",
            '<text x="{}" text-anchor="{}" y="{}">{}</text>',
            ((x, anchor, _CHART_HEIGHT + _LABEL_HEIGHT - 4, label) for x, anchor, label in ends),
        ),
    )


def spark_line(values: Sequence[float]) -> SafeString:
    """Return a chart of a few small columns without labels."""
    highest = max(values, default=0)
    bars = (
        (place * 14, _number(30 - height), _number(height))
        for place, height in enumerate(
            (max(30 * value / highest, 1) if highest > 0 and value > 0 else 0) for value in values
        )
    )
    return format_html(
        '<svg class="helix-spark" viewBox="0 0 {} 31" aria-hidden="true" focusable="false">{}'
        '<line x1="0" x2="{}" y1="30.5" y2="30.5"/></svg>',
        len(values) * 14,
        format_html_join("", '<rect x="{}" y="{}" width="10" height="{}"/>', bars),
        len(values) * 14,
    )


def _number(value: float) -> str:
    """Return a number with a decimal point, regardless of the language."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
