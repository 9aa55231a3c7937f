"""Eight processes spend from shared budgets while they fail, lose locks and are killed: none is exceeded."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest

from helix_store.budgets import NOTHING, Amounts
from helix_store.exceptions import StoreBusy
from helix_store.stores import Store
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.faults.accounts import Account, accounts_of, faults_of
from tests.faults.campaign import Trial, campaign, tier
from tests.faults.crew import pause
from tests.faults.spenders import MOST_TOKENS, SESSIONS, TERM_MS, Tally, Told, dollars, spend
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, WorkerProcess

_WORKERS: Final = 8
_STEPS: Final = {1: 30, 2: 30, 3: 2_000}
"""Of each process, by tier."""
_ROOM: Final = 30 * MOST_TOKENS
"""By how many tokens a limit is raised after it has been reached."""
_STEPS_TO_A_KILL: Final = 48
"""The most steps of all processes between two kills."""
_LONGEST_PAUSE_SECONDS: Final = 0.2

_BUDGETS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "red tree": ({"scope": "tree", "value": "red"}, "both"),
    "blue tree": ({"scope": "tree", "value": "blue"}, "tokens"),
    "ada": ({"scope": "user", "value": "ada"}, "usd"),
    "each user": ({"scope": "user"}, "tokens"),
    "type 0": ({"scope": "agent_type", "value": "type-0"}, "both"),
    "each type": ({"scope": "agent_type"}, "usd"),
    "tenant": ({"scope": "tenant"}, "both"),
}
"""The scope of each budget, and whether it has a limit in dollars, in tokens or in both."""
_REPLACED: Final = "replaced"
"""A budget that is deleted and set again during the history. It has never been reached."""


class Worker:
    """A process that spends, with a successor after each kill."""

    def __init__(self, alias: str, tenant: str, steps: int) -> None:
        self.tally: Any = PROCESSES.RawArray("q", len(Tally))
        self._arguments = (alias, tenant)
        self._steps = steps
        self._ear: Connection
        self._process: WorkerProcess | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive

    def start(self, seed: int) -> None:
        self._ear, theirs = PROCESSES.Pipe(duplex=False)
        self._process = WorkerProcess(spend, *self._arguments, seed, self._steps, self.tally, theirs)
        theirs.close()

    def told(self) -> list[Told]:
        """Return what the process has told. Raises its error, if it has ended with one."""
        told = []
        with suppress(EOFError):
            while self._ear.poll():
                told.append(self._ear.recv())
        if self._process is not None and not self.is_alive:
            process, self._process = self._process, None
            process.outcome().unwrap()
        return told

    def kill(self) -> str | None:
        """Kill the process, and return the session that it had, if any."""
        if self._process is not None:
            self._process.kill()
            self._process = None
        session = self.tally[Tally.SESSION]
        self.tally[Tally.UNSURE] += self.tally[Tally.SPENDING]
        for figure in (Tally.SESSION, Tally.SPENDING, Tally.IN_A_STEP):
            self.tally[figure] = 0
        return [*SESSIONS][session - 1] if session else None


class History:
    """One history of spending, with everything that is done to the workers meanwhile."""

    def __init__(self, database: CommittedDatabase, tenant: str, trial: Trial) -> None:
        self._alias, self._tenant, self._trial = database.alias, tenant, trial
        self._chance = trial.chance
        self._store = Store(database.alias, tenant=tenant)
        self._seeds = iter(range(trial.seed * 100_000, (trial.seed + 1) * 100_000))
        self._workers = [Worker(self._alias, tenant, _STEPS[tier()]) for _ in range(_WORKERS)]
        self._limits = dict.fromkeys(_BUDGETS, _ROOM)
        self._told: list[Told] = []

    def run(self) -> None:
        for session_id, columns in SESSIONS.items():
            root, is_child, _ = session_id.partition("-")
            parent: dict[str, Any] = {"parent_session_id": root} if is_child else {}
            self._store.new_session(session_id, **columns, **parent)
        for name in _BUDGETS:
            self._set(name)
        self._replace()
        try:
            for worker in self._workers:
                worker.start(next(self._seeds))
            next_kill = self._next_kill()
            while any(worker.is_alive for worker in self._workers) and not self._faults():
                self._observe()
                if self._sum(Tally.STEPS) >= next_kill:
                    self._kill(self._chance.choice(self._workers))
                    next_kill = self._next_kill()
                if self._chance.random() < 0.02:
                    self._replace()
                pause(self._chance.uniform(0, _LONGEST_PAUSE_SECONDS))
            for worker in self._workers:
                self._told += worker.told()
        finally:
            for worker in self._workers:
                worker.kill()
        self._require_no_fault()
        self._require_sound_end()

    def _sum(self, figure: Tally) -> int:
        return sum(worker.tally[figure] for worker in self._workers)

    def _faults(self) -> list[str]:
        late = self._sum(Tally.LATE)
        return [fault.text for fault in self._told if not 0 < fault.excess <= late]

    def _require_no_fault(self) -> None:
        faults = self._faults()
        assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:5])

    def _next_kill(self) -> int:
        return self._sum(Tally.STEPS) + self._chance.randint(1, _STEPS_TO_A_KILL)

    def _observe(self) -> None:
        self._trial.count("observations")
        for worker in self._workers:
            self._told += worker.told()
        accounts = accounts_of(self._alias, self._tenant)
        self._told += [fault for account in accounts for fault in faults_of(account)]
        reached = {each.name for each in accounts if each.name in _BUDGETS and each.excess > -MOST_TOKENS}
        for name in sorted(reached):
            if self._chance.random() < 0.3:
                self._limits[name] += _ROOM
                self._set(name)
                self._trial.count("limits raised")

    def _set(self, name: str) -> None:
        place, limited = _BUDGETS[name]
        tokens = self._limits[name]
        limits: dict[str, Any] = {
            "limit_tokens": tokens if limited != "usd" else None,
            "limit_usd": dollars(tokens) if limited != "tokens" else None,
        }
        self._store.budgets.set_budget(name, **place, **limits)

    def _replace(self) -> None:
        try:
            self._store.budgets.delete_budget(_REPLACED)
            self._store.budgets.set_budget(_REPLACED, scope="tenant", limit_tokens=2**62)
            self._trial.count("budgets replaced")
        except StoreBusy:
            self._trial.count("budgets not replaced")

    def _kill(self, worker: Worker) -> None:
        if not worker.is_alive:
            return
        was_in_a_step = worker.tally[Tally.IN_A_STEP]
        self._told += worker.told()
        session_id = worker.kill()
        self._trial.count("kills in a step" if was_in_a_step else "kills between steps")
        if session_id is not None and self._chance.random() < 0.7:
            # The next worker takes the session over at once.
            self._store.locks.force_release(session_id)
            self._trial.count("locks broken after a kill")
        elif session_id is not None:
            self._trial.count("locks left to expire")
        worker.start(next(self._seeds))

    def _require_sound_end(self) -> None:
        sums = {figure: self._sum(figure) for figure in Tally if figure < Tally.SPENDING}
        for figure, count in sums.items():
            self._trial.count(figure.name.lower(), count)
        # A dead worker's hold ends with the term of its lock.
        pause(TERM_MS / 1_000)
        accounts = accounts_of(self._alias, self._tenant)
        self._told += [fault for account in accounts for fault in faults_of(account)]
        self._told += [Told(f"outlives its term: {each}") for each in accounts if each.held != NOTHING]
        (total,) = [each.spent for each in accounts if each.name == "tenant"]
        most = sums[Tally.TOLD] + sums[Tally.UNSURE] + sums[Tally.LATE]
        if not sums[Tally.TOLD] <= total.tokens <= most:
            self._told.append(Told(f"{total} was spent, and the workers spent {sums}"))
        self._require_no_fault()
        assert broken_invariants(CommittedDatabase(alias=self._alias, tenant=self._tenant)) == []


_SOUND: Final = Account(
    name="budget",
    value="",
    limit_usd=None,
    limit_tokens=10,
    spent=Amounts(7_000_000_000, 7),
    held=Amounts(0, 3),
    recorded=Amounts(7_000_000_000, 7),
    held_before=Amounts(0, 3),
    held_after=Amounts(0, 0),
)


def test_the_checker_finds_nothing_in_a_sound_account() -> None:
    assert list(faults_of(_SOUND)) == []


@for_each(
    "changes",
    [
        {"limit_tokens": 9},
        {"limit_usd": 6_999_999_999},
        {"recorded": Amounts(7_000_000_000, 6)},
        {"recorded": Amounts(7_000_000_001, 7)},
        {"held_before": Amounts(0, 2)},
        {"held_after": Amounts(0, 4)},
    ],
    ids=["tokens", "dollars", "too much spent", "too little spent", "held too long", "held too short"],
)
def test_the_checker_finds_a_fault_in_an_account(changes: dict[str, Any]) -> None:
    assert list(faults_of(_SOUND._replace(**changes)))


@pytest.mark.campaign
def test_no_budget_is_exceeded(committed_db: CommittedDatabase) -> None:
    name = "postgres" if committed_db.vendor == "postgresql" else "sqlite"
    with campaign("budgets", name, sizes=(1, 10, 1)) as made:
        made.run(lambda trial: History(committed_db, f"{committed_db.tenant}-{trial.seed}", trial).run())
    assert made.counts["steps"] == made.trials * _WORKERS * _STEPS[tier()], made.counts
