"""A race: the limit, our API and peers in the same rounds, and what is made of their rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from benchmarks.arguments import Scale
from benchmarks.bench import Bench
from benchmarks.crew import Crew
from benchmarks.evidence import Evidence
from benchmarks.figures import Figure, LeftOut, Target
from benchmarks.operations import MakeOperation
from benchmarks.pgbench import Pgbench, Script, Stage
from benchmarks.rounds import Leg, Ran, ratios, run_rounds
from benchmarks.server import server_settings, settle

__all__ = ["Case", "Client", "Comparison", "Contestant", "Limit", "Race"]


class Case(Protocol):
    """Something to measure: it knows its paths, and yields a figure for each that is wanted."""

    @property
    def paths(self) -> Sequence[str]: ...

    def measure(self, bench: Bench, wanted: Callable[[str], bool]) -> Iterator[Figure | LeftOut]: ...


class Contestant(Protocol):
    """Who runs a leg. ``missing`` is why it cannot, if so."""

    @property
    def missing(self) -> str | None: ...

    def enter(self, bench: Bench, workers: int, key: str, stack: ExitStack) -> Leg: ...


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The script by pgbench, as many clients as there are workers."""

    script: Script
    evidence: Evidence | None = None
    stage: Stage | None = None
    missing: str | None = None

    def enter(self, bench: Bench, workers: int, key: str, stack: ExitStack) -> Leg:
        leg = Pgbench(bench.cluster, self.script, clients=workers, stage=self.stage)
        return _with_evidence(leg, self.evidence)


@dataclass(frozen=True, kw_only=True)
class Client:
    """An operation of our API or of a peer, in processes of its own."""

    operation: MakeOperation
    evidence: Evidence | None = None
    missing: str | None = None

    def enter(self, bench: Bench, workers: int, key: str, stack: ExitStack) -> Leg:
        crew = bench.crew(workers)
        crew.make(key, self.operation)
        stack.callback(crew.close, key)
        return _with_evidence(_CrewLeg(crew, key), self.evidence)


@dataclass(frozen=True)
class _CrewLeg:
    crew: Crew
    key: str

    def prepare(self, count: int) -> None:
        self.crew.prepare(self.key, count)

    def run(self, count: int) -> Ran:
        return self.crew.run(self.key, count)


@dataclass(frozen=True)
class _ProvenLeg:
    leg: Leg
    evidence: Evidence

    def prepare(self, count: int) -> None:
        self.leg.prepare(count)

    def run(self, count: int) -> Ran:
        before = self.evidence.numbers()
        ran = self.leg.run(count)
        self.evidence.require(before, ran.operations)
        return ran


def _with_evidence(leg: Leg, evidence: Evidence | None) -> Leg:
    return leg if evidence is None else _ProvenLeg(leg, evidence)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A row of the table: the rate ``of`` one leg over that of another, or over a rate that is written down.

    With neither it is the milliseconds that an operation takes.
    """

    path: str
    of: str = "ours"
    to: str | None = "limit"
    recorded: float | None = None
    target: Target | None = None
    note: str = ""

    @property
    def legs(self) -> tuple[str, ...]:
        return (self.of,) if self.to is None else (self.of, self.to)

    def figure(self, rates: Mapping[str, list[float]]) -> Figure:
        own = rates[self.of]
        unit = "x"
        if self.to is not None:
            values = ratios(own, rates[self.to])
        elif self.recorded is not None:
            values = [rate / self.recorded for rate in own]
        else:
            values, unit = [1_000 / rate for rate in own], "ms"
        return Figure(
            path=self.path,
            values=values,
            unit=unit,
            target=self.target,
            rates={leg: rates[leg] for leg in self.legs},
            note=self.note,
        )


def _any_count(scale: Scale) -> tuple[int, int | None]:
    return 1, None


@dataclass(frozen=True, kw_only=True)
class Race:
    """Contestants by name.

    ``needs`` are prepared once a run. ``bounds`` are the fewest and the most operations of a leg in a round.
    """

    contestants: Mapping[str, Contestant]
    comparisons: Sequence[Comparison]
    needs: Sequence[Callable[[Bench], Any]] = ()
    workers: int = 1
    bounds: Callable[[Scale], tuple[int, int | None]] = _any_count
    server: Mapping[str, str] = field(default_factory=dict)
    aliases: Sequence[str] = ("default",)

    @property
    def paths(self) -> Sequence[str]:
        return [comparison.path for comparison in self.comparisons]

    def with_processes(self, workers: int) -> Self:
        """The same with so many processes; targets are for one."""
        return replace(
            self,
            workers=workers,
            comparisons=[
                replace(each, path=f"{each.path}, {workers} processes", target=None)
                for each in self.comparisons
            ],
        )

    def measure(self, bench: Bench, wanted: Callable[[str], bool]) -> Iterator[Figure | LeftOut]:
        possible = []
        for comparison in self.comparisons:
            if wanted(comparison.path):
                missing = [self.contestants[leg].missing for leg in comparison.legs]
                if any(missing):
                    yield LeftOut(comparison.path, "; ".join(filter(None, missing)))
                else:
                    possible.append(comparison)
        if possible:
            names = dict.fromkeys(leg for comparison in possible for leg in comparison.legs)
            rates = self._run(bench, list(names))
            for comparison in possible:
                yield comparison.figure(rates)

    def _run(self, bench: Bench, names: Sequence[str]) -> dict[str, list[float]]:
        for need in self.needs:
            bench.once(need)
        for alias in self.aliases:
            settle(alias)
        with ExitStack() as stack:
            if self.server:
                stack.enter_context(server_settings(bench.cluster, **self.server))
            legs = {
                name: self.contestants[name].enter(bench, self.workers, f"{self.paths[0]}: {name}", stack)
                for name in names
            }
            return run_rounds(
                legs, rounds=bench.scale.rounds, seconds=bench.scale.seconds, bounds=self.bounds(bench.scale)
            )
