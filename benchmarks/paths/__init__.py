"""Every path that is measured, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.arguments import Scale
from benchmarks.paths import (
    asynchronous,
    budgets,
    coordination,
    expiry,
    forks,
    growth,
    listing,
    reads,
    snapshots,
    sqlite,
    steps,
    storage,
    streams,
    usage,
)
from benchmarks.races import Case
from benchmarks.sessions import WORKERS

__all__ = ["cases"]

_HOT = [*reads.CASES, *coordination.CASES, *usage.CASES, *streams.CASES, *snapshots.CASES]


# Expiry last: sweeping the large database leaves other statuses than the lists are measured on.
def cases(scale: Scale) -> Sequence[Case]:
    with_processes = (
        [race.with_processes(WORKERS) for race in _HOT] if scale.every_path_with_processes else []
    )
    return [
        *steps.CASES,
        *budgets.CASES,
        *_HOT,
        *forks.CASES,
        *with_processes,
        *asynchronous.CASES,
        *storage.CASES,
        *sqlite.CASES,
        *growth.CASES,
        *listing.CASES,
        *expiry.CASES,
    ]
