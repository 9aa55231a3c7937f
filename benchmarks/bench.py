"""What every measurement of a run shares: the server, the worker processes, and how much to measure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from benchmarks.arguments import Scale
from benchmarks.crew import Crew
from benchmarks.server import create_database
from tests.postgres import PostgresCluster

__all__ = ["Bench"]


class Bench:
    def __init__(self, cluster: PostgresCluster, scale: Scale) -> None:
        self.cluster = cluster
        self.scale = scale
        self._crews: dict[int, Crew] = {}
        self._done: dict[Callable[..., Any], Any] = {}
        self._stack = ExitStack()
        create_database(cluster, "default")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def crew(self, workers: int) -> Crew:
        """So many worker processes, started when they are first asked for."""
        if workers not in self._crews:
            self._crews[workers] = self._stack.enter_context(Crew(workers))
        return self._crews[workers]

    def once(self, prepare: Callable[[Bench], Any]) -> Any:
        """Prepare something that several measurements need, the first time it is asked for."""
        if prepare not in self._done:
            self._done[prepare] = prepare(self)
        return self._done[prepare]
