"""A campaign: many trials of one fault, each with a seed, their counts, and a report.

The tier chooses how many: 1 takes seconds and is part of the suite, 2 takes minutes, 3 runs at night::

    HELIX_FAULTS_TIER=2 python -m pytest tests/faults
    python -m tests.faults lost_commits --seed 17       # one trial again
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

__all__ = ["Campaign", "Trial", "campaign", "tier"]

_FIRST_SEED: Final = 1


def tier() -> int:
    return int(os.environ.get("HELIX_FAULTS_TIER", "1"))


@dataclass
class Trial:
    """One fault. What it draws from ``chance`` follows from its seed."""

    seed: int
    counts: Counter[str]
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)  # noqa: S311  the same draws for the same seed

    def count(self, outcome: str, by: int = 1) -> None:
        self.counts[outcome] += by


@dataclass
class Campaign:
    """``sizes`` are the numbers of trials by tier. A seed names ``per_seed`` trials, one after the other.

    ``HELIX_FAULTS_SECONDS`` ends it earlier; the report says how many trials were made of how many.
    """

    name: str
    database: str
    sizes: tuple[int, int, int] = (1, 1, 1)
    per_seed: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    """Measured figures, for the report."""
    trials: int = 0
    seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        given = os.environ.get("HELIX_FAULTS_COUNT")
        return int(given) if given else self.sizes[tier() - 1]

    @property
    def first_seed(self) -> int:
        return int(os.environ.get("HELIX_FAULTS_SEED", str(_FIRST_SEED)))

    @property
    def most_seconds(self) -> float:
        return float(os.environ.get("HELIX_FAULTS_SECONDS", "inf"))

    def seeds(self) -> Iterator[int]:
        for number in range(math.ceil(self.size / self.per_seed)):
            if number > 0 and time.monotonic() - self.began > self.most_seconds:
                return
            yield self.first_seed + number

    def batches(self, most: int) -> Iterator[list[int]]:
        """Batches of up to ``most`` seeds, for a campaign whose trials run in other processes.

        A batch is always finished, so a campaign whose time is limited begins with one seed.
        """
        seeds, size = self.seeds(), most if math.isinf(self.most_seconds) else 1
        while batch := list(islice(seeds, size)):
            yield batch
            size = min(2 * size, most)

    def run(self, trial: Callable[[Trial], None]) -> None:
        """Run every trial, and raise ``AssertionError`` with the seeds of those that failed."""
        for seed in self.seeds():
            self.check(seed, trial)
        self.require_success()

    def check(self, seed: int, trial: Callable[[Trial], None]) -> None:
        """Run one trial and keep its failure for the report."""
        faults = []
        try:
            trial(Trial(seed, self.counts))
        except Exception as exc:  # noqa: BLE001  a failure of the trial is a result
            faults.append((seed, f"{type(exc).__name__}: {exc}"))
        self.add(1, Counter(), faults)

    def add(self, trials: int, counts: Counter[str], faults: list[tuple[int, str]]) -> None:
        """Add trials that another process has run, and the errors of those that failed by seed."""
        self.trials += trials
        self.counts.update(counts)
        for seed, error in faults:
            self.failures.append({"seed": seed, "error": error, "replay": self.replay(seed)})

    def include(self, part: Campaign) -> None:
        """Add what another process has done."""
        self.trials += part.trials
        self.counts.update(part.counts)
        self.failures += part.failures

    def require_success(self) -> None:
        assert self.trials, "the campaign made no trial"
        lines = [f"{each['error']}\n  replay: {each['replay']}" for each in self.failures[:5]]
        assert not self.failures, f"{len(self.failures)} of {self.trials} trials failed:\n" + "\n".join(lines)

    def replay(self, seed: int) -> str:
        at = f" --tier {tier()}" if tier() > 1 else ""
        return f"python -m tests.faults {self.name} --database {self.database} --seed {seed}{at}"

    def report(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "database": self.database,
            "first_seed": self.first_seed,
            "trials": self.trials,
            "of": self.size,
            "seconds": round(self.seconds, 1),
            "per_minute": round(60 * self.trials / self.seconds) if self.seconds else None,
            "counts": dict(sorted(self.counts.items())),
            **self.facts,
            "failures": self.failures,
        }


@contextmanager
def campaign(
    name: str, database: str, *, sizes: tuple[int, int, int], per_seed: int = 1
) -> Iterator[Campaign]:
    """A campaign whose report is printed, and appended to the file ``HELIX_FAULTS_REPORT`` as a line."""
    made = Campaign(name, database, sizes, per_seed)
    try:
        yield made
    finally:
        made.seconds = time.monotonic() - made.began
        line = json.dumps(made.report())
        print(line)  # noqa: T201  pytest shows it with -s, and where a test fails
        if path := os.environ.get("HELIX_FAULTS_REPORT"):
            with Path(path).open("a") as file:
                file.write(line + "\n")
