"""The three measurements: rates in interleaved rounds, client instructions, bytes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.compare.checkouts import Checkout, WorkerProcess

__all__ = ["BASE", "NEW", "Rates", "Scale", "bytes_of_a_step", "instructions", "rates"]

NEW, BASE = "new", "base"

_WARM_UP = 24
_COUNTED = 84
"""Four sessions, and of each a whole cycle of a full state and the 20 deltas that may build on it."""
_WARM_UP_OF_BYTES, _STEPS_OF_BYTES = 210, 420
"""Of 20 sessions in turn. A page that changes for the first time since a checkpoint goes to the log whole."""
_WAL = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"
_TABLES = """
    SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
    WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"""


@dataclass(frozen=True)
class Scale:
    """``seconds`` are for each side and round."""

    rounds: int
    seconds: float


@dataclass(frozen=True)
class Rates:
    """Operations per second, and seconds of the processor for one operation, of each side, one a round."""

    per_second: Mapping[str, Sequence[float]]
    cpu: Mapping[str, Sequence[float]]

    @property
    def ratios(self) -> list[float]:
        return _ratios(self.per_second)

    @property
    def cpu_ratio(self) -> float:
        return statistics.median(_ratios(self.cpu))


def rates(workers: Mapping[str, WorkerProcess], path: str, scale: Scale, chance: random.Random) -> Rates:
    """Run both sides in each round, in an order that differs; both do the same number of operations."""
    count = _count(workers, path, scale.seconds)
    per_second: dict[str, list[float]] = {side: [] for side in workers}
    cpu: dict[str, list[float]] = {side: [] for side in workers}
    order = list(workers)
    for _ in range(scale.rounds):
        chance.shuffle(order)
        for side in order:
            seconds, cpu_seconds = workers[side].ask("run", path, count)
            per_second[side].append(count / seconds)
            cpu[side].append(cpu_seconds / count)
    _ask_all(workers, "check", path, 0)
    return Rates(per_second, cpu)


def instructions(workers: Mapping[str, WorkerProcess], path: str) -> dict[str, float]:
    """The instructions of each side's process for one operation; the workers run under callgrind."""
    _ask_all(workers, "run", path, _WARM_UP)
    counted = _ask_all(workers, "count", path, _COUNTED)
    return {side: total / _COUNTED for side, total in counted.items()}


def bytes_of_a_step(checkout: Checkout, worker: WorkerProcess, path: str) -> tuple[float, float]:
    """What one step adds to the write-ahead log and to the tables, while nothing else writes."""
    worker.ask("create", path)
    checkout.settle()
    worker.ask("run", path, _WARM_UP_OF_BYTES)
    wal, tables = checkout.number(_WAL), checkout.number(_TABLES)
    worker.ask("run", path, _STEPS_OF_BYTES)
    written = checkout.number(_WAL) - wal, checkout.number(_TABLES) - tables
    return written[0] / _STEPS_OF_BYTES, written[1] / _STEPS_OF_BYTES


def _count(workers: Mapping[str, WorkerProcess], path: str, seconds: float) -> int:
    """As many operations as take the faster side about so long, once both are warm."""
    for side in workers:
        workers[side].ask("run", path, _WARM_UP)
    taken = min(workers[side].ask("run", path, _WARM_UP)[0] for side in workers)
    return max(4, round(_WARM_UP * seconds / float(taken)))


def _ask_all(workers: Mapping[str, WorkerProcess], verb: str, path: str, count: int) -> dict[str, float]:
    """Ask all sides at once."""
    for worker in workers.values():
        worker.send(verb, path, count)
    return {side: worker.receive() for side, worker in workers.items()}


def _ratios(values: Mapping[str, Sequence[float]]) -> list[float]:
    return [new / base for new, base in zip(values[NEW], values[BASE], strict=True)]
