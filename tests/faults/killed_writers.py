"""Forked writers that are killed, and what they leave.

This runs in a process of its own, which has one thread and no open connection when it begins.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from django.db import connections

from tests.databases import CommittedDatabase
from tests.faults.forks import Forks, Tell
from tests.faults.writes import KEY, STORIES, Contents, Faces, write
from tests.faults.writes.mirrors import Mirror, mirror_of
from tests.faults.writes.rows import Rows
from tests.faults.writes.stories import public_contents
from tests.invariants import broken_invariants
from tests.postgres import folder_in_memory

__all__ = ["KILLS_PER_SEED", "FacesOf", "kill_writers"]

KILLS_PER_SEED: Final = 20
_SPARED: Final = 0.1
"""The share of the writers that are killed after their write."""
_LATEST: Final = 1.1
"""The last moment of a kill, by the time that such a write takes."""
_REOPENED: Final = 0.5
"""The share of the kills after which an SQLite file is opened, and not read through an open connection."""
_FIRST_RATIO: Final = 2.0
_PATIENCE_SECONDS: Final = 30.0

Faults = list[tuple[int, str]]
FacesOf = Callable[[str, str], Faces]
"""The stores of an alias and a tenant."""


def kill_writers(
    alias: str,
    tenant: str,
    seeds: Sequence[int],
    kills: int = KILLS_PER_SEED,
    *,
    kinds: Collection[str] = (),
    faces_of: FacesOf = Faces.of_database,
) -> tuple[Counter[str], Faults]:
    """Kill ``kills`` writers of one story for each seed; the writers get their stores from ``faces_of``.

    Returns counts, and the seeds that left what no whole writes leave. ``kinds`` limits the kinds of writes.
    """
    counts: Counter[str] = Counter()
    faults = []
    with _database_of_its_own(alias):
        durations = _Durations(alias, f"{tenant}-measured-{seeds[0]}")
        forks = Forks(lambda request, tell: _work(faces_of, request, tell))
        try:
            for seed in seeds:
                try:
                    _Killing(forks, durations, counts, alias, f"{tenant}-{seed}", seed, kinds).run(kills)
                except Exception as exc:  # noqa: BLE001  whatever it is belongs to the seed
                    faults.append((seed, f"{type(exc).__name__}: {exc}"))
        finally:
            forks.close()
            connections.close_all()
    return counts, faults


@contextmanager
def _database_of_its_own(alias: str) -> Iterator[None]:
    """On SQLite, a copy of the file: beside other stories, the killed writer is not the last to close it."""
    connection = connections[alias]
    if connection.vendor != "sqlite":
        yield
        return
    with tempfile.TemporaryDirectory(dir=folder_in_memory()) as folder:
        copy = f"{folder}/helix.sqlite3"
        with connection.cursor() as cursor:
            cursor.execute("VACUUM INTO %s", [copy])
        connection.close()
        connection.settings_dict["NAME"] = copy
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode")
            assert cursor.fetchone() == ("wal",)
        connection.close()
        yield


class _Killing:
    """One story, in which each writer is killed in its only write."""

    def __init__(
        self,
        forks: Forks,
        durations: _Durations,
        counts: Counter[str],
        alias: str,
        tenant: str,
        seed: int,
        kinds: Collection[str],
    ) -> None:
        self._chance = random.Random(seed)  # noqa: S311  the same draws for the same seed
        chosen = [[kind for kind in story.kinds if not kinds or kind in kinds] for story in STORIES.values()]
        weights = [len(each) for each in chosen]
        self._story, self._kinds = self._chance.choices(
            [*zip(STORIES.values(), chosen, strict=True)], weights
        )[0]
        self._forks, self._durations, self._counts = forks, durations, counts
        self._alias, self._tenant = alias, tenant
        self._faces = Faces.of_database(alias, tenant)
        self._rows = Rows(alias, tenant, self._story.tables)
        self._done: list[str] = []

    def run(self, kills: int) -> None:
        self._story.begin(self._faces, KEY)
        mirror = mirror_of(self._story, self._alias, f"{self._tenant}-twin")
        self._known = self._rows.read()
        self._contents = self._read_contents()
        assert self._contents == mirror.contents, _difference(mirror.contents, self._contents)
        for _ in range(kills):
            self._kill_one(self._chance.choice(self._kinds), mirror)
        database = CommittedDatabase(alias=self._alias, tenant=self._tenant)
        assert broken_invariants(database) == [], self._done

    def _kill_one(self, kind: str, mirror: Mirror) -> None:
        is_spared = self._chance.random() < _SPARED
        moment = self._chance.uniform(0, _LATEST)
        reopens = self._chance.random() < _REOPENED
        if reopens and connections[self._alias].vendor == "sqlite":
            # The writer alone has it open: who opens it next recovers it.
            connections[self._alias].close()
        request = (self._alias, self._tenant, self._story.name, kind)
        with self._forks.worker(request) as worker:
            backend = int(worker.hear())
            assert worker.hear() == "begun"
            seconds = _PATIENCE_SECONDS if is_spared else moment * self._durations.of(kind)
            acknowledged = worker.hear_within(seconds)
            worker.kill()
            # What was told before the end, perhaps after the wait.
            acknowledged = acknowledged or worker.hear_within(_PATIENCE_SECONDS)
        if backend:
            _wait_for_the_end_of(self._alias, backend)
        self._done.append(kind)
        self._counts["kills"] += 1
        if acknowledged is not None and is_spared:
            self._durations.add(kind, float(acknowledged))
        self._check(kind, mirror, is_acknowledged=acknowledged is not None)

    def _check(self, kind: str, mirror: Mirror, *, is_acknowledged: bool) -> None:
        rows = self._rows.read()
        is_unchanged = rows == self._known
        before = self._contents
        if not is_unchanged:
            self._known = rows
            self._contents = self._read_contents()
        found = self._contents

        def choose(states: Sequence[Contents]) -> int:
            assert len(states) <= 2 or kind in self._story.several, f"{kind} is several transactions"
            last = len(states) - 1
            possible = [last] if is_acknowledged else range(last, -1, -1)
            # Rows that nobody has changed are those of before.
            matching = [index for index in possible if states[index] == found]
            assert matching, f"after {self._done}:\n{_difference(states[possible[-1]], found)}"
            chosen = 0 if is_unchanged and 0 in matching else matching[0]
            self._count(kind, states, chosen, is_acknowledged=is_acknowledged)
            return chosen

        assert not is_unchanged or found == before
        mirror.follow(kind, choose)

    def _count(self, kind: str, states: Sequence[Contents], chosen: int, *, is_acknowledged: bool) -> None:
        if is_acknowledged:
            self._counts["killed after the write"] += 1
            return
        self._counts["killed within a write"] += 1
        self._counts[f"killed in {kind}"] += 1
        if states[0] == states[-1] and len(states) < 3:
            outcome = "nothing to change"
        else:
            outcome = {0: "all old", len(states) - 1: "all new"}.get(chosen, "between two transactions")
        self._counts[f"killed within a write: {outcome}"] += 1

    def _read_contents(self) -> Contents:
        return public_contents(self._faces) if self._story.has_memory else self._rows.contents(self._known)


class _Durations:
    """How long a write of each kind takes in a new process, by those that nobody disturbs.

    Until there was one of a kind, it is what it takes here by the ratio of other kinds.
    """

    def __init__(self, alias: str, tenant: str) -> None:
        self._here: dict[str, float] = {}
        self._there: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=9))
        self._ratios: deque[float] = deque([_FIRST_RATIO], maxlen=25)
        for story in STORIES.values():
            faces = Faces.of_database(alias, f"{tenant}-{story.name}")
            story.begin(faces, KEY)
            for kind in story.kinds:
                started = time.perf_counter()
                write(story, faces, kind)
                self._here[kind] = time.perf_counter() - started
        connections.close_all()

    def of(self, kind: str) -> float:
        measured = self._there[kind]
        return statistics.median(measured or [self._here[kind] * statistics.median(self._ratios)])

    def add(self, kind: str, seconds: float) -> None:
        self._there[kind].append(seconds)
        self._ratios.append(seconds / self._here[kind])


def _work(faces_of: FacesOf, request: tuple[str, str, str, str], tell: Tell) -> None:
    alias, tenant, story, kind = request
    faces = faces_of(alias, tenant)
    connection = connections[alias]
    connection.ensure_connection()
    tell(str(connection.connection.info.backend_pid if connection.vendor == "postgresql" else 0))
    tell("begun")
    started = time.perf_counter()
    write(STORIES[story], faces, kind)
    tell(str(time.perf_counter() - started))


def _wait_for_the_end_of(alias: str, backend: int) -> None:
    """Wait until the server has noticed the death of its client: until then it may commit."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with connections[alias].cursor() as cursor:
        while True:
            cursor.execute("SELECT 1 FROM pg_stat_get_activity(%s)", [backend])
            if cursor.fetchone() is None:
                return
            assert time.monotonic() < deadline, "the server has not noticed the death of the writer"
            time.sleep(0.0005)


def _difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    names = sorted({*expected, *found})
    return "\n".join(
        f"{name}:\n  expected {expected.get(name)}\n  found    {found.get(name)}"
        for name in names
        if expected.get(name) != found.get(name)
    )
