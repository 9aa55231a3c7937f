"""The async API: 64 steps at once in one process, against as many threads that call the synchronous one."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.bench import Bench
from benchmarks.figures import Target
from benchmarks.operations import Operation, WithSettings
from benchmarks.races import Client, Comparison, Race
from benchmarks.sessions import create_sessions, sessions_of
from benchmarks.steps import Step, step_evidence

__all__ = ["CASES"]

CONCURRENT = 64
FEW = 8
_PREFIX = "concurrent"


class ThreadedSteps(Operation):
    """64 sessions, each one step after the other, on so many threads that keep their connections."""

    def __init__(self, worker: int, *, threads: int) -> None:
        self.steps = [Step(number, per_worker=1, prefix=_PREFIX) for number in range(CONCURRENT)]
        self.size = threads
        self.threads = ThreadPoolExecutor(threads)
        self.meeting = threading.Barrier(threads)

    def prepare(self, count: int) -> None:
        list(self.threads.map(self._connect, range(self.size)))
        for step in self.steps:
            step.prepare(count)

    def run(self, count: int) -> None:
        list(self.threads.map(Step.run, self.steps, shares(count)))

    def check(self) -> None:
        for step in self.steps:
            if step.last:
                step.check()

    def close(self) -> None:
        self.threads.shutdown()

    def _connect(self, number: int) -> None:
        # Each waits for all others, so that no thread does this twice.
        self.meeting.wait(60)
        assert self.steps[number].store.session_exists(self.steps[number].sessions[0])


class AsyncSteps(Operation):
    """64 sessions as 64 tasks of one event loop."""

    def __init__(self, worker: int) -> None:
        self.steps = [Step(number, per_worker=1, prefix=_PREFIX) for number in range(CONCURRENT)]
        self.loop = asyncio.new_event_loop()

    def prepare(self, count: int) -> None:
        self.loop.run_until_complete(self._connect())
        for step in self.steps:
            step.prepare(count)

    def run(self, count: int) -> None:
        self.loop.run_until_complete(self._run_all(count))

    def check(self) -> None:
        for step in self.steps:
            if step.last:
                step.check()

    def close(self) -> None:
        self.loop.close()

    async def _run_all(self, count: int) -> None:
        await asyncio.gather(*map(self._run_one, self.steps, shares(count)))

    async def _run_one(self, step: Step, count: int) -> None:
        for _ in range(count):
            session_id, state, info = step.next_request()
            commit = await step.store.asave_state_and_promote_staging(
                session_id, state, step.messages, info, expected_version=step.versions[session_id]
            )
            step.versions[session_id] = commit.new_version

    async def _connect(self) -> None:
        """Give every thread of the pool something to do."""
        calls = (step.store.asession_exists(step.sessions[0]) for step in self.steps * 4)
        assert all(await asyncio.gather(*calls))


def shares(count: int) -> list[int]:
    """How many steps each session makes, so that they add up."""
    return [count // CONCURRENT + (number < count % CONCURRENT) for number in range(CONCURRENT)]


def concurrent_sessions(bench: Bench) -> None:
    for number in range(CONCURRENT):
        create_sessions("default", sessions_of(number, per_worker=1, prefix=_PREFIX))


_EVIDENCE = step_evidence(prefix=_PREFIX)


def _threads(threads: int) -> Client:
    return Client(operation=partial(ThreadedSteps, threads=threads), evidence=_EVIDENCE)


def _tasks(threads: int) -> Client:
    make = partial(WithSettings, make=AsyncSteps, ASYNC_THREADS=threads)
    return Client(operation=make, evidence=_EVIDENCE)


CASES = [
    Race(
        contestants={
            "threads": _threads(CONCURRENT),
            "tasks": _tasks(CONCURRENT),
            f"{FEW} threads": _threads(FEW),
            f"tasks on {FEW} threads": _tasks(FEW),
        },
        comparisons=[
            Comparison(
                path=f"async API on {FEW} threads, {CONCURRENT} steps at once, against {CONCURRENT} threads",
                of=f"tasks on {FEW} threads",
                to="threads",
                target=Target(0.8, 0.95),
            ),
            Comparison(
                path=f"async API on {FEW} threads, {CONCURRENT} steps at once, against {FEW} threads",
                of=f"tasks on {FEW} threads",
                to=f"{FEW} threads",
            ),
            Comparison(
                path=f"async API on {CONCURRENT} threads, {CONCURRENT} steps at once, "
                f"against {CONCURRENT} threads",
                of="tasks",
                to="threads",
            ),
        ],
        needs=[concurrent_sessions],
    ),
]
