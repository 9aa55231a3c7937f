"""Every path that is measured, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paths import coordination, forks, reads, snapshots, steps, streams, usage
from benchmarks.races import Case

__all__ = ["CASES"]

CASES: Sequence[Case] = [
    *steps.CASES,
    *reads.CASES,
    *coordination.CASES,
    *usage.CASES,
    *streams.CASES,
    *snapshots.CASES,
    *forks.CASES,
]
