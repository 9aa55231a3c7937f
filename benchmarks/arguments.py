"""The command line, and how much of everything a run measures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["FULL", "QUICK", "Options", "Scale", "parse_arguments"]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """``seconds`` are for each leg and round; ``expired`` is the most sessions of one expiry sweep."""

    rounds: int
    seconds: float
    sessions: int
    expired: int
    checkpoints: int
    sqlite_seconds: int
    every_path_with_processes: bool


FULL = Scale(
    rounds=5,
    seconds=2,
    sessions=1_000_000,
    expired=20_000,
    checkpoints=1_000,
    sqlite_seconds=60,
    every_path_with_processes=True,
)
QUICK = Scale(
    rounds=3,
    seconds=0.5,
    sessions=100_000,
    expired=2_000,
    checkpoints=200,
    sqlite_seconds=6,
    every_path_with_processes=False,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    scale: Scale
    is_quick: bool
    only: tuple[str, ...]
    json: Path | None
    commit_delay: int = 0
    """Microseconds by which every commit takes longer than the disk needs."""

    def wants(self, path: str) -> bool:
        """Whether a path was asked for: without ``--only`` all are."""
        return not self.only or any(text.lower() in path.lower() for text in self.only)

    def describe(self) -> str:
        """One or two lines that say what kind of run this is."""
        scale = self.scale
        lines = (
            f"{scale.rounds} interleaved rounds of {scale.seconds:g} s a leg; "
            f"{scale.sessions:,} sessions in the large table."
        )
        if self.commit_delay:
            lines += f" Every commit takes {self.commit_delay} µs more than the disk needs."
        if self.is_quick:
            lines = (
                f"QUICK RUN, rough figures: {lines}\nLess of everything than in a full run: "
                f"SQLite's writers for {scale.sqlite_seconds} s, at most {scale.expired:,} expired sessions, "
                f"{scale.checkpoints:,} checkpoints, 8 processes only where there is a target for them."
            )
        return lines


def parse_arguments(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Ratios of our API to the database's own limit and to peers, and their spread.",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything, within five minutes")
    parser.add_argument("--rounds", type=_whole, help=f"interleaved rounds ({FULL.rounds}, {QUICK.rounds})")
    parser.add_argument(
        "--seconds", type=_positive, help=f"for each leg and round ({FULL.seconds:g}, {QUICK.seconds:g})"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="paths whose name holds this; repeatable"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--commit-delay",
        type=_whole,
        default=0,
        metavar="MICROSECONDS",
        help="let every commit of PostgreSQL take longer, as on a slower disk",
    )
    given = parser.parse_args(arguments)
    chosen = {name: getattr(given, name) for name in ("rounds", "seconds") if getattr(given, name)}
    return Options(
        scale=replace(QUICK if given.quick else FULL, **chosen),
        is_quick=given.quick,
        only=tuple(given.only),
        json=given.json,
        commit_delay=given.commit_delay,
    )


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("more than 0")
    return value
