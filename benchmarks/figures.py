"""What a measurement comes to: one value a round, a target, and whether it is met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Figure", "LeftOut", "Target", "Verdict"]


class Verdict(StrEnum):
    AIM = "aim"
    FLOOR = "floor"
    MISSED = "no"
    NOT_ASKED = ""


@dataclass(frozen=True)
class Target:
    """The floor has to be met and the aim is wanted; ``at_most`` when smaller is better."""

    floor: float
    aim: float
    at_most: bool = False

    def verdict(self, value: float) -> Verdict:
        for bound, verdict in ((self.aim, Verdict.AIM), (self.floor, Verdict.FLOOR)):
            if value <= bound if self.at_most else value >= bound:
                return verdict
        return Verdict.MISSED


@dataclass(frozen=True, kw_only=True)
class Figure:
    """``rates`` are the operations per second of each leg, one a round; ``note`` says what to know first."""

    path: str
    values: Sequence[float]
    unit: str = "x"
    target: Target | None = None
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def lowest(self) -> float:
        return min(self.values)

    @property
    def highest(self) -> float:
        return max(self.values)

    @property
    def verdict(self) -> Verdict:
        return Verdict.NOT_ASKED if self.target is None else self.target.verdict(self.median)

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "unit": self.unit,
            "median": self.median,
            "lowest": self.lowest,
            "highest": self.highest,
            "values": list(self.values),
            "floor": self.target and self.target.floor,
            "aim": self.target and self.target.aim,
            "smaller_is_better": bool(self.target and self.target.at_most),
            "met": self.verdict.value,
            "rates": {leg: list(rates) for leg, rates in self.rates.items()},
            "note": self.note,
        }


@dataclass(frozen=True)
class LeftOut:
    """A path that could not be measured here, and why."""

    path: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"path": self.path, "left_out": self.reason}
