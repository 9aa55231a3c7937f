"""SQLite: a step that survives a power cut against plain sqlite3, and eight writers at once."""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from django.core.management import call_command
from django.db import connections

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Target
from benchmarks.operations import MakeOperation, Operation
from benchmarks.payloads import STATES, message, state_of
from benchmarks.races import Case, Client, Comparison, Race
from benchmarks.sessions import WORKERS, create_sessions, sessions_of
from benchmarks.steps import Step, step_evidence
from helix_store.exceptions import StoreBusy, StoreTimeout

__all__ = ["CASES"]

_SESSIONS_PER_WRITER = 25
_PLAIN_SCHEMA = """
CREATE TABLE IF NOT EXISTS session (
    id TEXT PRIMARY KEY, agent_type TEXT NOT NULL, status TEXT NOT NULL, version INTEGER NOT NULL,
    message_count INTEGER NOT NULL, updated_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS session_list ON session (agent_type, status, updated_at, id);
CREATE TABLE IF NOT EXISTS message (
    session_id TEXT, seq INTEGER, role TEXT NOT NULL, content TEXT NOT NULL, created_at REAL NOT NULL,
    PRIMARY KEY (session_id, seq)
);
CREATE TABLE IF NOT EXISTS checkpoint (
    session_id TEXT, version INTEGER, state TEXT NOT NULL, created_at REAL NOT NULL,
    PRIMARY KEY (session_id, version)
);
"""


class PlainStep(Operation):
    """The facts of a step by Python's own sqlite3: texts that are encoded already, nothing checked."""

    def __init__(self, worker: int) -> None:
        file = f"{connections['sqlite'].settings_dict['NAME']}.plain"
        self.connection = sqlite3.connect(file, isolation_level=None)
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            self.connection.execute(f"PRAGMA {pragma}")
        self.connection.executescript(_PLAIN_SCHEMA)
        self.sessions = sessions_of(worker)
        self.connection.executemany(
            "INSERT OR REPLACE INTO session VALUES (?, 'bench', 'active', 1, 0, 0)",
            [(session_id,) for session_id in self.sessions],
        )
        self.states = [json.dumps(state_of(4, step)) for step in range(STATES)]
        self.messages = [json.dumps(message(number)) for number in (1, 2)]
        self.numbers = itertools.count(1)
        self.last = 0

    def __call__(self) -> None:
        self.last = number = next(self.numbers)
        session_id = self.sessions[number % len(self.sessions)]
        execute, now = self.connection.execute, time.time()
        execute("BEGIN IMMEDIATE")
        version, count = execute(
            """
            UPDATE session SET version = version + 1, message_count = message_count + 2, updated_at = ?
            WHERE id = ? RETURNING version, message_count""",
            (now, session_id),
        ).fetchone()
        for back, text in zip((1, 0), self.messages, strict=True):
            execute(
                "INSERT INTO message VALUES (?, ?, 'assistant', ?, ?)", (session_id, count - back, text, now)
            )
        state = self.states[number // len(self.sessions) % STATES]
        execute("INSERT INTO checkpoint VALUES (?, ?, ?, ?)", (session_id, version, state, now))
        execute("COMMIT")

    def check(self) -> None:
        counts = [
            self.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("message", "checkpoint")
        ]
        assert counts == [2 * self.last, self.last]

    def close(self) -> None:
        self.connection.close()


class Writer(Step):
    """Steps for so many seconds, with a count of those that were refused because others wrote."""

    def __init__(self, worker: int, *, seconds: float) -> None:
        super().__init__(worker, alias="sqlite", per_worker=_SESSIONS_PER_WRITER, prefix="w")
        self.seconds = seconds
        self.steps = self.refused = 0
        self.longest = 0.0

    def run(self, count: int) -> None:
        until = time.monotonic() + self.seconds
        while (started := time.monotonic()) < until:
            try:
                self()
                self.steps += 1
            except (StoreBusy, StoreTimeout):
                self.refused += 1
            self.longest = max(self.longest, time.monotonic() - started)

    def report(self) -> tuple[int, int, float]:
        return self.steps, self.refused, self.longest


class ThreadedWriters(Operation):
    """All writers as threads of one process."""

    def __init__(self, worker: int, *, seconds: float) -> None:
        self.writers = [Writer(number, seconds=seconds) for number in range(WORKERS)]

    def prepare(self, count: int) -> None:
        for writer in self.writers:
            writer.prepare(count)

    def run(self, count: int) -> None:
        together = threading.Barrier(WORKERS)

        def write(writer: Writer) -> None:
            together.wait(60)
            writer.run(count)

        with ThreadPoolExecutor(WORKERS) as threads:
            list(threads.map(write, self.writers))

    def check(self) -> None:
        for writer in self.writers:
            writer.check()

    def report(self) -> tuple[int, int, float]:
        steps, refused, longest = zip(*(writer.report() for writer in self.writers), strict=True)
        return sum(steps), sum(refused), max(longest)


@dataclass(frozen=True)
class Writers:
    """How often writers are refused, and how long they wait, when all of them write all the time."""

    kind: str
    make: Callable[..., Operation]
    processes: int

    @property
    def paths(self) -> Sequence[str]:
        return [f"SQLite, {WORKERS} {self.kind} writing at once: locked errors"]

    def measure(self, bench: Bench, wanted: Callable[[str], bool]) -> Iterator[Figure]:
        if not wanted(self.paths[0]):
            return
        bench.once(sqlite_database)
        evidence = step_evidence("sqlite", "w")
        operation: MakeOperation = partial(self.make, seconds=bench.scale.sqlite_seconds)
        crew, key = bench.crew(self.processes), self.paths[0]
        crew.make(key, operation)
        crew.prepare(key, 1)
        before = evidence.numbers()
        ran = crew.run(key, 1)
        reports = crew.report(key)
        crew.close(key)
        steps, refused, longest = zip(*reports, strict=True)
        evidence.require(before, sum(steps))
        yield Figure(
            path=self.paths[0],
            values=[sum(refused)],
            unit="errors",
            target=Target(0, 0, at_most=True),
            note=(
                f"{sum(steps) / ran.seconds:,.0f} steps/s for {ran.seconds:.0f} s, "
                f"the longest took {max(longest):.1f} s"
            ),
        )


def sqlite_database(bench: Bench) -> None:
    call_command("migrate", database="sqlite", verbosity=0, skip_checks=True)
    create_sessions("sqlite", sessions_of(0))
    for worker in range(WORKERS):
        create_sessions("sqlite", sessions_of(worker, per_worker=_SESSIONS_PER_WRITER, prefix="w"))
    connections["sqlite"].close()


CASES: Sequence[Case] = [
    Race(
        contestants={
            "plain sqlite3": Client(operation=PlainStep),
            "ours": Client(operation=partial(Step, alias="sqlite"), evidence=step_evidence("sqlite")),
        },
        comparisons=[
            Comparison(path="SQLite step 4 KB, synchronous FULL", to="plain sqlite3", target=Target(0.3, 0.4))
        ],
        needs=[sqlite_database],
        aliases=(),
    ),
    Writers("processes", Writer, WORKERS),
    Writers("threads", ThreadedWriters, 1),
]
