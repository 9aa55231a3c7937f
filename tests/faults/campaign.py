"""A campaign: many trials of one fault, each with a seed, their counts, and a report.

The tier chooses how many: 1 takes seconds and is part of the suite, 2 takes minutes, 3 runs at night::

    HELIX_FAULTS_TIER=2 python -m pytest tests/faults
    python -m tests.faults lost_commits --seed 17       # one trial again
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["Campaign", "Trial", "campaign"]

_FIRST_SEED: Final = 1


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
    """``sizes`` are the numbers of trials by tier."""

    name: str
    database: str
    sizes: tuple[int, int, int]
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    trials: int = 0
    seconds: float = 0.0

    @property
    def size(self) -> int:
        given = os.environ.get("HELIX_FAULTS_COUNT")
        return int(given) if given else self.sizes[int(os.environ.get("HELIX_FAULTS_TIER", "1")) - 1]

    @property
    def first_seed(self) -> int:
        return int(os.environ.get("HELIX_FAULTS_SEED", str(_FIRST_SEED)))

    def seeds(self) -> Iterator[int]:
        return iter(range(self.first_seed, self.first_seed + self.size))

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

    def require_success(self) -> None:
        assert self.trials, "the campaign made no trial"
        lines = [f"{each['error']}\n  replay: {each['replay']}" for each in self.failures[:5]]
        assert not self.failures, f"{len(self.failures)} of {self.trials} trials failed:\n" + "\n".join(lines)

    def replay(self, seed: int) -> str:
        return f"python -m tests.faults {self.name} --database {self.database} --seed {seed}"

    def report(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "database": self.database,
            "first_seed": self.first_seed,
            "trials": self.trials,
            "seconds": round(self.seconds, 1),
            "per_minute": round(60 * self.trials / self.seconds) if self.seconds else None,
            "counts": dict(sorted(self.counts.items())),
            "failures": self.failures,
        }


@contextmanager
def campaign(name: str, database: str, *, sizes: tuple[int, int, int]) -> Iterator[Campaign]:
    """A campaign whose report is printed, and appended to the file ``HELIX_FAULTS_REPORT`` as a line."""
    made = Campaign(name, database, sizes)
    started = time.monotonic()
    try:
        yield made
    finally:
        made.seconds = time.monotonic() - started
        line = json.dumps(made.report())
        print(line)  # noqa: T201  pytest shows it with -s, and where a test fails
        if path := os.environ.get("HELIX_FAULTS_REPORT"):
            with Path(path).open("a") as file:
                file.write(line + "\n")
