"""Tables of agents' spending: usage in groups or by day, with bars, and budgets with their limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any, Final

from helix_store.core.budgets import BudgetScope
from helix_store.core.usage import UsageGroup, UsageReport, UsageTotal, rounded_cost
from helix_store.management.output import Column, Layout, Style, bar, table
from helix_store.management.text import width_of
from helix_store.reports.budgets import MOST_COUNTERS, BudgetReport, LimitReport

_NUMBERS: Final = ("cost USD", "tokens")
_MORE_NUMBERS: Final = ("prompt", "completion", "entries", "tools")
"""The last of these columns are left out if the terminal is too narrow."""
_GAP: Final = 2
_SMALLEST_NAME: Final = 12
_BAR_WITHOUT_END: Final = 40
_SMALLEST_BAR: Final = 5
_BUDGET_BAR: Final = 12


def groups_table(report: UsageReport, layout: Layout) -> str:
    """Return a row for each group, and the total."""
    headings, names = _names(report)
    totals: list[UsageTotal] = [*report.groups, report.total]
    costs = _aligned(total.known_cost for total in totals)
    columns = [
        *(Column(heading=heading, cut="middle", minimum=_SMALLEST_NAME) for heading in headings),
        *(Column(heading=heading, cut="never", right=True) for heading in _NUMBERS),
        *(Column(heading=heading, cut="never", right=True, is_optional=True) for heading in _MORE_NUMBERS),
    ]
    rows = [[*name, cost, *_counts(total)] for name, cost, total in zip(names, costs, totals, strict=True)]
    return table(columns, rows, layout)


def days_table(report: UsageReport, layout: Layout, *, zone: str) -> str:
    """Return a row for each day, with a bar for its cost, or for its tokens if no entry has a cost."""
    costs = iter(_aligned(total.known_cost for total in (*report.groups, report.total)))
    texts = [[day.group or "", next(costs), *_short_counts(day)] for day in report.groups]
    texts.append(["total", next(costs), *_short_counts(report.total)])
    headings = [f"day ({zone})", "cost USD", "tokens", "entries"]
    widths = (max(map(width_of, column)) for column in zip(headings, *texts, strict=True))
    used = sum(widths) + len(headings) * _GAP
    room = _BAR_WITHOUT_END if layout.width is None else max(layout.width - used, _SMALLEST_BAR)
    by_cost = bool(report.total.cost_usd)
    values = [float(day.cost_usd if by_cost else day.tokens.total) for day in report.groups]
    bars = [*(bar(value, maximum=max(values), width=room) for value in values), ""]
    columns = [
        Column(heading=headings[0], cut="never"),
        *(Column(heading=heading, cut="never", right=True) for heading in headings[1:]),
        Column(heading="", cut="never", style=lambda text: "cyan"),
    ]
    rows = [[*row, drawn] for row, drawn in zip(texts, bars, strict=True)]
    return table(columns, rows, layout)


def _names(report: UsageReport) -> tuple[list[str], list[list[str]]]:
    """Return the headings of the columns that name a group, and the names. The last row is the total."""
    heading = report.by.value.replace("_", " ")
    names = [[_label(group)] for group in report.groups]
    if not any(group.tenant for group in report.groups):
        return [heading], [*names, ["total"]]
    tenants = [[group.tenant or "", *name] for group, name in zip(report.groups, names, strict=True)]
    return ["tenant", heading], [*tenants, ["total", ""]]


def _label(group: UsageGroup) -> str:
    if group.group is None:
        return "(none)"
    return f"{group.group} *" if group.is_deleted else group.group


def _counts(total: UsageTotal) -> list[str]:
    tokens = total.tokens
    counts = (tokens.total, tokens.prompt, tokens.completion, total.entry_count, total.tool_calls)
    return [f"{count:,}" for count in counts]


def _short_counts(total: UsageTotal) -> list[str]:
    return [f"{total.tokens.total:,}", f"{total.entry_count:,}"]


def _aligned(costs: Iterable[Decimal | None]) -> list[str]:
    """Return rounded costs with aligned decimal points, and ``unknown`` for ``None``."""
    texts = ["unknown" if cost is None else rounded_cost(cost) for cost in costs]
    places = max(len(text.partition(".")[2]) for text in texts)
    return [text + " " * (places - len(text.partition(".")[2])) if "." in text else text for text in texts]


def _bar_style(text: str) -> Style | None:
    return "red" if text.startswith("reached") else "cyan"


_BUDGET_COLUMNS: Final = (
    Column(heading="tenant", cut="middle", minimum=6, may_be_empty=True),
    Column(heading="budget", cut="middle", minimum=10),
    Column(heading="caps", cut="middle", minimum=10),
    Column(heading="period", cut="never"),
    Column(heading="unit", cut="never"),
    Column(heading="spent", cut="never", right=True),
    Column(heading="held", cut="never", right=True),
    Column(heading="limit", cut="never", right=True),
    Column(heading="left", cut="never", right=True),
    Column(heading="", cut="never", style=_bar_style),
    Column(heading="resets", cut="never", is_optional=True, may_be_empty=True),
)


def budgets_table(reports: Sequence[BudgetReport], layout: Layout) -> str:
    rows = [row for report in reports for row in _limit_rows(report)]
    return table(_BUDGET_COLUMNS, rows, layout)


def _limit_rows(report: BudgetReport) -> Iterator[list[Any]]:
    names: list[Any] = [report.tenant or None, report.status.name, _capped(report), report.period.value]
    for limit in report.limits:
        figures = (limit.spent, limit.held, limit.limit, limit.remaining)
        amounts = [limit.amount(each).removeprefix("$") for each in figures]
        unit = "USD" if limit.unit == "usd" else "tokens"
        yield [*names, unit, *amounts, _limit_bar(limit), report.status.resets_at]
        names = [None if name is None else "" for name in names]


def _limit_bar(limit: LimitReport) -> str:
    if limit.is_reached:
        return "reached"
    return bar(float(limit.limit - limit.remaining), maximum=float(limit.limit), width=_BUDGET_BAR)


def _capped(report: BudgetReport) -> str:
    kind = report.scope.value.replace("_", " ")
    if report.scope is BudgetScope.TENANT:
        return "the tenant"
    if not report.is_for_each:
        return f"{kind} {report.status.value}"
    if report.value_count is None:
        return f"each {kind}: {report.status.value}"
    if report.status.value is None:
        return f"each {kind}"
    count = f"{min(report.value_count, MOST_COUNTERS):,}"
    return f"each {kind}, highest of {count}: {report.status.value}"
