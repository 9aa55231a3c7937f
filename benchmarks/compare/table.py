"""The printed tables, and the paths that are outside of their bounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.compare.measure import BASE, NEW, Rates
from benchmarks.compare.names import is_sqlite

__all__ = ["BYTES_HEADER", "HEADER", "Row", "bytes_row", "row", "summary"]

BOUND, SQLITE_BOUND = 0.03, 0.10
DEVIATIONS = 3
"""By so many standard deviations of a coin the slower rounds are more than half: 42 of 60, 17 of 20."""

HEADER = """\
| path | rate new/base (median, middle half) | base, per second | client new/base | client of the base |
|---|---|---:|---:|---:|"""
BYTES_HEADER = """\
| path | WAL new | WAL base | new/base | tables new | tables base | new/base |
|---|---:|---:|---:|---:|---:|---:|"""


@dataclass(frozen=True)
class Row:
    """``instructions`` of an operation by side; without them the client is judged by its processor time."""

    name: str
    rates: Rates
    instructions: Mapping[str, float] | None

    @property
    def client_ratio(self) -> float:
        if self.instructions:
            return self.instructions[NEW] / self.instructions[BASE]
        return self.rates.cpu_ratio

    @property
    def quartiles(self) -> tuple[float, float, float]:
        low, median, high = statistics.quantiles(self.rates.ratios, n=4)
        return low, median, high

    @property
    def is_outside(self) -> bool:
        return abs(self.client_ratio - 1) > (SQLITE_BOUND if is_sqlite(self.name) else BOUND)

    @property
    def is_slower(self) -> bool:
        """Whether more rounds were slower than the base's than chance explains."""
        rounds = len(self.rates.ratios)
        slower = sum(ratio < 1 for ratio in self.rates.ratios)
        return slower - rounds / 2 >= DEVIATIONS * math.sqrt(rounds) / 2


def row(each: Row) -> str:
    low, median, high = each.quartiles
    rate = statistics.median(each.rates.per_second[BASE])
    return (
        f"| {each.name} | {median:.3f} ({low:.3f} to {high:.3f}) | {rate:,.0f} "
        f"| {each.client_ratio:.4f} | {_base_client(each)} |"
    )


def bytes_row(name: str, new: tuple[float, float], base: tuple[float, float]) -> str:
    cells = [
        f"{mine:,.0f} B | {theirs:,.0f} B | {mine / theirs:.3f}"
        for mine, theirs in zip(new, base, strict=True)
    ]
    return f"| {name} | {' | '.join(cells)} |"


def summary(rows: Sequence[Row]) -> str:
    """Two lines: the rates that fell, and the paths whose client is outside of its bound."""
    slower = [f"{each.name} {each.quartiles[1]:.3f}" for each in rows if each.is_slower]
    outside = [f"{each.name} {each.client_ratio:.3f}" for each in rows if each.is_outside]
    return (
        "Slower in more rounds than chance explains (measure these again with --only): "
        f"{'; '.join(slower) or 'no path'}.\n"
        f"Client outside of {BOUND:.0%} (PostgreSQL) or {SQLITE_BOUND:.0%} (SQLite): "
        f"{'; '.join(outside) or 'no path'}."
    )


def _base_client(each: Row) -> str:
    if each.instructions:
        return f"{each.instructions[BASE]:,.0f} instructions"
    return f"{statistics.median(each.rates.cpu[BASE]) * 1e6:,.0f} µs"
