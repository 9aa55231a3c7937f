"""The table: a row for each figure, printed as soon as it is there."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.figures import Figure, LeftOut, Target, Verdict

__all__ = ["HEADER", "row", "summary"]

_PATH_WIDTH = 68
_COLUMNS = f"{{:<{_PATH_WIDTH}}} {{:>11}} {{:>19}} {{:>8}} {{:>8}} {{:>6}}  {{}}"

HEADER = _COLUMNS.format(
    "path", "median", "lowest to highest", "floor", "aim", "met?", "median rates"
).rstrip()


def row(figure: Figure | LeftOut) -> str:
    if isinstance(figure, LeftOut):
        return f"{figure.path:<{_PATH_WIDTH}} left out: {figure.reason}"
    line = _COLUMNS.format(
        figure.path,
        f"{_number(figure.median)} {figure.unit}",
        f"{_number(figure.lowest)} to {_number(figure.highest)}",
        _bound(figure.target, "floor"),
        _bound(figure.target, "aim"),
        figure.verdict.value,
        _rates(figure),
    )
    return line.rstrip()


def summary(figures: Iterable[Figure | LeftOut]) -> str:
    """How many targets are met, and which floors are not."""
    measured = [figure for figure in figures if isinstance(figure, Figure) and figure.target is not None]
    missed = [figure.path for figure in measured if figure.verdict is Verdict.MISSED]
    aims = sum(figure.verdict is Verdict.AIM for figure in measured)
    lines = [f"{len(measured) - len(missed)} of {len(measured)} floors met, {aims} of them with the aim."]
    return "\n".join([*lines, *(f"Floor missed: {path}" for path in missed)])


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def _bound(target: Target | None, name: str) -> str:
    if target is None:
        return ""
    return f"{'≤ ' if target.at_most else ''}{getattr(target, name):g}"


def _rates(figure: Figure) -> str:
    rates = [f"{leg} {_number(statistics.median(each))}/s" for leg, each in figure.rates.items()]
    return ", ".join([*rates, figure.note] if figure.note else rates)
