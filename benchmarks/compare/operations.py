"""What is measured: each operation makes its rows once, then any process may go on with them.

Public names of helix_store only: the same file runs on both checkouts.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from django.db import transaction

from benchmarks.payloads import STATES, message, staged_changes, state_of
from helix_store.core.types import SessionState, StepInfo
from helix_store.stores import DatabaseLockManager, DatabaseStateStore

__all__ = [
    "AcquireAndRelease",
    "AppendMessages",
    "GetMessages",
    "IsLocked",
    "LatestCheckpoint",
    "LoadState",
    "Operation",
    "SessionOperation",
    "SetStatus",
    "StageChanges",
    "Step",
    "StepInsideAtomic",
]

AGENT_TYPE = "compared"


class Operation:
    """One call in a loop, on the rows whose names start with its key."""

    def __init__(self, alias: str, key: str) -> None:
        self.alias = alias
        self.key = key

    def create(self) -> None:
        """Make the rows that the operation works on."""

    def prepare(self, count: int) -> None:
        """Get ready for so many calls."""

    def __call__(self) -> object:
        raise NotImplementedError

    def check(self) -> None:
        """Fail unless the calls did what they are measured for."""


class SessionOperation(Operation):
    """Works on a few sessions in turn."""

    SESSIONS = 4
    STEPS = 3
    """Of each session when it is made."""

    def __init__(self, alias: str, key: str, *, kib: int = 4) -> None:
        super().__init__(alias, key)
        self.store = DatabaseStateStore(alias)
        self.sessions = [f"{key}-{number}" for number in range(self.SESSIONS)]
        self.turns = itertools.cycle(self.sessions)
        self.kib = kib

    def create(self) -> None:
        for session_id in self.sessions:
            state = self.store.create_session(session_id, agent_type=AGENT_TYPE)
            for number in range(self.STEPS):
                state.custom_state = state_of(self.kib, number)
                step = StepInfo(f"made-{number}", number)
                self.store.save_state_and_promote_staging(session_id, state, [], step)


class LoadState(SessionOperation):
    def __call__(self) -> object:
        return self.store.load_state(next(self.turns))


class Step(SessionOperation):
    """The caller keeps the loaded states, changes two of 24 keys and saves with the last commit's version."""

    def __init__(self, alias: str, key: str, *, kib: int = 4, is_staged: bool = False) -> None:
        super().__init__(alias, key, kib=kib)
        self.is_staged = is_staged
        self.messages = [message(1), message(2)]
        self.changes = list(_changes(kib))
        self.versions: dict[str, int] = {}

    def prepare(self, count: int) -> None:
        self.numbers = iter(range(self.next_number, self.next_number + count))
        if self.is_staged:
            for number in range(self.next_number, self.next_number + count):
                for changes in staged_changes():
                    self.store.stage_changes(self._session_of(number), self._step_id(number), changes)
        self.next_number += count

    def __call__(self) -> object:
        number = next(self.numbers)
        session_id = self._session_of(number)
        state = self.states[session_id]
        step_count = number // self.SESSIONS
        state.custom_state.update(self.changes[step_count % STATES])
        state.step_count = step_count
        commit = self.store.save_state_and_promote_staging(
            session_id,
            state,
            self.messages,
            StepInfo(self._step_id(number), step_count),
            expected_version=self.versions[session_id],
        )
        self.versions[session_id] = commit.new_version
        return commit

    def check(self) -> None:
        promoted: dict[str, Any] = {}
        for changes in staged_changes() if self.is_staged else ():
            promoted |= changes["merge_changes"]
        for session_id, state in self.states.items():
            stored = self.store.load_state(session_id)
            assert stored is not None, session_id
            assert stored.version == self.versions[session_id]
            assert stored.custom_state == {**state.custom_state, **promoted}

    @cached_property
    def states(self) -> dict[str, SessionState]:
        """The states, loaded once in each process."""
        states = {}
        for session_id in self.sessions:
            state = self.store.load_state(session_id)
            assert state is not None, session_id
            states[session_id] = state
            self.versions[session_id] = state.version
        return states

    @cached_property
    def next_number(self) -> int:
        """Goes on where another process stopped: what the keys change to depends on it."""
        return max(state.step_count + 1 for state in self.states.values()) * self.SESSIONS

    def _session_of(self, number: int) -> str:
        return self.sessions[number % self.SESSIONS]

    def _step_id(self, number: int) -> str:
        return f"step-{number}"


class StepInsideAtomic(Step):
    def __call__(self) -> object:
        with transaction.atomic(using=self.alias):
            return super().__call__()


class SetStatus(SessionOperation):
    def __call__(self) -> object:
        changed = self.store.compare_and_set_status(next(self.turns), ["active", "running"], "active")
        assert changed.ok
        return changed


class AppendMessages(SessionOperation):
    def __init__(self, alias: str, key: str) -> None:
        super().__init__(alias, key)
        self.messages = [message(1), message(2)]

    def __call__(self) -> object:
        return self.store.append_messages(next(self.turns), self.messages)


class GetMessages(SessionOperation):
    SESSIONS = 1
    STORED = 2_000
    PAGE = 50

    def create(self) -> None:
        super().create()
        for _ in range(self.STORED // 500):
            self.store.append_messages(self.sessions[0], [message(1)] * 500)

    @cached_property
    def offsets(self) -> Iterator[int]:
        return itertools.cycle(range(0, self.STORED - self.PAGE, 457))

    def __call__(self) -> object:
        page = self.store.get_messages(self.sessions[0], offset=next(self.offsets), limit=self.PAGE)
        assert len(page.messages) == self.PAGE
        return page


class LatestCheckpoint(SessionOperation):
    STEPS = 10

    def __call__(self) -> object:
        return self.store.get_latest_checkpoint(next(self.turns))


class StageChanges(SessionOperation):
    """Two changes for each step; those of an earlier run are discarded before."""

    def __init__(self, alias: str, key: str) -> None:
        super().__init__(alias, key)
        self.changes = staged_changes()
        self.tag = uuid.uuid4().hex
        self.used: Sequence[int] = ()

    def prepare(self, count: int) -> None:
        for number in self.used:
            self.store.discard_staging(self._session_of(number), self._step_id(number))
        self.used = range((count + 1) // 2)
        self.turn = iter(itertools.product(self.used, self.changes))

    def __call__(self) -> object:
        number, changes = next(self.turn)
        self.store.stage_changes(self._session_of(number), self._step_id(number), changes)
        return None

    def _step_id(self, number: int) -> str:
        return f"step-{self.tag}-{number}"

    def _session_of(self, number: int) -> str:
        return self.sessions[number % self.SESSIONS]


class AcquireAndRelease(Operation):
    def __init__(self, alias: str, key: str) -> None:
        super().__init__(alias, key)
        self.manager = DatabaseLockManager(alias)
        self.names = itertools.cycle([f"{key}-{number}" for number in range(4)])

    def __call__(self) -> object:
        lock = self.manager.acquire(next(self.names))
        assert lock is not None
        return lock.release()


class IsLocked(AcquireAndRelease):
    def create(self) -> None:
        # Half of the names are held until long after the run.
        for _ in range(2):
            assert self.manager.acquire(next(self.names), ttl_ms=24 * 3_600_000) is not None

    def __call__(self) -> object:
        return self.manager.is_locked(next(self.names))


def _changes(kib: int) -> Iterator[dict[str, Any]]:
    """The two keys that each step of the cycle changes."""
    for number in range(STATES):
        before, after = state_of(kib, number - 1 + STATES), state_of(kib, number + STATES)
        changed = {key: value for key, value in after.items() if value != before[key]}
        assert len(changed) == 2, changed
        yield changed
