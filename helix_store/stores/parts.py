"""The stores of one database and tenant that a handle needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.budgets.store import BudgetStoreBase
from helix_store.core.approvals import ApprovedCall
from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.dicts import AnyMessage
from helix_store.core.limits import Limits
from helix_store.core.manager_contracts import LockManager
from helix_store.core.types import SessionState, StagedChanges, StepCommit, StepInfo
from helix_store.sessions.requests import OpenedStep, Reception, StagedRow
from helix_store.sessions.rules import DEFAULT_STEP

__all__ = ["CommittedStep", "HasParts", "Parts", "StepWrite", "default_step_id"]

CommittedStep: TypeAlias = tuple[StepCommit, dict[str, Any]]
"""A commit, and the custom state stored with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWrite:
    """A step to commit for a handle, and the calls that belong to it.

    ``staged`` holds the step's own staged changes and ``uses`` the approvals that it uses, both by tool call
    id; ``staged_rows`` holds the rows of these changes, if all rows are known. ``after`` is called once the
    step is written, unless an earlier step with the same operation id was found; ``record`` is called last in
    either case, and records the step's usage. With a ``reception``, the commit receives due posts, if the
    store has posts.
    """

    session_id: str
    state: SessionState
    messages: Sequence[AnyMessage]
    info: StepInfo
    expected_version: int
    fencing_token: int | None
    operation_id: str | None
    run_id: str | None
    staged: dict[str, StagedChanges]
    uses: Mapping[str, ApprovedCall]
    staged_rows: Sequence[StagedRow]
    after: Sequence[Callable[[], object]]
    record: Callable[[], object] | None
    reception: Reception | None = None

    def is_earlier(self, commit: StepCommit) -> bool:
        """Return whether a commit is the result of an earlier step with the same operation id."""
        return commit.new_version <= self.expected_version

    def written_by(self, save: Callable[[StepWrite], CommittedStep]) -> CommittedStep:
        """Call ``save``, and then the calls that follow it."""
        committed = save(self)
        if not self.is_earlier(committed[0]):
            for call in self.after:
                call()
        if self.record is not None:
            # Counters of budgets are locked after every session, including a session that ``after`` locks.
            self.record()
        return committed


def default_step_id(state: SessionState) -> str:
    """Return the id of the next step of a session, if it has no other one."""
    return f"{DEFAULT_STEP}{state.step_count + 1}"


class HasParts:
    """The base of this package's stores: its handles use the parts that belong to the store."""

    @property
    def _parts(self) -> Parts:
        raise NotImplementedError


class Parts(HasParts):
    """The stores of one database and tenant, and their common transaction."""

    is_atomic = True
    """True if several calls can be one transaction, or if all are lost when the process ends."""

    sessions: StateStore

    @property
    def _parts(self) -> Parts:
        return self

    @property
    def locks(self) -> LockManager:
        raise NotImplementedError

    @property
    def usage(self) -> UsageStore:
        raise NotImplementedError

    @property
    def budgets(self) -> BudgetStoreBase:
        raise NotImplementedError

    @property
    def limits(self) -> Limits:
        raise NotImplementedError

    @property
    def connection_of_caller(self) -> BaseDatabaseWrapper | None:
        """The connection with the caller's transaction that the writes are part of, if there is one.

        Other connections cannot see these writes until that transaction is committed.
        """
        return None

    def approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, ApprovedCall]:
        """Return the version of a session and a call that was approved in it.

        Raises `NotApproved` and `ApprovalUsed`.
        """
        raise NotImplementedError

    def open_step(
        self, session_id: str, step_id: str | None, run_id: str | None, *, is_capped: bool
    ) -> OpenedStep | None:
        """Return the data with which a step begins, or ``None`` if the session does not exist.

        ``step_id`` may be the default id.
        """
        state = self.sessions.load_state(session_id)
        if state is None:
            return None
        interrupt = None if run_id is None else self.sessions.check_interrupt(session_id, run_id=run_id)
        staged = self.sessions.get_staged_changes(session_id, step_id or default_step_id(state))
        return OpenedStep(state, bool(staged), interrupt)

    def stage(self, session_id: str, step_id: str, changes: StagedChanges) -> StagedRow | None:
        """Stage a change, and return its row if the step can promote the row without reading it."""
        self.sessions.stage_changes(session_id, step_id, changes)
        return None

    def commit_step(self, step: StepWrite) -> CommittedStep:
        """Commit a step and the calls that belong to it, in one transaction if the store has transactions.

        Raises `ConflictError` if any change that the step staged is gone.
        """
        raise NotImplementedError
