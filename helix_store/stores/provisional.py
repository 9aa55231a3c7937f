"""Steps of a turn inside a transaction of the caller, which may still be rolled back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.core.types import SessionState


class Progress(NamedTuple):
    """The progress of a turn: the state, and whether a step has ended the run or the turn."""

    state: SessionState
    run_has_ended: bool = False
    was_ended: bool = False


@dataclass(eq=False, slots=True)
class _Step:
    before: Progress
    connection: BaseDatabaseWrapper
    is_committed: bool = field(default=False, init=False)

    def commit(self) -> None:
        self.is_committed = True

    @property
    def is_open(self) -> bool:
        """True if the step's transaction is still open and no savepoint around the step was rolled back.

        Django drops the hooks of a savepoint that is rolled back, and all hooks when COMMIT fails.
        """
        return any(entry[1] == self.commit for entry in self.connection.run_on_commit)


class ProvisionalSteps(list[_Step]):
    """The steps of a turn whose transaction was open when they ended, oldest first."""

    def add(self, connection: BaseDatabaseWrapper, before: Progress) -> None:
        """Track a step that has ended in an open transaction of ``connection``."""
        step = _Step(before, connection)
        self.append(step)
        if connection.in_atomic_block:
            transaction.on_commit(step.commit, using=connection.alias, robust=True)
        # With autocommit off, Django has no hooks: only the store knows the outcome.

    def settle(self) -> Progress | None:
        """Drop committed and lost steps, and return the progress before the first lost one.

        A step counts as lost if it was rolled back, or if nothing shows whether its COMMIT was executed.
        """
        for number, step in enumerate(self):
            if not (step.is_committed or step.is_open):
                del self[number:]
                return step.before
        self[:] = [step for step in self if not step.is_committed]
        return None


def may_wait_here() -> bool:
    """Return whether this code may query a database, which is not allowed in an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False
