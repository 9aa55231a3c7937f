"""A branch has the items that were committed before its checkpoint, also where the workers' clocks differ.

Workers whose clocks are up to three seconds apart take turns. A model keeps what each checkpoint has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from helix_store.core import moments
from helix_store.core.types import SessionState, StepInfo
from helix_store.items import ItemLog
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.transfer.files import exported, imported

_CLOCKS: Final = (-3.0, -0.5, 0.0, 2.0, 3.0)
_CALLS: Final = ("append", "append", "put", "pop", "step", "step", "save", "restore", "drop", "branch")
_CALLS_PER_TRIAL: Final = 24
_LANES: Final = ("", "other")
_SESSION: Final = "session"

Items = dict[str, list[Any]]


@contextmanager
def clock_of(worker: float) -> Iterator[None]:
    """The clock of the machine, as one worker has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "now", lambda: datetime.now(UTC) + timedelta(seconds=worker))
        yield


def items_of(alias: str, tenant: str, session_id: str) -> Items:
    logs = {lane: ItemLog(session_id, lane, using=alias, tenant=tenant) for lane in _LANES}
    return {lane: [item.payload for item in log.tail()] for lane, log in logs.items()}


class Story:
    """Calls on one session, and which items each of its checkpoints has seen."""

    def __init__(self, alias: str, tenant: str, trial: Trial) -> None:
        self.alias, self.tenant, self.trial = alias, tenant, trial
        self.store = DatabaseStateStore(alias, tenant=tenant)
        self.store.create_session(_SESSION, agent_type="agent")
        self.seen: dict[str, set[str]] = {}
        self.number = 0

    def call(self) -> None:
        self.number += 1
        name, lane = self.trial.chance.choice(_CALLS), self.trial.chance.choice(_LANES)
        log = ItemLog(_SESSION, lane, using=self.alias, tenant=self.tenant)
        with clock_of(self.trial.chance.choice(_CLOCKS)):
            match name:
                case "append":
                    log.append([f"item {self.number}"])
                case "put":
                    log.put(f"key {self.number}", f"item {self.number}")
                case "pop":
                    log.pop()
                case "step":
                    self._step()
                case "save":
                    self.store.save_state(_SESSION, self._state())
                case "restore" if self.seen:
                    self.store.restore_checkpoint(_SESSION, self._any_checkpoint())
                    left = {head.checkpoint_id for head in self.store.list_checkpoints(_SESSION).items}
                    self.seen = {name: items for name, items in self.seen.items() if name in left}
                case "drop" if self.seen:
                    dropped = self._any_checkpoint()
                    self.store.delete_checkpoint(_SESSION, dropped)
                    del self.seen[dropped]
                case "branch":
                    self.check_branches()
        self.trial.count(name)

    def check_branches(self) -> None:
        """Branch from each checkpoint, and from the latest one without naming it."""
        newest = self.store.get_latest_checkpoint(_SESSION)
        branches: dict[str | None, set[str] | None] = dict(self.seen.items())
        branches[None] = None if newest is None else self.seen[newest.checkpoint_id]
        own = items_of(self.alias, self.tenant, _SESSION)
        for checkpoint_id, seen in branches.items():
            branch = self.store.branch_session(_SESSION, checkpoint_id).session_id
            found = items_of(self.alias, self.tenant, branch)
            expected = {lane: [i for i in items if seen is None or i in seen] for lane, items in own.items()}
            assert found == expected, f"a branch has {found}, and should have {expected}"
            self.store.delete_session(branch)
            self.trial.count("compared")

    def export_and_import(self) -> None:
        place = CommittedDatabase(alias=self.alias, tenant=self.tenant)
        data = exported(place)
        self.store.delete_session(_SESSION)
        summary, _ = imported(place, data)
        assert summary.sessions == 1, summary

    def _step(self) -> None:
        step = StepInfo(f"step {self.number}", self.number)
        commit = self.store.save_state_and_promote_staging(_SESSION, self._state(), [], step)
        items = items_of(self.alias, self.tenant, _SESSION)
        self.seen[commit.checkpoint_id] = {item for of_lane in items.values() for item in of_lane}

    def _state(self) -> SessionState:
        state = self.store.load_state(_SESSION)
        assert state is not None
        return state

    def _any_checkpoint(self) -> str:
        return self.trial.chance.choice(sorted(self.seen))


def tell(database: CommittedDatabase, trial: Trial) -> None:
    story = Story(database.alias, f"{database.tenant}-{trial.seed}", trial)
    for _ in range(_CALLS_PER_TRIAL):
        story.call()
    story.check_branches()
    story.export_and_import()
    story.check_branches()


@pytest.mark.campaign
def test_a_branch_takes_no_item_by_a_clock(committed_db: CommittedDatabase) -> None:
    name = "sqlite" if committed_db.vendor == "sqlite" else "postgres"
    with campaign("skewed_branches", name, sizes=(3, 200, 10_000)) as made:
        made.run(lambda trial: tell(committed_db, trial))
    assert made.counts["compared"], made.counts
