"""Measuring legs in interleaved rounds: the machine is shared, so only ratios within a round count."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Leg", "Result", "run_in_process", "run_rounds", "timed"]


@dataclass(frozen=True)
class Leg:
    """One contestant: runs for about so many seconds and returns operations per second."""

    name: str
    run: Callable[[float], float]


@dataclass
class Result:
    """Operations per second of one leg, one figure a round."""

    name: str
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def ratios_to(self, limit: Result) -> list[float]:
        """How this leg did against another one, round by round."""
        return [own / other for own, other in zip(self.rates, limit.rates, strict=True)]


def run_rounds(legs: Sequence[Leg], *, rounds: int, seconds: float, seed: int = 1) -> dict[str, Result]:
    """Run every leg once a round, in another order each time."""
    results = {leg.name: Result(leg.name) for leg in legs}
    order = list(legs)
    shuffle = random.Random(seed).shuffle  # noqa: S311  an order, not a secret
    for leg in legs:
        leg.run(min(0.3, seconds))
    for _ in range(rounds):
        shuffle(order)
        for leg in order:
            results[leg.name].rates.append(leg.run(seconds))
    return results


def timed(operation: Callable[[], object], seconds: float) -> float:
    """Call an operation again and again; operations per second."""
    count = 0
    started = time.perf_counter()
    until = started + seconds
    while (now := time.perf_counter()) < until:
        operation()
        count += 1
    return count / (now - started)


def run_in_process(
    make_operation: Callable[[int], Callable[[], object]], processes: int
) -> Callable[[float], float]:
    """A leg of several processes at once; ``make_operation`` is called in each with its number."""

    def run(seconds: float) -> float:
        context = multiprocessing.get_context("spawn")
        start = context.Barrier(processes)
        rates = context.Queue()
        workers = [
            context.Process(target=_work, args=(make_operation, number, seconds, start, rates))
            for number in range(processes)
        ]
        for worker in workers:
            worker.start()
        total = sum(rates.get(timeout=seconds + 120) for _ in workers)
        for worker in workers:
            worker.join()
        return total

    return run


def _work(make_operation, number, seconds, start, rates) -> None:  # type: ignore[no-untyped-def]
    from benchmarks.server import configure_again

    configure_again()
    operation = make_operation(number)
    timed(operation, 0.2)
    start.wait(120)
    rates.put(timed(operation, seconds))
