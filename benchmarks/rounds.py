"""Measuring legs in interleaved rounds: the machine is shared, so only ratios within a round count."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple, Protocol

__all__ = ["Leg", "Ran", "prepared_run", "ratios", "run_rounds"]

_SHARE_OF_A_WARM_UP = 0.25
_LARGEST_STEP = 50


class Ran(NamedTuple):
    operations: int
    seconds: float

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.operations / self.seconds


class Leg(Protocol):
    """One contestant."""

    def prepare(self, count: int) -> None:
        """Get ready for `run` with this count; not timed."""
        ...

    def run(self, count: int) -> Ran:
        """Do about so many operations: as many in each of its workers."""
        ...


def run_rounds(
    legs: Mapping[str, Leg],
    *,
    rounds: int,
    seconds: float,
    bounds: tuple[int, int | None] = (1, None),
    seed: int = 1,
) -> dict[str, list[float]]:
    """The rates of every leg, one a round; each round runs them all in another order.

    A leg is given a number of operations that took it about ``seconds`` before, within ``bounds``.
    """
    last = {name: _warmed_up(leg, seconds, bounds) for name, leg in legs.items()}
    rates: dict[str, list[float]] = {name: [] for name in legs}
    order = list(legs)
    shuffle = random.Random(seed).shuffle  # noqa: S311  an order, not a secret
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            last[name] = prepared_run(legs[name], _count(last[name] * seconds, bounds)).rate
            rates[name].append(last[name])
    return rates


def prepared_run(leg: Leg, count: int) -> Ran:
    leg.prepare(count)
    return leg.run(count)


def ratios(own: list[float], other: list[float]) -> list[float]:
    """How one leg did against another, round by round."""
    return [mine / theirs for mine, theirs in zip(own, other, strict=True)]


def _warmed_up(leg: Leg, seconds: float, bounds: tuple[int, int | None]) -> float:
    """The rate of a leg that has run for a moment already."""
    count = bounds[0]
    while True:
        rate = prepared_run(leg, count).rate
        wanted = _count(rate * seconds * _SHARE_OF_A_WARM_UP, bounds)
        if count >= wanted:
            return rate
        count = min(wanted, count * _LARGEST_STEP)


def _count(wanted: float, bounds: tuple[int, int | None]) -> int:
    least, most = bounds
    count = max(least, round(wanted))
    return count if most is None else min(count, most)
