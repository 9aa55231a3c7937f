"""Budgets as a table, with a line and a bar for each limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from helix_store.core.budgets import BudgetScope
from helix_store.management.output import Colours, Column, Style, bar, table
from helix_store.reports.budgets import MOST_COUNTERS, BudgetReport, LimitReport, budget_that_stopped
from helix_store.reports.session import SessionReport
from helix_store.reports.times import moment

__all__ = ["budgets_table", "stopped"]

_BAR: Final = 12


def _style(text: str) -> Style | None:
    return "red" if text.startswith("reached") else "cyan"


_COLUMNS: Final = (
    Column(heading="tenant", cut="middle", minimum=6, may_be_empty=True),
    Column(heading="budget", cut="middle", minimum=10),
    Column(heading="caps", cut="middle", minimum=10),
    Column(heading="period", cut="never"),
    Column(heading="unit", cut="never"),
    Column(heading="spent", cut="never", right=True),
    Column(heading="held", cut="never", right=True),
    Column(heading="limit", cut="never", right=True),
    Column(heading="left", cut="never", right=True),
    Column(heading="", cut="never", style=_style),
    Column(heading="resets", cut="never", is_optional=True, may_be_empty=True),
)


def budgets_table(reports: Sequence[BudgetReport], *, width: int | None, colours: Colours) -> str:
    rows = [row for report in reports for row in _rows(report)]
    return table(_COLUMNS, rows, width=width, colours=colours)


def _rows(report: BudgetReport) -> Iterator[list[Any]]:
    names: list[Any] = [report.tenant or None, report.status.name, _capped(report), report.period.value]
    for limit in report.limits:
        figures = (limit.spent, limit.held, limit.limit, limit.remaining)
        amounts = [limit.amount(each).removeprefix("$") for each in figures]
        unit = "USD" if limit.unit == "usd" else "tokens"
        yield [*names, unit, *amounts, _bar(limit), report.status.resets_at]
        names = [None if name is None else "" for name in names]


def _bar(limit: LimitReport) -> str:
    if limit.is_reached:
        return "reached"
    return bar(float(limit.limit - limit.remaining), maximum=float(limit.limit), width=_BAR)


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


def stopped(report: SessionReport) -> str | None:
    """Return why the newest run ended, if a budget did not allow its next step."""
    name = budget_that_stopped(report.runs[0].completion_reason) if report.runs else None
    if name is None:
        return None
    found = next((each for each in report.budgets or () if each.status.name == name), None)
    why = f"the budget {name} did not allow the last step"
    if found is None:
        return f"{why}; it no longer applies, and the next turn continues"
    spent = ", ".join(
        f"{each.amount(each.spent)} of {each.amount(each.limit)}{' tokens' * (each.unit == 'tokens')}"
        for each in found.limits
    )
    resets = "" if found.status.resets_at is None else f", it resets {moment(found.status.resets_at)}"
    return f"{why}; spent now: {spent}{resets}; the next turn tries again"
